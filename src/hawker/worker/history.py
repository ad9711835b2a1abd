"""What a worker keeps of what is over: machines that were destroyed, runs that ended, events, earlier versions.

They stay as long as the log has the record that wrote them last (`store.compaction`, `Kept`); this says what goes with
it. A machine that is there keeps its newest events and versions for good.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from hawker.model.machine import State
from hawker.model.rows import ClaimRow, DecisionRow, EventRow, MachineRow, Row, RunRow, VersionRow
from hawker.store.compaction import Last
from hawker.store.tx import Tx

EVENTS_KEPT = 100
"""Of a machine, the newest, however old they are."""
VERSIONS_KEPT = 20
CLAIM_KEPT_MS = 7 * 24 * 3600 * 1000
"""A client's idempotency key, for as long as any client may try again."""

Named = tuple[type[Row], str]
_RUNS = ("active", "parked")


def over(tx: Tx, rows: Collection[Last]) -> set[Named]:
    """`compaction.Over` of a worker. A destroyed machine takes its events, versions and decision with it. One that had
    been on another worker before stays: that worker may come back and must hear of it."""
    found: set[Named] = set()
    for row in rows:
        if row.kind is MachineRow:
            machine = _read(row, MachineRow)
            if machine.state is State.destroyed and machine.generation == 1:
                found |= {(MachineRow, machine.id), *_belongings(tx, machine.id)}
    for row in rows:
        if (row.kind, row.key) not in found and _is_over(tx, row):
            found.add((row.kind, row.key))
    return found


def _belongings(tx: Tx, machine: str) -> set[Named]:
    found: set[Named] = {(DecisionRow, machine)} if tx.get(DecisionRow, machine) else set()
    for kind in (EventRow, VersionRow):
        keys = tx.query(f"select id from {kind.table} where machine = ?", (machine,))
        found |= {(kind, key) for (key,) in keys}
    return found


def _is_over(tx: Tx, row: Last) -> bool:
    if row.kind is RunRow:
        return bool(_read(row, RunRow).status not in _RUNS)
    if row.kind is ClaimRow:
        return bool(_read(row, ClaimRow).at_ms < tx.now_ms - CLAIM_KEPT_MS)
    if row.kind in (EventRow, VersionRow, DecisionRow):
        machine = tx.get(MachineRow, _read(row, row.kind).machine)
        if machine is None or row.kind is DecisionRow or machine.version == row.key:
            return machine is None
        return _older(tx, row, machine.id, EVENTS_KEPT if row.kind is EventRow else VERSIONS_KEPT)
    return False


def _older(tx: Tx, row: Last, machine: str, kept: int) -> bool:
    """Than so many others of the machine. Their keys rise."""
    newer = f"select 1 from {row.kind.table} where machine = ? and id > ? limit 1 offset ?"
    return bool(tx.query(newer, (machine, row.key, kept - 1)))


def _read(row: Last, kind: type[Any]) -> Any:
    return msgspec.json.decode(row.body, type=kind)

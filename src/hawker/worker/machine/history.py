"""What a worker keeps of machines that were destroyed, and of the past of those that are there.

A machine that is there keeps its newest events and versions for good. One that was destroyed takes its events, versions
and decision with it, once the log is cut off that tells of it.
"""

from __future__ import annotations

from collections.abc import Collection

from hawker.model.machine import State
from hawker.model.rows import DecisionRow, EventRow, MachineRow, VersionRow
from hawker.store.compaction import Last, Named
from hawker.store.tx import Tx

EVENTS_KEPT = 100
"""How many events of a machine are kept, the newest, however old they are."""
VERSIONS_KEPT = 20
"""How many versions of a machine are kept, the newest."""


def over(tx: Tx, rows: Collection[Last]) -> set[Named]:
    """Which of these rows are over, and what goes with them. A machine that had been on another worker before stays:
    that worker may come back and must hear of it."""
    found: set[Named] = set()
    for row in rows:
        if row.kind is MachineRow:
            machine = row.read()
            if machine.state is State.destroyed and machine.generation == 1:
                found |= {(MachineRow, machine.id), *_belongings(tx, machine.id)}
    return found | {(row.kind, row.key) for row in rows if (row.kind, row.key) not in found and _is_over(tx, row)}


def _belongings(tx: Tx, machine: str) -> set[Named]:
    found: set[Named] = {(DecisionRow, machine)} if tx.get(DecisionRow, machine) else set()
    for kind in (EventRow, VersionRow):
        keys = tx.query(f"select id from {kind.table} where machine = ?", (machine,))
        found |= {(kind, key) for (key,) in keys}
    return found


def _is_over(tx: Tx, row: Last) -> bool:
    if row.kind not in (EventRow, VersionRow, DecisionRow):
        return False
    machine = tx.get(MachineRow, row.read().machine)
    if machine is None or row.kind is DecisionRow or machine.version == row.key:
        return machine is None
    return _older(tx, row, machine.id, EVENTS_KEPT if row.kind is EventRow else VERSIONS_KEPT)


def _older(tx: Tx, row: Last, machine: str, kept: int) -> bool:
    """Whether so many others of the machine are newer. Their keys rise."""
    newer = f"select 1 from {row.kind.table} where machine = ? and id > ? limit 1 offset ?"
    return bool(tx.query(newer, (machine, row.key, kept - 1)))

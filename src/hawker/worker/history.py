"""What a worker keeps of what is over: machines that were destroyed, runs that ended, events, earlier versions, orders.

They stay as long as the log has the record that wrote them last (`store.compaction`, `Kept`); this says what goes with
it. A machine that is there keeps its newest events and versions for good, and the end of its order.

How an order ended (`FillRow`) is for whoever asks late: the answer to its confirmation was lost, a release is repeated
(for a minute at most), a client asks again by its key (`ClaimRow`). Of a machine that is there the end is kept as long
as it is: none is made twice, and a late release still finds it. Of the others the newest are kept, and none for longer
than stated. Once such an end is forgotten, a late reservation is booked and lapses, a late release has nothing to give
back, and a client's key orders anew. So there must be more of them than orders end while anybody may still ask:
20,000 are two minutes of 160 orders a second, which is more than a worker fills.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from hawker.model.machine import State
from hawker.model.rows import ClaimRow, DecisionRow, EventRow, FillRow, MachineRow, Row, RunRow, VersionRow
from hawker.store.compaction import Last
from hawker.store.tx import Tx

EVENTS_KEPT = 100
"""Of a machine, the newest, however old they are."""
VERSIONS_KEPT = 20
ORDERS_KEPT = 20_000
"""Of orders that ended, the newest, and as many clients' keys: `worker.history_records`."""
FILL_KEPT_MS = 24 * 3600 * 1000
CLAIM_KEPT_MS = 7 * 24 * 3600 * 1000
"""A client's idempotency key, for as long as any client may try again."""
_KEPT_MS: dict[type[Row], int] = {FillRow: FILL_KEPT_MS, ClaimRow: CLAIM_KEPT_MS}

Named = tuple[type[Row], str]
_RUNS = ("active", "parked")


def over(tx: Tx, rows: Collection[Last], orders: int = ORDERS_KEPT) -> set[Named]:
    """`compaction.Over` of a worker. A destroyed machine takes its events, versions and decision with it. One that had
    been on another worker before stays: that worker may come back and must hear of it. `orders` as `ORDERS_KEPT`."""
    found: set[Named] = set()
    for row in rows:
        if row.kind is MachineRow:
            machine = _read(row, MachineRow)
            if machine.state is State.destroyed and machine.generation == 1:
                found |= {(MachineRow, machine.id), *_belongings(tx, machine.id)}
    for row in rows:
        if (row.kind, row.key) not in found and _is_over(tx, row):
            found.add((row.kind, row.key))
    for kind in (FillRow, ClaimRow):
        found |= _orders_over(tx, kind, [row for row in rows if row.kind is kind], orders)
    return found


def _orders_over(tx: Tx, kind: type[FillRow | ClaimRow], rows: Collection[Last], kept: int) -> set[Named]:
    """Those that ended too long ago, or before so many others."""
    if not rows:
        return set()
    beyond = tx.query(f"select at_ms, id from {kind.table} order by at_ms desc, id desc limit 1 offset ?", (kept,))
    newest_over = max([(tx.now_ms - _KEPT_MS[kind], ""), *beyond])
    ended = [_read(row, kind) for row in rows]
    return {(kind, row.key) for row in ended if (row.at_ms, row.key) <= newest_over and not _has_its_machine(tx, row)}


def _has_its_machine(tx: Tx, row: FillRow | ClaimRow) -> bool:
    machine = tx.get(MachineRow, row.machine) if isinstance(row, FillRow) and row.machine else None
    return machine is not None and machine.state is not State.destroyed


def _belongings(tx: Tx, machine: str) -> set[Named]:
    found: set[Named] = {(DecisionRow, machine)} if tx.get(DecisionRow, machine) else set()
    for kind in (EventRow, VersionRow):
        keys = tx.query(f"select id from {kind.table} where machine = ?", (machine,))
        found |= {(kind, key) for (key,) in keys}
    return found


def _is_over(tx: Tx, row: Last) -> bool:
    if row.kind is RunRow:
        return bool(_read(row, RunRow).status not in _RUNS)
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

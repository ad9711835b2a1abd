"""What a worker keeps of what is over: runs and orders, and what its kinds say of their things.

A row stays as long as the log has the record that wrote it last (`store.compaction`, `Kept`); this says what goes with
that record.

How an order ended (`FillRow`) is for whoever asks late: the answer to its confirmation was lost, a release is repeated
(for a minute at most), a client asks again by its key (`ClaimRow`). The worker keeps the end of an order as long as the
order's machine is there: so nobody makes a second one, and a late release still finds it. Of the other orders it keeps
the newest, and none for longer than stated. Once it has forgotten such an end, a late reservation is booked and lapses,
a late release has nothing to give back, and a client's key orders anew. So it must keep more of them than orders end
while anybody may still ask: 20,000 are two minutes of 160 orders a second, which is more than a worker fills.
"""

from __future__ import annotations

from collections.abc import Collection

from hawker.model.machine import State
from hawker.model.rows import ClaimRow, FillRow, MachineRow, Row, RunRow
from hawker.store.compaction import Last, Named
from hawker.store.tx import Tx
from hawker.worker.kinds import Kinds

ORDERS_KEPT = 20_000
"""How many orders that ended are kept, the newest, and how many clients' keys: `worker.history_records`."""
FILL_KEPT_MS = 24 * 3600 * 1000
CLAIM_KEPT_MS = 7 * 24 * 3600 * 1000
"""A client's idempotency key, for as long as any client may try again."""
_KEPT_MS: dict[type[Row], int] = {FillRow: FILL_KEPT_MS, ClaimRow: CLAIM_KEPT_MS}

_RUNS = ("active", "parked")


def over(tx: Tx, rows: Collection[Last], kinds: Kinds, orders: int = ORDERS_KEPT) -> set[Named]:
    """`compaction.Over` of a worker. `orders` as `ORDERS_KEPT`."""
    found: set[Named] = set()
    for kind in kinds:
        found |= set(kind.over(tx, rows))
    found |= {(RunRow, row.key) for row in rows if row.kind is RunRow and row.read().status not in _RUNS}
    for ended in (FillRow, ClaimRow):
        found |= _orders_over(tx, ended, [row for row in rows if row.kind is ended], orders)
    return found


def _orders_over(tx: Tx, kind: type[FillRow | ClaimRow], rows: Collection[Last], kept: int) -> set[Named]:
    """The orders that ended too long ago, or before so many others."""
    if not rows:
        return set()
    beyond = tx.query(f"select at_ms, id from {kind.table} order by at_ms desc, id desc limit 1 offset ?", (kept,))
    newest_over = max([(tx.now_ms - _KEPT_MS[kind], ""), *beyond])
    ended = [row.read() for row in rows]
    return {(kind, row.key) for row in ended if (row.at_ms, row.key) <= newest_over and not _has_its_machine(tx, row)}


def _has_its_machine(tx: Tx, row: FillRow | ClaimRow) -> bool:
    machine = tx.get(MachineRow, row.machine) if isinstance(row, FillRow) and row.machine else None
    return machine is not None and machine.state is not State.destroyed

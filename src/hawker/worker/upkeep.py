"""What a worker does every few seconds: let reservations lapse, cut off the past, and see whether the disk still takes
what it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from itertools import count

from hawker.core.beats import until_beat
from hawker.errors import StoreError
from hawker.model.guest import RESOURCES
from hawker.model.machine import State
from hawker.model.rows import ClaimRow, FillRow, MachineRow, Row, RunRow
from hawker.services import Service
from hawker.store.compaction import BATCH, Compaction, Kept, Last, Named
from hawker.store.tx import Tx
from hawker.telemetry import Metrics, get_logger
from hawker.worker import ledger
from hawker.worker.context import WorkerContext
from hawker.worker.kinds import Kinds
from hawker.worker.market import Market

SWEEP_S = 5.0
CHECKPOINT_SWEEPS = 12
"""Once in so many sweeps, from the first on, the worker brings what it has written into the database itself."""
ORDERS_KEPT = 20_000
"""How many orders that ended are kept, the newest, and how many clients' keys: `worker.history_records`."""
FILL_KEPT_MS = 24 * 3600 * 1000
CLAIM_KEPT_MS = 7 * 24 * 3600 * 1000
"""A client's idempotency key, for as long as any client may try again."""
_KEPT_MS: dict[type[Row], int] = {FillRow: FILL_KEPT_MS, ClaimRow: CLAIM_KEPT_MS}

_RUNS = ("active", "parked")


def over(tx: Tx, rows: Collection[Last], kinds: Kinds, orders: int = ORDERS_KEPT) -> set[Named]:
    """What a worker keeps of what is over: runs and orders, and what its kinds say of their things. `orders` as
    `ORDERS_KEPT`.

    A row stays as long as the log has the record that wrote it last (`store.compaction`, `Kept`); this says what goes
    with that record.

    How an order ended (`FillRow`) is for whoever asks late: the answer to its confirmation was lost, a release is
    repeated (for a minute at most), a client asks again by its key (`ClaimRow`). The worker keeps the end of an order
    as long as the order's machine is there: so nobody makes a second one, and a late release still finds it. It
    keeps the newest of the other orders, and none for longer than stated. Once it has forgotten such an end, a late
    reservation is booked and lapses, a late release has nothing to give back, and a client's key orders anew. So it
    must keep more of them than orders end while anybody may still ask: 20,000 are two minutes of 160 orders a second,
    which is more than a worker fills.
    """
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


class Upkeep(Service):
    """`failed` is set when the database cannot be written any more: only a new start can tell what it holds."""

    def __init__(self, context: WorkerContext, kinds: Kinds, market: Market) -> None:
        self.failed = asyncio.Event()
        self._context = context
        self._market = market
        settings = context.settings
        kept = Kept(seconds=settings.history_s, records=settings.history_records)
        batch = min(BATCH, 8 + kept.records // 4)  # of few records few at a time
        what_is_over = partial(over, kinds=kinds, orders=kept.records)
        self._compaction = Compaction(context.store, settings.name, kept, what_is_over, batch=batch)
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweeper")

    async def close(self) -> None:
        if self._sweeper:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    def measure(self, metrics: Metrics) -> None:
        held, capacity = ledger.held(self._context.store.read), self._context.settings.capacity
        for name in RESOURCES:
            metrics.held.labels(name).set(getattr(held, name))
            metrics.capacity.labels(name).set(getattr(capacity, name))

    async def _sweep(self) -> None:
        store, name = self._context.store, self._context.settings.name
        for number in count():
            await asyncio.sleep(until_beat(asyncio.get_running_loop().time(), SWEEP_S))
            if number % CHECKPOINT_SWEEPS == 0:
                store.checkpoint_later()
            if store.failed:
                _logger.critical("store.failed", worker=name, why=store.failed, cause="local rule: sweep")
                self.failed.set()
                return
            try:
                await self._market.sweep()
                await self._compaction.sweep()
                if store.reserve and store.reserve.given_up:
                    await asyncio.to_thread(store.reserve.make)
            except StoreError as error:
                _logger.error("sweep.failed", worker=name, why=error.message, cause="local rule: sweep")


_logger = get_logger()

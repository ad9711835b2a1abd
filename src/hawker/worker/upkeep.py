"""What a worker does every few seconds: let reservations lapse, cut off the past, and see whether the disk still takes
what it writes."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count

from hawker.core.beats import until_beat
from hawker.errors import StoreError
from hawker.model.guest import RESOURCES
from hawker.services import Service
from hawker.store.compaction import BATCH, Compaction, Kept
from hawker.telemetry import Metrics, get_logger
from hawker.worker import ledger
from hawker.worker.context import WorkerContext
from hawker.worker.history import over
from hawker.worker.kinds import Kinds
from hawker.worker.market import Market

SWEEP_S = 5.0
CHECKPOINT_SWEEPS = 12
"""Once in so many sweeps, from the first on, the worker brings what it has written into the database itself."""


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

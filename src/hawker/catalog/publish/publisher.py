"""A worker's log as an engine of the catalog takes it (`catalog.base.Source`): the outbox in the worker's database, and
what runs beside it.

The outbox writes as part of the worker's changes. The publisher flushes what waits there, drops old tombstones, and
tells the engine of each version after its commit. It knows nothing of any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import TOMBSTONES_KEPT
from hawker.errors import StoreError
from hawker.model.catalog import TIERS, Change, Position, Range, Tier, Version
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import get_logger

TOMBSTONES_KEPT_MS = 24 * 3600 * 1000
"""This is well above the longest partition that ends by itself; a reader that was away for longer takes a snapshot.
There are never more tombstones than `TOMBSTONES_KEPT`, however young they are."""
PURGE_S = 10.0
PURGE_AGAIN_S = 0.01
"""Between two commits of one purge, so that changes which somebody waits for go first."""
FLUSH_AGAIN_MS = 5000
"""How long the publisher waits with a flush that the worker's full disk refused: nothing else may ever change."""


class Publisher:
    """One worker's. Every method but `since` changes the worker's database."""

    def __init__(self, store: Store, outbox: Outbox, *, tombstones_kept: int = TOMBSTONES_KEPT) -> None:
        self._store = store
        self._outbox = outbox
        self._log = outbox.log
        self._kept = tombstones_kept
        self._opened = False
        self._flushing: asyncio.TimerHandle | None = None
        self._purging: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        store.on_change.append(outbox.on_change)

    @property
    def owner(self) -> str:
        return self._log.owner

    async def open(self, seen: Mapping[Tier, Position], ready: Callable[[Version], None]) -> None:
        """Begin a new epoch, above those of `seen`: how much of this log the engine holds. `ready` is called with each
        version after its commit, in order; the engine takes what is there before by `since`."""
        above = {tier: at.epoch for tier, at in seen.items()}

        def change(tx: Tx) -> None:
            self._outbox.open(tx, above)
            self._outbox.catch_up(tx)

        await self._store.submit(change)
        self._opened = True
        self._log.on_version.append(ready)
        self._outbox.on_due.append(self._flush_in)
        self._flush_in(0)
        self._purge_in(PURGE_S)

    async def close(self) -> None:
        """The next start tells what is published from now on."""
        self._closed = True
        for timer in (self._flushing, self._purging):
            if timer:
                timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opened:
            with suppress(StoreError):  # the next start compares all there is
                await self._store.submit(self._outbox.close)

    def since(self, tier: Tier, at: Position) -> Range:
        """What brings an engine that stands at `at` to the end of this log. Raises `StoreError`."""
        return self._log.since(self._store.read, tier, at)

    async def raise_epoch(self, tier: Tier, above: int) -> None:
        """Somebody holds more of this log than there is: begin an epoch above theirs. Raises `StoreError`."""
        await self._store.submit(lambda tx: self._log.raise_epoch(tx, tier, above))

    async def put(self, tier: Tier, change: Change, kind: str, cause: str) -> None:
        """Publish a row that no row of the worker's shows, with a record of this `kind`. Raises `StoreError`."""

        def write(tx: Tx) -> None:
            tx.record(kind, change.key, cause=cause)
            self._outbox.put(tx, tier, change)

        await self._store.submit(write)

    def _flush_in(self, ms: int) -> None:
        """At the latest so many ms from now."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + ms / 1000
        if self._flushing is not None:
            if self._flushing.when() <= at:
                return
            self._flushing.cancel()
        self._flushing = loop.call_at(at, lambda: self._start(self._flush()))

    async def _flush(self) -> None:
        self._flushing = None
        if not await self._written(self._outbox.flush):
            self._flush_in(FLUSH_AGAIN_MS)

    def _purge_in(self, seconds: float) -> None:
        if not self._closed:
            self._purging = asyncio.get_running_loop().call_later(seconds, lambda: self._start(self._purge()))

    async def _purge(self) -> None:
        def change(tx: Tx) -> None:
            for tier in TIERS:
                self._log.purge(tx, tier, tx.now_ms - TOMBSTONES_KEPT_MS, self._kept)

        before = self._floors()
        await self._written(change)
        self._purge_in(PURGE_AGAIN_S if self._floors() != before else PURGE_S)

    def _floors(self) -> list[int]:
        return [self._log.origin(self._store.read, tier).floor for tier in TIERS]

    async def _written(self, change: Callable[[Tx], object]) -> bool:
        try:
            await self._store.submit(change)
        except StoreError as error:  # a full or failed disk: the worker itself says so
            _logger.warning("catalog.not_published", owner=self.owner, error=error.message, cause="publisher")
            return False
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="publish")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


_logger = get_logger()

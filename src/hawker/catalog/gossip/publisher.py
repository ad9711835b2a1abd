"""A worker's own logs on their way into the catalog: what waits is flushed, old tombstones go, an epoch is raised when
somebody holds more than we do.

The outbox writes in the worker's database, as part of its changes; here is what runs beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.outbox import TOMBSTONES_KEPT, Outbox
from hawker.errors import NotFound, StoreError
from hawker.model.catalog import TIERS, LogId, Tier, Version
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import get_logger

TOMBSTONES_KEPT_MS = 24 * 3600 * 1000
"""Well above the longest partition that ends by itself; who was away for longer takes a snapshot. There are no more of
them than `TOMBSTONES_KEPT`, however young."""
PURGE_S = 10.0
PURGE_AGAIN_S = 0.01
"""Between two commits of one purge: those who wait for others go first."""
FLUSH_AGAIN_MS = 5000
"""How long what waits goes on waiting with the worker's disk when it was full: nothing else may ever change."""
GATHER_S = 0.005
"""What is published is shown here and told to others at once, but no more often than that: each time costs a commit of
the replica."""
FEED_AGAIN_S = 1.0
"""How long to wait with the own replica's disk when it was full or failed: nothing else may ever come that feeds it."""


class Publisher:
    """Between one outbox and one replica. `news` gets every version once it is durable."""

    def __init__(self, store: Store, outbox: Outbox, *, tombstones_kept: int = TOMBSTONES_KEPT) -> None:
        self._store = store
        self._outbox = outbox
        self._kept = tombstones_kept
        self._replica: Replica | None = None
        self._news: Callable[[Version], None] = lambda version: None
        self._flushing: asyncio.TimerHandle | None = None
        self._purging: asyncio.TimerHandle | None = None
        self._feeding: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._raising: dict[Tier, int] = {}
        self._fresh: list[Version] = []
        self._told_s = float("-inf")
        self._closed = False
        store.on_change.append(outbox.on_change)

    @property
    def owner(self) -> str:
        return self._outbox.owner

    async def open(self, replica: Replica, news: Callable[[Version], None]) -> None:
        """Begin a new epoch, above whatever the own replica holds of us, and bring the replica up to date."""
        self._replica = replica
        self._news = news
        outbox, above = self._outbox, {tier: replica.position(LogId(self.owner, tier)).epoch for tier in TIERS}
        outbox.newest_stamp = replica.newest_stamp

        def change(tx: Tx) -> None:
            outbox.open(tx, above)
            outbox.catch_up(tx)

        await self._store.submit(change)
        self._feed()
        outbox.on_published = self._published
        outbox.on_due = self._flush_in
        self._flush_in(0)
        self._purge_in(PURGE_S)

    async def close(self) -> None:
        """What is published from now on, the next start tells."""
        self._closed = True
        for timer in (self._flushing, self._purging, self._feeding):
            if timer:
                timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._replica is not None:  # it was opened
            with suppress(StoreError):  # the next start compares all there is
                await self._store.submit(self._outbox.close)

    async def forget(self, name: str, cause: str) -> None:
        """Tell everybody to drop what a node published that is gone for good. Raises `NotFound`."""
        assert self._replica is not None  # set by open
        origin = self._replica.origin(LogId(name, "global"))
        if origin is None or name == self.owner:
            raise NotFound(f"no worker is called {name}", hint="hawker workers lists them")
        epoch = origin.epoch

        def change(tx: Tx) -> None:
            tx.record("worker.forgotten", name, cause=cause)
            self._outbox.put_merged(tx, "forgotten", name, {"epoch": epoch})

        await self._store.submit(change)

    def ahead(self, tier: Tier, epoch: int) -> None:
        """Somebody holds more of our log than we have: our database is older than what we once published. With a full
        disk it is tried again when somebody says so again."""
        if epoch <= self._raising.get(tier, 0):
            return
        self._raising[tier] = epoch
        _logger.warning("catalog.ahead", owner=self.owner, tier=tier, epoch=epoch, cause="a peer holds more of us")
        self._submit(
            lambda tx: self._outbox.raise_epoch(tx, tier, epoch),
            then=self._catch_up,
            refused=lambda: self._raising.pop(tier, None),
        )

    def _published(self, version: Version) -> None:
        """After the commit, in order."""
        if not self._fresh:
            loop = asyncio.get_running_loop()
            may_s = self._told_s + GATHER_S
            loop.call_soon(self.tell) if loop.time() >= may_s else loop.call_at(may_s, self.tell)
        self._fresh.append(version)

    def tell(self) -> None:
        """Show and tell now what was published."""
        fresh, self._fresh = self._fresh, []
        if self._closed or not fresh:
            return
        self._told_s = asyncio.get_running_loop().time()
        try:
            self._show(fresh)
        except StoreError as error:  # the replica's disk, not the worker's
            self._not_shown(error)

    def _show(self, fresh: list[Version]) -> None:
        assert self._replica is not None  # set by open
        if self._replica.receive(fresh).missing:  # our own replica has lost its end in a power cut
            self._feed()
        else:
            for version in fresh:
                self._news(version)

    def _not_shown(self, error: StoreError) -> None:
        _logger.warning("catalog.not_shown", owner=self.owner, error=error.message, cause="publisher")
        if self._feeding is None:
            self._feeding = asyncio.get_running_loop().call_later(FEED_AGAIN_S, self._catch_up)

    def _catch_up(self) -> None:
        self._feeding = None
        if self._closed:
            return
        try:
            self._feed()
        except StoreError as error:
            self._not_shown(error)

    def _feed(self) -> None:
        """Bring the own replica up to our head, and tell the others how far we are."""
        assert self._replica is not None  # set by open
        reads = self._store.read
        for tier in TIERS:
            at = self._replica.position(LogId(self.owner, tier))
            self._replica.merge([self._outbox.since(reads, tier, at)])
            origin = self._outbox.origin(reads, tier)
            self._news(Version(self.owner, tier, origin.epoch, origin.head, (), origin.floor))

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
        self._flushing = loop.call_at(at, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._submit(self._outbox.flush, refused=lambda: self._flush_in(FLUSH_AGAIN_MS))

    def _purge_in(self, seconds: float) -> None:
        if not self._closed:
            self._purging = asyncio.get_running_loop().call_later(seconds, self._purge)

    def _purge(self) -> None:
        def change(tx: Tx) -> None:
            for tier in TIERS:
                self._outbox.purge(tx, tier, tx.now_ms - TOMBSTONES_KEPT_MS, self._kept)

        before = self._floors()
        self._submit(
            change,
            then=lambda: self._purge_in(PURGE_AGAIN_S if self._floors() != before else PURGE_S),
            refused=lambda: self._purge_in(PURGE_S),
        )

    def _floors(self) -> list[int]:
        return [self._outbox.origin(self._store.read, tier).floor for tier in TIERS]

    def _submit(
        self,
        change: Callable[[Tx], object],
        then: Callable[[], object] = lambda: None,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        async def run() -> None:
            try:
                await self._store.submit(change)
            except StoreError as error:  # a full or failed disk: the worker itself says so
                _logger.warning("catalog.not_published", owner=self.owner, error=error.message, cause="publisher")
                refused()
            else:
                then()

        task = asyncio.get_running_loop().create_task(run(), name="publish")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


_logger = get_logger()

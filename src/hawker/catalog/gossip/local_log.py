"""The log of this node's own worker on its way into its replica and to its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.catalog.base import Source
from hawker.catalog.gossip.replica import Replica
from hawker.errors import StoreError
from hawker.model.catalog import TIERS, LogId, Tier, Version
from hawker.telemetry import get_logger

GATHER_S = 0.005
"""The replica shows, and neighbours hear, what was published at once, but no more often than that: each time costs a
commit of the replica."""
FEED_AGAIN_S = 1.0
"""How long to wait with the own replica's disk when it was full or failed: nothing else may ever come that feeds it."""


class LocalLog:
    """Between one source and one replica. `news` gets every version once it is durable."""

    def __init__(self, source: Source, replica: Replica, news: Callable[[Version], None]) -> None:
        self.source = source
        self._replica = replica
        self._news = news
        self._feeding: asyncio.TimerHandle | None = None
        self._raising: dict[Tier, int] = {}
        self._fresh: list[Version] = []
        self._told_s = float("-inf")
        self._closed = False

    async def open(self) -> None:
        """Begin a new epoch, above whatever the own replica holds of us, and bring the replica up to date."""
        owner = self.source.owner
        seen = {tier: self._replica.position(LogId(owner, tier)) for tier in TIERS}
        await self.source.open(seen, self._published)
        self._feed()

    async def close(self) -> None:
        self._closed = True
        if self._feeding:
            self._feeding.cancel()
        await self.source.close()

    async def ahead(self, tier: Tier, epoch: int) -> None:
        """Somebody holds more of our log than we have: our database is older than what we once published. After a full
        disk it is tried again when somebody says so again."""
        if epoch <= self._raising.get(tier, 0):
            return
        self._raising[tier] = epoch
        owner = self.source.owner
        _logger.warning("catalog.ahead", owner=owner, tier=tier, epoch=epoch, cause="a peer holds more of us")
        try:
            await self.source.raise_epoch(tier, epoch)
        except StoreError as error:  # a full or failed disk: the worker itself says so
            _logger.warning("catalog.not_published", owner=owner, error=error.message, cause="an epoch")
            self._raising.pop(tier, None)
        else:
            self._catch_up()

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
            if self._replica.receive(fresh).missing:  # our own replica has lost its end in a power cut
                self._feed()
                return
        except StoreError as error:  # the replica's disk, not the worker's
            self._not_shown(error)
            return
        for version in fresh:
            self._news(version)

    def _not_shown(self, error: StoreError) -> None:
        _logger.warning("catalog.not_shown", owner=self.source.owner, error=error.message, cause="publisher")
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
        for tier in TIERS:
            found = self.source.since(tier, self._replica.position(LogId(self.source.owner, tier)))
            self._replica.merge([found])
            origin = found.origin
            self._news(Version(origin.owner, tier, origin.epoch, origin.head, (), origin.floor))


_logger = get_logger()

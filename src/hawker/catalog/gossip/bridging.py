"""Compares the global tier with other regions. Every node takes its turn, so a region compares a few times a second,
whatever its size.

Between regions that have nothing new for each other the turns become rarer, down to a fifth. A node that hears of
something new returns to the usual pace at once, and so does each region that the news reaches: news crosses no later
for the rest. The next turn finds what was lost without anybody noticing, and a turn that fails keeps the pace up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from hawker.catalog.gossip.exchange import Address
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import Replication
from hawker.catalog.tables.schema import TABLES
from hawker.client.wire import PeerUnreachable
from hawker.core.freshness import Freshness
from hawker.errors import StoreError
from hawker.model.catalog import LogId
from hawker.telemetry import get_logger

PER_S = 3.0
"""Comparisons with other regions that a region makes in a second, whatever its size."""
TURN_S = 1.0
SLOWER = 0.25
"""Each turn that brought nothing delays the next one by this part of a turn: a little, while news may still go
round."""
SLOWEST = 5.0
"""A turn comes at most this many turns late."""
AT_ONCE = 3
"""In the first turn after a rest a node compares with this many regions: it does not know what those lack that had no
turn."""
_GLOBAL = frozenset(table.name for table in TABLES if table.tier == "global")


class Bridging:
    """One node's part, in `region`. `members` tells how many nodes share the work."""

    def __init__(
        self,
        region: str,
        replica: Replica,
        replication: Replication,
        freshness: Freshness,
        rng: Random,
        members: Callable[[], int],
    ) -> None:
        self._region = region
        self._replica = replica
        self._replication = replication
        self._freshness = freshness
        self._rng = rng
        self._members = members
        self._news = asyncio.Event()
        replica.on_applied.append(self._applied)

    async def run(self) -> None:
        """Take turns, and never return."""
        quiet = 0
        while True:
            regions = AT_ONCE if await self._news_after_rest(quiet) else 1
            self._news.clear()
            well = True
            for name, address in self._some(regions):
                well = await self._compare(name, address) and well
            quiet = quiet + 1 if well and not self._news.is_set() else 0

    async def _news_after_rest(self, quiet: int) -> bool:
        """Wait for the next turn. `quiet` turns in a row brought nothing. Returns whether news has brought the turn
        about."""
        turn_s = max(TURN_S, (self._members() + 1) / PER_S)
        later_s = turn_s * min(SLOWEST - 1, quiet * SLOWER)
        if later_s and not self._news.is_set():
            try:
                async with asyncio.timeout(later_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(turn_s * self._rng.uniform(0, 0.5))  # not all nodes at once
                return True
        await asyncio.sleep(turn_s * self._rng.uniform(0.5, 1.5))
        return False

    def _some(self, regions: int) -> list[tuple[str, Address]]:
        """One worker of each of so many other regions; with one region to choose, any worker of all of them."""
        try:
            sql = "select region, name, host, port from workers where region <> ? order by name"
            others = self._replica.rows(sql, (self._region,))
        except StoreError:
            return []  # our own disk failed; it is read again with the next turn
        self._rng.shuffle(others)
        chosen: dict[str, tuple[str, Address]] = {}
        for region, name, host, port in others:
            if len(chosen) < regions:
                chosen.setdefault(region, (name, (host, port)))
        return list(chosen.values())

    async def _compare(self, name: str, address: Address) -> bool:
        """Compare with a worker. Returns whether that was possible."""
        try:
            await self._replication.catch_up(address, "global")
            self._confirm_neighbours_of(name)
        except (PeerUnreachable, StoreError) as error:
            _logger.info("catalog.bridge_failed", error=str(error), cause="local rule: bridge")
            return False
        return True

    def _applied(self, tables: tuple[str, ...]) -> None:
        if not _GLOBAL.isdisjoint(tables):
            self._news.set()

    def _confirm_neighbours_of(self, name: str) -> None:
        """Whoever was compared with knows how far the logs of its region's workers go: confirm them."""
        now = asyncio.get_running_loop().time()
        self._freshness.reached(now)
        sql = "select name from workers where region = (select region from workers where name = ?) order by name"
        for (owner,) in self._replica.rows(sql, (name,)):
            log = LogId(owner, "global")
            at = self._replica.position(log)
            self._freshness.told(log, at, at, now)


_logger = get_logger()

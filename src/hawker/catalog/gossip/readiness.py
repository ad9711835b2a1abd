"""Whether a replica knows all that its region knows, so that what it does not show does not exist.

A replica's file is written without waiting for the disk: after a power cut a host comes back with an old file, perhaps
with an empty one, and a damaged file begins empty. Until the replica has caught up, a missing row means nothing.

A replica has caught up once it has compared itself with a member of its region that has, and fetched what it lacked.
Where all members started together there is no such member. Then every worker of the region must have said how far its
logs go, since each worker is the source of truth for what it has. The replica waits a while for a worker that says
nothing, and as long for the first worker where none is known. A node that has nobody to ask is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from hawker.catalog.gossip.replica import Replica
from hawker.core.freshness import Freshness
from hawker.core.swim.members import Member
from hawker.model.catalog import TIERS, LogId, Tier

WAIT_S = 60.0
"""How long the replica waits for workers that say nothing. By then their hosts have started again, or nobody knows what
they had."""
LOOK_S = 0.02
"""How old a negative answer may be."""

_WORKERS = "select name from workers where region = ? order by name"


class Readiness:
    """One node's readiness. `anyone` says whether anybody should be there to ask; `live` gives the members that are
    believed to live."""

    def __init__(
        self,
        name: str,
        region: str,
        replica: Replica,
        freshness: Freshness,
        anyone: Callable[[], bool],
        live: Callable[[], Iterable[Member]],
    ) -> None:
        self._name = name
        self._region = region
        self._replica = replica
        self._freshness = freshness
        self._anyone = anyone
        self._live = live
        self._now = asyncio.get_running_loop().time
        self._told = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        self._resets = self._replica.resets
        self._since, self._looked_at = self._now(), float("-inf")
        self._met: set[Tier] = set()  # tiers compared with anybody of the region
        self._compared: set[Tier] = set()  # tiers compared with a member that had caught up
        self._done = False

    def compared(self, tier: Tier, complete: bool) -> None:
        """All that a member of the region has of a tier is here now. `complete`: that member has caught up itself."""
        self()
        self._met.add(tier)
        if complete:
            self._compared.add(tier)
        self._looked_at = float("-inf")
        self._told.set()

    def __call__(self) -> bool:
        """Whether the replica has caught up. Raises `StoreError`."""
        if self._resets != self._replica.resets:
            self._begin()
        now = self._now()
        if not self._done and now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._done = self._look(now)
        return self._done

    async def until_met(self) -> None:
        """Wait until the replica was compared with a member of its region, unless it knows of none. Raises
        `StoreError`."""
        while not (self() or len(self._met) == len(TIERS)) and (self._live_others() or self._known()):
            self._told.clear()
            await self._told.wait()

    def _live_others(self) -> list[Member]:
        return [member for member in self._live() if member.name != self._name]

    def _known(self) -> set[str]:
        """The other workers of the region, as the replica has them."""
        return {name for (name,) in self._replica.rows(_WORKERS, (self._region,))} - {self._name}

    def _look(self, now: float) -> bool:
        if len(self._compared) == len(TIERS):
            return True
        live, known = self._live_others(), self._known()
        if not live and not known and not self._anyone():
            return True
        if len(self._met) < len(TIERS):
            return False
        working = {member.name for member in live if "worker" in member.roles}
        waited = now >= self._since + WAIT_S
        expected = working if waited else known | working
        return all(self._heard(name, now) for name in expected) and (bool(expected) or waited)

    def _heard(self, worker: str, now: float) -> bool:
        """Whether a worker has said since the start how far its logs go, and all of that is here."""
        for tier in TIERS:
            log = LogId(worker, tier)
            at = self._freshness.standing(log, self._replica.position(log), now).confirmed_s
            if at is None or now - at < self._since:
                return False
        return True

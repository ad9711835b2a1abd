"""One request's way to a machine: at once, or held until one can take it (`hawker.proxy.base.Route`).

At the edge a machine behind another proxy stands for that proxy, which holds the request itself where the machine has
to start; at a machine's own worker there is a door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from msgspec.structs import replace

from hawker.core.routing import ANY, FULL, GONE, NOT_HERE, TRIED, Nothing, Start, Take, Wishes
from hawker.core.seats import is_open
from hawker.proxy.base import NOBODY, Header, Lease, Refused, ServicePort, Waiting
from hawker.proxy.fields import PORT
from hawker.proxy.groups.group import Group, Site
from hawker.proxy.groups.places import Place, PlaceLease
from hawker.proxy.groups.rooms import Turn
from hawker.proxy.machines.door import Door, NotOpened
from hawker.proxy.routing.common import Common

LOOK_AGAIN_S = 0.25
"""How often a held request looks by itself: rests end, and machines behind other proxies become free, without a word.
Of many that are held each looks less often."""
HELD_A_LOOK = 64


class ProxyRoute:
    """`hawker.proxy.base.Route`. With `machine` to that one alone; `within`: the request came over the backhaul, and
    does not leave this region again."""

    __slots__ = ("_common", "_header", "_machine", "_now", "_version", "_within", "app", "number", "port", "site")

    def __init__(self, common: Common, site: Site, number: int, port: ServicePort, machine: str, within: bool) -> None:
        self._common = common
        self._now = common.now
        self._version = site.version
        self._machine = machine
        self._within = within
        self._header: Header = (PORT, b"%d" % number)
        self.site = site
        self.number = number
        self.port = port
        self.app = site.app.name

    @property
    def valid(self) -> bool:
        return self._version == self.site.version and not self.site.app.stale

    def take(self, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Lease | None:
        found = self.site.at(self.number)
        if found is None:
            return None
        self.site.used = True
        group = found[0]
        if self._machine or wishes is not ANY:
            if self._machine and not self._common.is_here(self.site, self._machine):
                return None
            if not self._within and (wishes.force_regions or wishes.prefer_regions):
                return None
            wishes = self._forced(wishes)
        if group.room.queues and group.room.before(wishes.force_machine):
            return None
        seat = group.pool.take(self._now(), wishes, tried)
        if seat is None:
            return None
        place: Place = seat.data
        if seat.closing and place.keeper.closing:
            place.leave()
            return None
        return PlaceLease(place, self._header, {})

    async def obtain(
        self, wishes: Wishes = ANY, tried: Collection[str] = (), *, deadline: float, request: Waiting = NOBODY
    ) -> Lease:
        found = self._kept().at(self.number)
        if found is None:
            return await self._sent_away(wishes, tried, deadline, request)
        group, settings = found[0], self._common.settings
        self._bound(group.held)
        group.held += 1
        try:
            return await self._obtain(self._forced(wishes), tried, deadline, request)
        except TimeoutError:
            raise Refused(
                503,
                "PR03",
                f"no machine of app {self.app} took the request in time",
                retry_after_s=settings.retry_after_s,
            ) from None
        finally:
            group.held -= 1

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _forced(self, wishes: Wishes) -> Wishes:
        if self._machine:
            return Wishes(force_machine=self._machine)
        if self._within and (wishes.force_regions or wishes.prefer_regions):
            return replace(wishes, force_regions=(), prefer_regions=())
        return wishes

    async def _obtain(self, wishes: Wishes, tried: Collection[str], deadline: float, request: Waiting) -> Lease:
        loop = asyncio.get_running_loop()
        began = loop.time()
        out = {machine for machine in tried if not self._at_rest(machine)}
        failed: NotOpened | None = None
        abroad = bool(wishes.force_regions or wishes.prefer_regions) and not self._common.abroad.here_first(
            self.site, wishes
        )
        if abroad and (lease := self._away(wishes, out)):
            return lease
        turn: Turn | None = None
        try:
            if self._group().room.before(wishes.force_machine):
                turn = self._turn(None, wishes)
                await self._room(turn, deadline)
            while True:
                group = self._group()
                if self._machine:  # it may have moved since: who sent the request here chooses anew
                    self._common.must_be_here(self.site, self._machine)
                decision = group.pool.decide(loop.time(), wishes, out)
                if isinstance(decision, Take):
                    if decision.starting is not None:
                        self._common.start_beside(decision.starting, self.app, request)
                    place: Place = decision.seat.data
                    if not place.keeper.closing:
                        place.enter()
                        if turn is not None:
                            turn.called = ""
                        return PlaceLease(place, self._header, {"wait": loop.time() - began})
                elif isinstance(decision, Start):
                    place = decision.seat.data
                else:
                    lease = self._away(wishes, out) if decision is not TRIED or not self._coming(group, out) else None
                    if lease is not None:
                        return lease
                    if failed is not None and not failed.again and decision is not FULL:
                        raise failed
                    if decision is TRIED:
                        coming = self._coming(group, out)
                        if coming is None:
                            self._unless_crowded(group, out)
                            await self._pause(group, deadline)
                            out.clear()
                            continue
                        place = coming
                    elif decision.wait:
                        turn = self._turn(turn, wishes)
                        await self._room(turn, deadline)
                        continue
                    else:
                        return self._nothing(decision, failed, wishes)
                if turn is not None:
                    turn.leave()
                    turn = None
                try:
                    return await self._started(place, began, deadline, request)
                except NotOpened as error:
                    out.add(place.machine)
                    failed = error
        finally:
            if turn is not None:
                turn.leave()

    async def _started(self, place: Place, began: float, deadline: float, request: Waiting) -> Lease:
        """A lease of a machine that is started for it. Far away, its own proxy holds the request meanwhile."""
        keeper = place.keeper
        place.enter()
        if not isinstance(keeper, Door):
            return PlaceLease(place, self._header, {"wait": asyncio.get_running_loop().time() - began})
        try:
            await keeper.opened(deadline, request)
        except BaseException:
            place.leave()
            raise
        return PlaceLease(place, self._header, {"wait": asyncio.get_running_loop().time() - began, **keeper.phases})

    def _at_rest(self, machine: str) -> bool:
        """Whether it has been put to rest since it was tried: it is as good as any then, once it is started."""
        seat = self._group().pool.seats.get(machine)
        return seat is not None and isinstance(seat.data.keeper, Door) and seat.data.keeper.at_rest

    def _coming(self, group: Group, out: Collection[str]) -> Place | None:
        """A machine that has failed this request, is on its way up again, and has room for it then."""
        for machine in sorted(out):
            seat = group.pool.seats.get(machine)
            if seat is not None and isinstance(seat.data.keeper, Door) and seat.data.keeper.opening and not seat.full:
                place: Place = seat.data
                return place
        return None

    def _kept(self) -> Site:
        """The app as it is now: it may have been dropped while this request had no machine. Raises `Refused`."""
        if self.site.dropped:
            self.site = self._common.site(self.app)
            self._version = self.site.version
        return self.site

    def _group(self) -> Group:
        """As it is now: it may have been made anew while the request waited. Raises `Refused`."""
        found = self._kept().at(self.number)
        if found is None or self.site.app.gone:
            raise Refused(503, "PR02", f"app {self.app} serves port {self.number} no more")
        return found[0]

    def _turn(self, turn: Turn | None, wishes: Wishes) -> Turn:
        """The request's place among those that wait. Room that is no use to it is told to those behind it."""
        group = self._group()
        if turn is not None and turn.room is group.room:
            seat = group.pool.seats.get(turn.called)
            if seat is not None and is_open(seat):
                group.room.one(turn.called, turn.number)
            return turn
        if turn is not None:
            turn.leave()
        return group.room.join(wishes.force_machine)

    async def _room(self, turn: Turn, deadline: float) -> None:
        """Until there may be room, first come, first served. Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()
        if loop.time() < deadline:
            look_s = LOOK_AGAIN_S * (1 + turn.room.count // HELD_A_LOOK)
            await turn.wait(min(deadline, loop.time() + look_s))
        if loop.time() >= deadline:
            raise TimeoutError

    async def _pause(self, group: Group, deadline: float) -> None:
        """Every machine has failed it: all are tried again in a while."""
        now = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(deadline):
            await asyncio.sleep(min(LOOK_AGAIN_S, max(0.0, deadline - now)))
            if now + LOOK_AGAIN_S >= deadline:
                raise TimeoutError

    def _bound(self, held: int) -> None:
        """Raises `Refused`."""
        if held >= self._common.settings.queue:
            raise self._crowded(f"{held} requests of app {self.app} wait already")

    def _unless_crowded(self, group: Group, out: Collection[str]) -> None:
        """Every machine has failed it: where there are some at which as many wait as may, it is not held here instead.
        Raises `Refused`."""
        now = self._now()
        seats = (group.pool.seats.get(machine) for machine in out)
        if any(seat is not None and seat.data.crowded_until > now for seat in seats):
            raise self._crowded(f"as many requests of app {self.app} as may wait at its machines already")

    def _crowded(self, message: str) -> Refused:
        return Refused(503, "PR04", message, retry_after_s=self._common.settings.retry_after_s)

    # --- other regions -----------------------------------------------------------------------------------------------

    def _away(self, wishes: Wishes, tried: Collection[str]) -> Lease | None:
        """One of another region, where the request may go there."""
        return None if self._within else self._common.abroad.lease(self.site, wishes, tried, self._header)

    async def _sent_away(self, wishes: Wishes, tried: Collection[str], deadline: float, request: Waiting) -> Lease:
        """Of an app that is in other regions alone. While those who could take it there are left alone it is held: an
        agent that begins anew is back in a moment."""
        while (lease := self._away(wishes, tried)) is None:
            site = self.site
            resting = set() if self._within else self._common.abroad.resting(self.site, wishes)
            if not resting or self._now() + LOOK_AGAIN_S >= deadline:
                return self._nothing(NOT_HERE, None, wishes)
            self._bound(site.held)
            site.held += 1
            try:
                await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                site.held -= 1
            tried = set(tried) - resting
            if self._kept().at(self.number) is not None:
                return await self.obtain(wishes, tried, deadline=deadline, request=request)
        return lease

    def _nothing(self, decision: Nothing, failed: NotOpened | None, wishes: Wishes) -> Lease:
        if failed is not None:
            raise failed
        if not self._within and self._common.abroad.crowded(self.site, wishes):
            raise self._crowded(f"as many requests of app {self.app} as may wait in another region already")
        if (self._machine and decision is not FULL) or (self._within and decision is GONE):
            raise Refused(421, "elsewhere", decision.message)
        message = f"app {self.app}: {decision.message}"
        if decision is GONE:
            raise self._common.not_there(message, decision.code)
        raise Refused(503, decision.code, message, retry_after_s=self._common.settings.retry_after_s)

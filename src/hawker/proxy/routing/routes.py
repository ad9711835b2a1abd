"""The way of one request to a machine: at once, or held until one can take it (`hawker.proxy.base.Route`).

At the edge a machine behind another proxy stands for that proxy, which holds the request itself where the machine has
to start; at a machine's own worker there is a door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from msgspec.structs import replace

from hawker.core.pool_entries import is_open
from hawker.core.routing import ANY, FULL, GONE, NOT_HERE, TRIED, Nothing, Start, Take, Wishes
from hawker.proxy.apps.endpoints import Endpoint, EndpointLease
from hawker.proxy.apps.routed_app import EndpointGroup, RoutedApp
from hawker.proxy.apps.wait_queue import Waiter
from hawker.proxy.base import NOBODY, Header, Lease, Refused, ServicePort, Waiting
from hawker.proxy.fields import PORT
from hawker.proxy.machines.door import Door, NotOpened
from hawker.proxy.routing.context import RoutingContext

LOOK_AGAIN_S = 0.25
"""How often a held request looks by itself: backoffs end, and machines behind other proxies become free, without a
word. The more are held, the less often each looks."""
HELD_A_LOOK = 64


class ProxyRoute:
    """A `hawker.proxy.base.Route`. With `machine` it leads to that one alone; `within`: the request came over the
    backhaul, and does not leave this region again."""

    __slots__ = ("_context", "_header", "_machine", "_now", "_version", "_within", "app", "number", "port", "routed")

    def __init__(
        self, context: RoutingContext, routed: RoutedApp, number: int, port: ServicePort, machine: str, within: bool
    ) -> None:
        self._context = context
        self._now = context.now
        self._version = routed.version
        self._machine = machine
        self._within = within
        self._header: Header = (PORT, b"%d" % number)
        self.routed = routed
        self.number = number
        self.port = port
        self.app = routed.app.name

    @property
    def valid(self) -> bool:
        return self._version == self.routed.version and not self.routed.app.stale

    def take(self, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Lease | None:
        found = self.routed.at(self.number)
        if found is None:
            return None
        self.routed.used = True
        group = found[0]
        if self._machine or wishes is not ANY:
            if self._machine and not self._context.is_here(self.routed, self._machine):
                return None
            if not self._within and (wishes.force_regions or wishes.prefer_regions):
                return None
            wishes = self._forced(wishes)
        if group.wait_queue.queues and group.wait_queue.before(wishes.force_machine):
            return None
        entry = group.pool.take(self._now(), wishes, tried)
        if entry is None:
            return None
        endpoint: Endpoint = entry.data
        if entry.closing and endpoint.owner.closing:
            endpoint.leave()
            return None
        return EndpointLease(endpoint, self._header, {})

    async def obtain(
        self, wishes: Wishes = ANY, tried: Collection[str] = (), *, deadline: float, request: Waiting = NOBODY
    ) -> Lease:
        found = self._kept().at(self.number)
        if found is None:
            return await self._sent_away(wishes, tried, deadline, request)
        group, settings = found[0], self._context.settings
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
        other_regions = bool(
            wishes.force_regions or wishes.prefer_regions
        ) and not self._context.other_regions.here_first(self.routed, wishes)
        if other_regions and (lease := self._away(wishes, out)):
            return lease
        waiter: Waiter | None = None
        try:
            if self._group().wait_queue.before(wishes.force_machine):
                waiter = self._waiter(None, wishes)
                await self._room(waiter, deadline)
            while True:
                group = self._group()
                if self._machine:  # the machine may have moved: the proxy that sent the request here chooses again
                    self._context.must_be_here(self.routed, self._machine)
                decision = group.pool.decide(loop.time(), wishes, out)
                if isinstance(decision, Take):
                    if decision.starting is not None:
                        self._context.start_beside(decision.starting, self.app, request)
                    endpoint: Endpoint = decision.entry.data
                    if not endpoint.owner.closing:
                        endpoint.enter()
                        if waiter is not None:
                            waiter.called = ""
                        return EndpointLease(endpoint, self._header, {"wait": loop.time() - began})
                elif isinstance(decision, Start):
                    endpoint = decision.entry.data
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
                        endpoint = coming
                    elif decision.wait:
                        waiter = self._waiter(waiter, wishes)
                        await self._room(waiter, deadline)
                        continue
                    else:
                        return self._nothing(decision, failed, wishes)
                if waiter is not None:
                    waiter.leave()
                    waiter = None
                try:
                    return await self._started(endpoint, began, deadline, request)
                except NotOpened as error:
                    out.add(endpoint.machine)
                    failed = error
        finally:
            if waiter is not None:
                waiter.leave()

    async def _started(self, endpoint: Endpoint, began: float, deadline: float, request: Waiting) -> Lease:
        """A lease of a machine that is started for this request. On another worker, the proxy there holds the request
        meanwhile."""
        owner = endpoint.owner
        endpoint.enter()
        if not isinstance(owner, Door):
            return EndpointLease(endpoint, self._header, {"wait": asyncio.get_running_loop().time() - began})
        try:
            await owner.opened(deadline, request)
        except BaseException:
            endpoint.leave()
            raise
        return EndpointLease(
            endpoint, self._header, {"wait": asyncio.get_running_loop().time() - began, **owner.phases}
        )

    def _at_rest(self, machine: str) -> bool:
        """Whether the machine has been put to rest since it was tried: once it is started it is as good as any
        other."""
        entry = self._group().pool.entries.get(machine)
        return entry is not None and isinstance(entry.data.owner, Door) and entry.data.owner.at_rest

    def _coming(self, group: EndpointGroup, out: Collection[str]) -> Endpoint | None:
        """A machine that has failed this request, is on its way up again, and has room for it then."""
        for machine in sorted(out):
            entry = group.pool.entries.get(machine)
            if entry is not None and isinstance(entry.data.owner, Door) and entry.data.owner.opening and not entry.full:
                endpoint: Endpoint = entry.data
                return endpoint
        return None

    def _kept(self) -> RoutedApp:
        """The app as it is now: it may have been dropped while this request had no machine. Raises `Refused`."""
        if self.routed.dropped:
            self.routed = self._context.routed(self.app)
            self._version = self.routed.version
        return self.routed

    def _group(self) -> EndpointGroup:
        """The group as it is now: it may have been replaced while the request waited. Raises `Refused`."""
        found = self._kept().at(self.number)
        if found is None or self.routed.app.gone:
            raise Refused(503, "PR02", f"app {self.app} serves port {self.number} no more")
        return found[0]

    def _waiter(self, waiter: Waiter | None, wishes: Wishes) -> Waiter:
        """The waiter of this request. If it was called for room that it cannot use, the next waiter is called."""
        group = self._group()
        if waiter is not None and waiter.wait_queue is group.wait_queue:
            entry = group.pool.entries.get(waiter.called)
            if entry is not None and is_open(entry):
                group.wait_queue.one(waiter.called, waiter.number)
            return waiter
        if waiter is not None:
            waiter.leave()
        return group.wait_queue.join(wishes.force_machine)

    async def _room(self, waiter: Waiter, deadline: float) -> None:
        """Wait until there may be room, first come, first served. Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()
        if loop.time() < deadline:
            look_s = LOOK_AGAIN_S * (1 + waiter.wait_queue.count // HELD_A_LOOK)
            await waiter.wait(min(deadline, loop.time() + look_s))
        if loop.time() >= deadline:
            raise TimeoutError

    async def _pause(self, group: EndpointGroup, deadline: float) -> None:
        """Every machine has failed the request: wait before all are tried again."""
        now = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(deadline):
            await asyncio.sleep(min(LOOK_AGAIN_S, max(0.0, deadline - now)))
            if now + LOOK_AGAIN_S >= deadline:
                raise TimeoutError

    def _bound(self, held: int) -> None:
        """Raises `Refused`."""
        if held >= self._context.settings.queue:
            raise self._crowded(f"{held} requests of app {self.app} wait already")

    def _unless_crowded(self, group: EndpointGroup, out: Collection[str]) -> None:
        """Every machine has failed the request. Where as many wait at some of them as may, refuse it instead of holding
        it here. Raises `Refused`."""
        now = self._now()
        entries = (group.pool.entries.get(machine) for machine in out)
        if any(entry is not None and entry.data.crowded_until > now for entry in entries):
            raise self._crowded(f"as many requests of app {self.app} as may wait at its machines already")

    def _crowded(self, message: str) -> Refused:
        return Refused(503, "PR04", message, retry_after_s=self._context.settings.retry_after_s)

    # --- other regions -----------------------------------------------------------------------------------------------

    def _away(self, wishes: Wishes, tried: Collection[str]) -> Lease | None:
        """A lease in another region, if the request may go there."""
        return None if self._within else self._context.other_regions.lease(self.routed, wishes, tried, self._header)

    async def _sent_away(self, wishes: Wishes, tried: Collection[str], deadline: float, request: Waiting) -> Lease:
        """A lease for an app that is in other regions alone. While the proxies that could take the request are left
        alone it is held: an agent that restarts is back in a moment."""
        while (lease := self._away(wishes, tried)) is None:
            routed = self.routed
            resting = set() if self._within else self._context.other_regions.resting(self.routed, wishes)
            if not resting or self._now() + LOOK_AGAIN_S >= deadline:
                return self._nothing(NOT_HERE, None, wishes)
            self._bound(routed.held)
            routed.held += 1
            try:
                await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                routed.held -= 1
            tried = set(tried) - resting
            if self._kept().at(self.number) is not None:
                return await self.obtain(wishes, tried, deadline=deadline, request=request)
        return lease

    def _nothing(self, decision: Nothing, failed: NotOpened | None, wishes: Wishes) -> Lease:
        if failed is not None:
            raise failed
        if not self._within and self._context.other_regions.crowded(self.routed, wishes):
            raise self._crowded(f"as many requests of app {self.app} as may wait in another region already")
        if (self._machine and decision is not FULL) or (self._within and decision is GONE):
            raise Refused(421, "elsewhere", decision.message)
        message = f"app {self.app}: {decision.message}"
        if decision is GONE:
            raise self._context.not_there(message, decision.code)
        raise Refused(503, decision.code, message, retry_after_s=self._context.settings.retry_after_s)

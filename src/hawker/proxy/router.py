"""Finds the route of a request: the app by its host or its port, or what another proxy says over the backhaul."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.core.distances import Distances
from hawker.core.routing import Seat, Wishes
from hawker.errors import HawkerError, StoreError
from hawker.model import door as words
from hawker.model.regions import expand
from hawker.proxy.base import Refused, Route, ServicePort
from hawker.proxy.door import Door
from hawker.proxy.places import Place
from hawker.proxy.routes import ProxyRoute
from hawker.proxy.settings import RouterSettings
from hawker.proxy.sites import Site, Sites
from hawker.proxy.trouble import Trouble
from hawker.telemetry import get_logger

FORGET_S = 1.0
"""How long a machine that was asked to start is taken for one on its way after that was answered: its row comes."""


class ProxyRouter:
    """`hawker.proxy.base.Router`. Apps are `<app>.<domain>`; `claims` gives the app that has a public port to itself,
    "" for nobody."""

    def __init__(
        self,
        sites: Sites,
        settings: RouterSettings,
        *,
        domain: str,
        claims: Callable[[int], str],
        random: Callable[[], float],
    ) -> None:
        self.sites = sites
        self.settings = settings
        self.random = random
        self.distances = Distances(sites.region)
        self._claims = claims
        self._suffix = f".{domain}"
        self._routes: dict[tuple[int, str], ProxyRoute] = {}  # by public port and host
        self.now = asyncio.get_running_loop().time
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.trouble: dict[str, Trouble] = {}  # of other regions' workers that failed

    def find(self, port: int, host: str) -> ProxyRoute | None:
        route = self._routes.get((port, host))
        if route is not None and route.valid:
            return route
        name = self._app_of(port, host)
        route = self._routes.get((port, name + self._suffix))  # a host of its own choice, where the port is the app's
        if route is not None and route.valid:
            return route
        site = self._site(name, load=False)
        return self._route(site, port) if site else None

    async def load(self, port: int, host: str) -> ProxyRoute:
        return self._route(self.site(self._app_of(port, host)), port)

    def site(self, app: str) -> Site:
        """Raises `Refused`."""
        site = self._site(app, load=True)
        if site is None:
            raise Refused(404, "PR01", f"no app is called {app}")
        return site

    async def other(self, route: Route, app: str) -> ProxyRoute:
        assert isinstance(route, ProxyRoute)  # it came from here
        site = self._site(app, load=True)
        if site is None:
            raise Refused(502, "PA04", f"fly-replay: no app is called {app}")
        if site.app.org != route.site.app.org:
            raise Refused(502, "PA05", f"fly-replay: app {app} is another organization's")
        return self._route(site, route.number)

    def inner(self, app: str, port: int, machine: str) -> ProxyRoute:
        site = self._site(app, load=True)
        if site is None:
            raise Refused(421, "elsewhere", f"no app is called {app} here")
        if not machine:
            return self._route(site, port, within=True)
        self.must_be_here(site, machine)
        return self._route(site, port, machine=machine, within=True)

    def is_here(self, site: Site, machine: str) -> bool:
        known = site.app.machines.get(machine)
        return known is not None and known.worker == self.sites.worker

    def must_be_here(self, site: Site, machine: str) -> None:
        """Raises `Refused`."""
        if not self.is_here(site, machine):
            raise Refused(421, "elsewhere", f"machine {machine} is not on worker {self.sites.worker}")

    async def close(self) -> None:
        tasks = [*self._tasks, *(door.open() for door in self.sites.doors.values() if door.opening)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(far.close() for far in self.sites.fars.values()), return_exceptions=True)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _app_of(self, port: int, host: str) -> str:
        """The app's name. Raises `Refused`."""
        if host.endswith(self._suffix):
            name = host[: -len(self._suffix)]
            if name and "." not in name:
                return name
        if claimed := self._claims(port):
            return claimed
        raise Refused(404, "PR01", f"no app is served as {host or 'nothing'} on port {port}")

    def _site(self, name: str, *, load: bool) -> Site | None:
        try:
            return self.sites.load(name) if load else self.sites.find(name)
        except StoreError as error:
            raise Refused(503, "PR01", f"the catalog cannot be read: {error.message}", retry_after_s=1) from error

    def _route(self, site: Site, port: int, *, machine: str = "", within: bool = False) -> ProxyRoute:
        found = site.at(port)
        if found is None:
            if not site.app.elsewhere or within:
                if machine or within:
                    raise Refused(421, "elsewhere", f"app {site.app.name} serves nothing on port {port} here")
                raise Refused(404, "PR01", f"app {site.app.name} serves nothing on port {port}")
            # Its machines are in other regions, and how they serve it is known there.
            found = None
        route = ProxyRoute(self, site, port, found[1] if found else ServicePort(handlers=("http",)), machine, within)
        if not machine and not within and found is not None:
            self._routes[port, site.app.name + self._suffix] = route
            if len(self._routes) > 4 * (self.sites.directory.loaded + 16):
                self._routes = {key: each for key, each in self._routes.items() if each.valid}
        return route

    def start_beside(self, seat: Seat, app: str, request: str) -> None:
        """Have a machine started for requests to come."""
        place: Place = seat.data
        if isinstance(place.keeper, Door):
            place.keeper.open(request)
            return
        if not seat.waking:
            place.pool.waking(seat, True)
            task = asyncio.get_running_loop().create_task(
                self._wake_far(place, app, request), name=f"wake {seat.machine}"
            )
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _wake_far(self, place: Place, app: str, request: str) -> None:
        directory = self.sites.directory
        machine = self.sites.directory.find(app)
        known = machine.machines.get(place.machine) if machine else None
        worker = directory.workers.get(known.worker) if known else None
        loop = asyncio.get_running_loop()
        try:
            if worker is not None:
                await self.sites.workers.of(worker).wake(words.Wake(app=app, machine=place.machine, request=request))
        except HawkerError as error:
            _logger.info("router.not_woken", machine=place.machine, error=error.message, cause=words.AUTOSTART)
            place.pool.rest(place.seat, loop.time() + self.settings.start_again_s)
        finally:
            loop.call_later(FORGET_S, place.pool.waking, place.seat, False)

    def troubled(self, worker: str, now: float) -> bool:
        """Whether another region's worker is left alone."""
        trouble, far = self.trouble.get(worker), self.sites.fars.get(worker)
        return (trouble is not None and trouble.until > now) or (far is not None and far.away)

    def others(self, site: Site, wishes: Wishes) -> list[str]:
        """Other regions that have the app, the best first for this request."""
        order = [region for region in self.settings.regions if region in site.app.elsewhere]
        order += self.distances.nearest(region for region in site.app.elsewhere if region not in order)
        if wishes.force_regions:
            return [each for each in expand(",".join(wishes.force_regions), order) if each in order]
        if wishes.prefer_regions:
            return [each for each in expand(",".join((*wishes.prefer_regions, "any")), order) if each in order]
        return order


_logger = get_logger()

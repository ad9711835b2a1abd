"""Finds the route of a request: the app by its host or its port, or what another proxy says over the backhaul."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hawker.proxy.base import Refused, Route, ServicePort
from hawker.proxy.groups.group import Site
from hawker.proxy.routing.common import Common, NotYet
from hawker.proxy.routing.routes import ProxyRoute
from hawker.proxy.settings import RouterSettings
from hawker.proxy.sites import Sites

UNKNOWN_S = 5.0
"""How long a request is held at most whose app is not known here, while this proxy has yet to catch up."""
UNKNOWN_MOST = 1024
"""Requests that are held so."""
LOOK_S = 0.05

T = TypeVar("T")


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
        complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """`complete`: whether what the catalog does not show is not there; `held` counts requests that wait for it."""
        self._common = Common(sites, settings, random, complete)
        self.held = 0
        self.distances = self._common.abroad.distances
        self._claims = claims
        self._suffix = f".{domain}"
        self._routes: dict[tuple[int, str], ProxyRoute] = {}  # by public port and host

    def find(self, port: int, host: str) -> ProxyRoute | None:
        route = self._routes.get((port, host))
        if route is not None and route.valid:
            return route
        try:
            name = self._app_of(port, host)
            route = self._routes.get((port, name + self._suffix))  # a host of its choice, where the port is the app's
            if route is not None and route.valid:
                return route
            site = self._common.find(name)
            return self._route(site, port) if site else None
        except NotYet:
            return None  # it is waited for

    async def load(self, port: int, host: str) -> ProxyRoute:
        return await self._once_known(lambda: self._route(self._common.site(self._app_of(port, host)), port))

    async def other(self, route: Route, app: str) -> ProxyRoute:
        assert isinstance(route, ProxyRoute)  # it came from here
        site = await self._once_known(lambda: self._other(app))
        if site.app.org != route.site.app.org:
            raise Refused(502, "PA05", f"fly-replay: app {app} is another organization's")
        return self._route(site, route.number)

    def inner(self, app: str, port: int, machine: str) -> ProxyRoute:
        site = self._common.load(app)
        if site is None:
            raise Refused(421, "elsewhere", f"no app is called {app} here")
        if not machine:
            return self._route(site, port, within=True)
        self._common.must_be_here(site, machine)
        return self._route(site, port, machine=machine, within=True)

    async def close(self) -> None:
        await self._common.close()

    async def _once_known(self, look: Callable[[], T]) -> T:
        """What a look finds. While this proxy has yet to catch up it is held for a while: mostly that takes a second.
        Raises `Refused`."""
        until = self._common.now() + UNKNOWN_S
        held = False
        try:
            while True:
                try:
                    return look()
                except NotYet:
                    if self._common.now() >= until or (not held and self.held >= UNKNOWN_MOST):
                        raise
                self.held += not held
                held = True
                await asyncio.sleep(LOOK_S)
        finally:
            self.held -= held

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _app_of(self, port: int, host: str) -> str:
        """The app's name. Raises `Refused`."""
        if host.endswith(self._suffix):
            name = host[: -len(self._suffix)]
            if name and "." not in name:
                return name
        if claimed := self._claims(port):
            return claimed
        raise self._common.not_there(f"no app is served as {host or 'nothing'} on port {port}")

    def _other(self, app: str) -> Site:
        """Raises `Refused`."""
        site = self._common.load(app)
        if site is None:
            raise self._common.not_there(f"fly-replay: no app is called {app}", "PA04", 502)
        return site

    def _route(self, site: Site, port: int, *, machine: str = "", within: bool = False) -> ProxyRoute:
        found = site.at(port)
        if found is None and (within or not site.app.elsewhere):
            if within:
                raise Refused(421, "elsewhere", f"app {site.app.name} serves nothing on port {port} here")
            raise self._common.not_there(f"app {site.app.name} serves nothing on port {port}")
        # How an app is served whose machines are in other regions is known there.
        service = found[1] if found else ServicePort(handlers=("http",))
        route = ProxyRoute(self._common, site, port, service, machine, within)
        if not machine and not within and found is not None:
            self._routes[port, site.app.name + self._suffix] = route
            if len(self._routes) > 4 * (self._common.sites.directory.loaded + 16):
                self._routes = {key: each for key, each in self._routes.items() if each.valid}
        return route

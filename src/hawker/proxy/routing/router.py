"""Finds the route of a request: the app by its host or its port, or what another proxy says over the backhaul."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.routed_app import RoutedApp
from hawker.proxy.base import Refused, Route, ServicePort
from hawker.proxy.routing.context import NotYet, RoutingContext
from hawker.proxy.routing.routes import ProxyRoute
from hawker.proxy.settings import RouterSettings

UNKNOWN_S = 5.0
"""How long a request whose app is not known is held at most, while this proxy has yet to catch up."""
UNKNOWN_MOST = 1024
"""How many requests are held so."""
LOOK_S = 0.05

T = TypeVar("T")


class ProxyRouter:
    """A `hawker.proxy.base.Router`. Apps are `<app>.<domain>`; `claims` gives the app that has a public port to itself,
    "" for nobody."""

    def __init__(
        self,
        app_table: AppTable,
        settings: RouterSettings,
        *,
        domain: str,
        claims: Callable[[int], str],
        random: Callable[[], float],
        complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """`complete`: whether what the catalog does not show is not there; `held` counts requests that wait for it."""
        self._context = RoutingContext(app_table, settings, random, complete)
        self.held = 0
        self.distances = self._context.other_regions.distances
        self._claims = claims
        self._suffix = f".{domain}"
        self._routes: dict[tuple[int, str], ProxyRoute] = {}  # by public port and host

    def find(self, port: int, host: str) -> ProxyRoute | None:
        route = self._routes.get((port, host))
        if route is not None and route.valid:
            return route
        try:
            name = self._app_of(port, host)
            route = self._routes.get((port, name + self._suffix))  # any host will do where the port is the app's
            if route is not None and route.valid:
                return route
            routed = self._context.find(name)
            return self._route(routed, port) if routed else None
        except NotYet:
            return None  # `load` waits until the catalog has caught up

    async def load(self, port: int, host: str) -> ProxyRoute:
        return await self._once_known(lambda: self._route(self._context.routed(self._app_of(port, host)), port))

    async def other(self, route: Route, app: str) -> ProxyRoute:
        assert isinstance(route, ProxyRoute)  # the request came from this proxy
        routed = await self._once_known(lambda: self._other(app))
        if routed.app.org != route.routed.app.org:
            raise Refused(502, "PA05", f"fly-replay: app {app} is another organization's")
        return self._route(routed, route.number)

    def inner(self, app: str, port: int, machine: str) -> ProxyRoute:
        routed = self._context.load(app)
        if routed is None:
            raise Refused(421, "elsewhere", f"no app is called {app} here")
        if not machine:
            return self._route(routed, port, within=True)
        self._context.must_be_here(routed, machine)
        return self._route(routed, port, machine=machine, within=True)

    async def close(self) -> None:
        await self._context.close()

    async def _once_known(self, look: Callable[[], T]) -> T:
        """Look for the app. While this proxy has yet to catch up the request is held for a while: mostly that takes a
        second. Raises `Refused`."""
        until = self._context.now() + UNKNOWN_S
        held = False
        try:
            while True:
                try:
                    return look()
                except NotYet:
                    if self._context.now() >= until or (not held and self.held >= UNKNOWN_MOST):
                        raise
                self.held += not held
                held = True
                await asyncio.sleep(LOOK_S)
        finally:
            self.held -= held

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _app_of(self, port: int, host: str) -> str:
        """The name of the app at this port and host. Raises `Refused`."""
        if host.endswith(self._suffix):
            name = host[: -len(self._suffix)]
            if name and "." not in name:
                return name
        if claimed := self._claims(port):
            return claimed
        raise self._context.not_there(f"no app is served as {host or 'nothing'} on port {port}")

    def _other(self, app: str) -> RoutedApp:
        """Raises `Refused`."""
        routed = self._context.load(app)
        if routed is None:
            raise self._context.not_there(f"fly-replay: no app is called {app}", "PA04", 502)
        return routed

    def _route(self, routed: RoutedApp, port: int, *, machine: str = "", within: bool = False) -> ProxyRoute:
        found = routed.at(port)
        if found is None and (within or not routed.app.elsewhere):
            if within:
                raise Refused(421, "elsewhere", f"app {routed.app.name} serves nothing on port {port} here")
            raise self._context.not_there(f"app {routed.app.name} serves nothing on port {port}")
        # Another region knows how an app is served that has all its machines there.
        service = found[1] if found else ServicePort(handlers=("http",))
        route = ProxyRoute(self._context, routed, port, service, machine, within)
        if not machine and not within and found is not None:
            self._routes[port, routed.app.name + self._suffix] = route
            if len(self._routes) > 4 * (self._context.app_table.index.loaded + 16):
                self._routes = {key: each for key, each in self._routes.items() if each.valid}
        return route

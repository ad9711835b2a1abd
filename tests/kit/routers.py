"""A router for tests of data planes: machines that are said to be there, and what was done to them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from hawker.proxy.base import ANY, NOBODY, Address, Failure, Header, Refused, Route, ServicePort, Waiting, Wishes
from hawker.proxy.delegation import Delegate, DelegatedMachine, Delegation

HTTP = ServicePort(handlers=("http",))


class FakeLease:
    """Counted at its machine until it is released or failed."""

    def __init__(self, machine: FakeMachine, headers: tuple[Header, ...] = ()) -> None:
        self.machine = machine.name
        self.region = machine.region
        self.address = machine.address
        self.headers = headers or machine.headers
        self.phases: dict[str, float] = {"find": 0.0}
        self._at = machine
        self._over = False
        machine.in_flight += 1
        machine.most = max(machine.most, machine.in_flight)
        machine.taken += 1

    @property
    def load(self) -> bytes:
        return b"%d/20/25" % self._at.in_flight

    @property
    def others(self) -> int:
        return self._at.wanted

    def heard(self, load: bytes) -> None:
        self._at.heard.append(load)

    def release(self) -> None:
        self._end()

    def failed(self, how: Failure) -> None:
        if not self._over:
            self._at.failures.append(how)
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._at.in_flight -= 1


class FakeMachine:
    """`awake` is set where it can be taken at once; else a request that obtains it waits until somebody sets it.
    `wanted` are requests that are said to wait because it is full."""

    def __init__(
        self, name: str, address: Address, *, region: str = "ams", headers: tuple[Header, ...] = (), awake: bool = True
    ) -> None:
        self.name = name
        self.address = address
        self.region = region
        self.headers = headers
        self.awake = asyncio.Event()
        if awake:
            self.awake.set()
        self.waiting = self.carried = self.wanted = 0
        self.refuses = False
        self.in_flight = self.most = self.taken = 0
        self.failures: list[Failure] = []
        self.heard: list[bytes] = []


class FakeRoute:
    """Machines are taken in their order: the first one that is wished for, was not tried, and is awake."""

    def __init__(self, app: str, machines: list[FakeMachine], port: ServicePort = HTTP) -> None:
        self.app = app
        self.machines = machines
        self.port = port
        self.refusal: Refused | None = None

    def take(self, wishes: Wishes = ANY, tried: Collection[str] = ()) -> FakeLease | None:
        for machine in self._fit(wishes, tried):
            if machine.awake.is_set():
                return FakeLease(machine)
        return None

    async def obtain(
        self, wishes: Wishes = ANY, tried: Collection[str] = (), *, deadline: float, request: Waiting = NOBODY
    ) -> FakeLease:
        fit = self._fit(wishes, tried)
        if not fit:
            raise self.refusal or Refused(503, "PR01", "no machine of this app can take the request", retry_after_s=1)
        machine = fit[0]
        machine.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await machine.awake.wait()
        except TimeoutError:
            raise Refused(503, "PR01", "the machine did not start in time", retry_after_s=1) from None
        finally:
            machine.waiting -= 1
        return FakeLease(machine)

    def _fit(self, wishes: Wishes, tried: Collection[str]) -> list[FakeMachine]:
        fit = [
            machine
            for machine in self.machines
            if machine.name not in tried
            and machine.name != wishes.not_machine
            and wishes.force_machine in ("", machine.name)
            and (not wishes.force_regions or machine.region in wishes.force_regions)
        ]
        return sorted(
            fit, key=lambda each: (each.name != wishes.prefer_machine, each.region not in wishes.prefer_regions)
        )


class FakeRouter:
    """`routes` by host; `later` are those that have to be loaded first. Over the backhaul, routes by app."""

    def __init__(self, *routes: FakeRoute) -> None:
        self.routes = {f"{route.app}.example": route for route in routes}
        self.by_port: dict[int, FakeRoute] = {}
        self.later: set[str] = set()
        self.loads = 0

    def find(self, port: int, host: str) -> FakeRoute | None:
        if port in self.by_port and not host:
            return self.by_port[port]
        if host in self.later:
            return None
        if host not in self.routes:
            raise Refused(404, "PR01", f"nobody serves {host or 'this port'}")
        return self.routes[host]

    async def load(self, port: int, host: str) -> FakeRoute:
        await asyncio.sleep(0)
        self.loads += 1
        self.later.discard(host)
        route = self.find(port, host)
        assert route is not None
        return route

    async def other(self, route: Route, app: str) -> FakeRoute:
        if f"{app}.example" not in self.routes:
            raise Refused(404, "PA04", f"there is no app {app}")
        return self.routes[f"{app}.example"]

    def inner(self, app: str, port: int, machine: str) -> FakeRoute:
        route = self.routes.get(f"{app}.example")
        if route is None or (machine and all(each.name != machine for each in route.machines)):
            raise Refused(421, "elsewhere", f"{machine} is not here")
        return FakeRoute(app, [each for each in route.machines if machine in ("", each.name)], route.port)


class FakeDelegator:
    """Lends of each route the machine that is taken first, as long as it refuses no connection."""

    def __init__(self, router: FakeRouter) -> None:
        self._router = router
        self.delegate: Delegate | None = None
        self.slots = 20
        self.breaks: set[str] = set()
        """Apps of which nothing can be told."""

    def delegate_to(self, delegate: Delegate | None) -> None:
        self.delegate = delegate

    def changed(self, app: str) -> None:
        assert self.delegate is not None
        self.delegate.changed(app)

    async def withdraw(self, machine: str) -> bool:
        assert self.delegate is not None
        return await self.delegate.withdraw(machine)

    def delegation(self, app: str, port: int) -> Delegation | None:
        if app in self.breaks:
            raise ValueError(f"a row of app {app} makes no sense")
        route = self._router.routes.get(f"{app}.example")
        if route is None:
            return None
        first = next((each for each in route.machines if each.awake.is_set()), None)
        if first is None or first.refuses or first.headers or not self.slots:
            return Delegation(route.port, {})
        return Delegation(route.port, {first.name: DelegatedMachine(first.address, self.slots)})

    def filled(self, app: str, port: int, machine: str, slots: int, now: int, moved: bool) -> None:
        for each in self._machines(app, machine):
            each.carried = now

    def refused(self, app: str, port: int, machine: str) -> None:
        for each in self._machines(app, machine):
            each.refuses = True
            each.failures.append("refused")

    def _machines(self, app: str, machine: str) -> list[FakeMachine]:
        route = self._router.routes.get(f"{app}.example")
        return [each for each in route.machines if each.name == machine] if route else []

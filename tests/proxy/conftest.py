"""A stage for the tests of data planes: machines that are small servers, a plane before them, and users."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from typing import Any

import msgspec
import pytest
from tests.kit.http2 import Behaviour2, Upstream2, User2, hello2
from tests.kit.planes import APART, FULL, NEEDS, PLANES, Plane
from tests.kit.raw_http import Answer, Behaviour, Upstream, User, hello
from tests.kit.routers import HTTP, FakeMachine, FakeRoute, FakeRouter

from hawker.sim.platform.loop import SimLoop


class Stage:
    """`machine` adds one to the app `web`; `open` starts the plane when the first user comes."""

    def __init__(self, plane: Callable[[], Plane]) -> None:
        self.kind = plane
        self._plane: Plane | None = None
        self._users: list[User] = []
        self._upstreams: list[Upstream] = []
        self.servers: list[asyncio.Server] = []
        self.web = FakeRoute("web", [])
        self.router = FakeRouter(self.web)
        self.settings: dict[str, Any] = {"region": "ams", "token": "secret"}

    @property
    def plane(self) -> Plane:
        assert self._plane is not None
        return self._plane

    def serves(self, **changes: Any) -> None:
        """What the service's public port says."""
        self.web.port = msgspec.structs.replace(self.web.port, **changes)

    async def upstream(self, behaviour: Behaviour = hello) -> Upstream:
        upstream = Upstream(behaviour)
        await upstream.open()
        self._upstreams.append(upstream)
        return upstream

    async def machine(
        self, behaviour: Behaviour = hello, name: str = "", *, route: FakeRoute | None = None, **more: Any
    ) -> Upstream:
        """A machine of the app `web`, or of `route`'s."""
        upstream = await self.upstream(behaviour)
        machines = (route or self.web).machines
        machines.append(FakeMachine(name or f"m{len(machines) + 1}", upstream.address, **more))
        return upstream

    def app(self, name: str) -> FakeRoute:
        """Another app, without machines yet."""
        route = self.router.routes[f"{name}.example"] = FakeRoute(name, [], HTTP)
        return route

    async def open(self) -> Plane:
        if self._plane is None:
            self._plane = self.kind()
            await self._plane.open(self.router, self.settings)
        return self._plane

    async def user(
        self, to: str = "", source: str = "", *, tls: ssl.SSLContext | None = None, name: str = "web.example"
    ) -> User:
        """`to`: "http" (public port 80), "tls" (443), "backhaul" or "own" (5432). `tls`: by this for `name`."""
        plane = await self.open()
        user = await User.at(getattr(plane, to or ("tls" if tls else "http")), source, tls, name)
        self._users.append(user)
        return user

    async def ask(self, text: str, body: bytes = b"") -> Answer:
        """One request on a connection of its own."""
        user = await self.user()
        return await user.ask(text, body)

    async def close(self) -> None:
        for user in self._users:
            await user.close()
        if self._plane is not None:
            await self._plane.close()
        for upstream in self._upstreams:
            await upstream.close()
        for server in self.servers:
            server.close()
        for route in self.router.routes.values():
            left = {machine.name: machine.in_flight for machine in route.machines if machine.in_flight}
            assert not left, f"in flight at {left}, although no request is under way"
        for upstream in self._upstreams:
            assert not upstream.errors, upstream.errors


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `virtual_time` run on the simulator's loop, and so do their fixtures."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": SimLoop}
    return {"asyncio": asyncio.new_event_loop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes tests out that a plane has no part in, and marks those that it has only in the full run."""
    ours = [item for item in items if isinstance(item, pytest.Function)]
    for item in ours:
        if _is_of(item, FULL):
            item.add_marker(pytest.mark.full)
    out = [item for item in ours if _is_of(item, APART)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _is_of(item: pytest.Function, named: Mapping[str, Container[str]]) -> bool:
    """Whether its module, the test, or the test with its parameter is named for its plane."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return False
    plane = callspec.params.get("stage", "")
    one = f"{item.originalname}[{callspec.id.removeprefix(f'{plane}-')}]"
    module = item.module.__name__.rpartition(".")[2]
    return any(name in named.get(plane, ()) for name in (module, item.originalname, one))


@pytest.fixture(params=sorted(PLANES))
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """On every data plane. When the test is over, nothing may be in flight, nothing that was sent to a machine
    may have been invalid, and no callback may have failed."""
    if (needed := NEEDS.get(request.param)) and shutil.which(needed) is None:
        pytest.skip(f"the program {needed} is not installed")
    stage = Stage(PLANES[request.param])
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: failures.append(f"{context['message']}: {context.get('exception')!r}")
    )
    yield stage
    await stage.close()
    assert not failures, failures


Connect = Callable[..., Awaitable[User2]]
Add = Callable[..., Awaitable[Upstream2]]


@pytest.fixture
async def connect(stage: Stage) -> AsyncIterator[Connect]:
    """Connects a user of HTTP/2."""
    users: list[User2] = []

    async def at(**more: object) -> User2:
        users.append(await User2.at((await stage.open()).http, **more))  # type: ignore[arg-type]
        return users[-1]

    yield at
    for user in users:
        await user.close()


@pytest.fixture
async def h2_machine(stage: Stage) -> AsyncIterator[Add]:
    """Adds one that speaks HTTP/2 to the app `web`."""
    stage.serves(h2_backend=True)
    upstreams: list[Upstream2] = []

    async def add(behaviour: Behaviour2 = hello2, **more: Any) -> Upstream2:
        upstream = Upstream2(behaviour, **more)
        await upstream.open()
        upstreams.append(upstream)
        machines = stage.web.machines
        machines.append(FakeMachine(f"m{len(machines) + 1}", upstream.address))
        return upstream

    yield add
    await stage.close()
    for upstream in upstreams:
        await upstream.close()
        assert not upstream.errors, upstream.errors

"""HTTP/2 among many: nobody who takes little stops the others, nor keeps a place by it, and no answer is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.kit.http2 import Behaviour2, Upstream2, User2, Visit2, hello2
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

# HAProxy's own HTTP/2 is not ours to test; where it hands on, it is to this plane.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

Connect = Callable[..., Awaitable[User2]]


@pytest.fixture
async def connect(stage: Stage) -> AsyncIterator[Connect]:
    users: list[User2] = []

    async def at(**more: object) -> User2:
        users.append(await User2.at((await stage.open()).http, **more))  # type: ignore[arg-type]
        return users[-1]

    yield at
    for user in users:
        await user.close()


@pytest.fixture
async def machine(stage: Stage, connect: Connect) -> AsyncIterator[Callable[..., Awaitable[Upstream2]]]:
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


async def test_many_slow_readers_stop_nobody_else_at_their_machine(
    stage: Stage, connect: Connect, machine: Callable[..., Awaitable[Upstream2]]
) -> None:
    """Their answers share one connection to it, and may together be held up with far more than its first window."""

    async def long(visit: Visit2) -> None:
        if visit[":path"] == "/small":
            await hello2(visit)
        else:
            await visit.head()
            await visit.send(b"x" * 1_000_000, ended=True)

    upstream = await machine(long)
    slow = [(user, await user.begin("GET /")) for user in [await connect(eager=False) for _ in range(12)]]
    other = await connect()
    await until(lambda: len(upstream.visits) == 12)
    h2 = upstream.visits[0]._link.h2
    await until(lambda: not any(h2.local_flow_control_window(visit.stream) for visit in upstream.visits))
    for _ in range(3):
        assert (await other.ask("GET /small")).body == b"hello"
    assert upstream.connections == 1
    for user, stream in slow:
        user.eager = True
        user.h2.increment_flow_control_window(1 << 24)
        user.h2.increment_flow_control_window(1 << 24, stream)
        await user.send()
    for user, stream in slow:
        assert len((await user.answer(stream)).body) == 1_000_000

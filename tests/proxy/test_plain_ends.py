"""Users of plain TCP services who leave, or say no more, before there is a machine for them."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.raw_http import LIMIT_S, User
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

from hawker.proxy.base import ServicePort
from hawker.proxy.embedded.tcp import TcpConnection


class Service:
    """A machine that says "hello" first, then what it hears to its end, and who it heard it from."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.machine: FakeMachine

    async def open(self, stage: Stage, *, awake: bool = False) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        stage.servers.append(server)
        route = stage.router.by_port[5432] = stage.app("db")
        route.port = ServicePort()
        self.machine = FakeMachine("d1", server.sockets[0].getsockname(), awake=awake)
        route.machines.append(self.machine)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello ")
        data = await reader.read()
        self.heard.append(data)
        writer.write(data.upper())
        writer.close()


async def held(stage: Stage, service: Service) -> User:
    user = await stage.user("own")
    await until(lambda: service.machine.waiting == 1)
    return user


@pytest.mark.parametrize("way", ["closes", "resets", "resets after it spoke"])
async def test_who_leaves_while_a_machine_wakes_is_noticed_at_once(stage: Stage, way: str) -> None:
    """The machine may take minutes, and its place is for somebody else then."""
    service = Service()
    await service.open(stage)
    user = await held(stage, service)
    if "spoke" in way:
        await user.send(b"early")
    if way == "closes":
        await user.close()
    else:
        user.reset()
    await until(lambda: service.machine.waiting == 0)
    service.machine.awake.set()
    other = await stage.user("own")
    other.end()
    assert await other.bytes(6) == b"hello "
    await until(lambda: service.machine.in_flight == 0)
    assert service.heard == [b""]
    assert service.machine.taken == 1


async def test_who_left_after_it_spoke_is_not_waited_for_long(stage: Stage) -> None:
    stage.settings["half_closed_s"] = 0.1
    service = Service()
    await service.open(stage)
    user = await held(stage, service)
    await user.send(b"early")
    await user.close()
    await until(lambda: service.machine.waiting == 0)
    assert not service.heard


async def test_who_says_no_more_still_gets_what_the_machine_says(stage: Stage) -> None:
    service = Service()
    await service.open(stage)
    user = await held(stage, service)
    await user.send(b"early")
    user.end()
    service.machine.awake.set()
    assert await user.bytes(11) == b"hello EARLY"
    assert await user.ended() == "closed"
    assert service.heard == [b"early"]


async def test_who_never_says_anything_still_gets_what_the_machine_says(stage: Stage) -> None:
    service = Service()
    await service.open(stage, awake=True)
    for _ in range(20):
        user = await stage.user("own")
        user.end()
        assert await user.bytes(6) == b"hello "
        assert await user.ended() == "closed"
    assert service.heard == [b""] * 20


async def test_what_is_said_early_is_kept_up_to_a_limit_and_passes_whole(stage: Stage) -> None:
    service = Service()
    await service.open(stage)
    user = await held(stage, service)
    data = bytes(range(97, 123)) * 400_000
    sending = asyncio.create_task(user.send(data))
    (connection,) = stage.plane.context.connections
    assert isinstance(connection, TcpConnection)
    await until(lambda: len(connection._early) > 0)
    assert len(connection._early) < 1 << 20
    service.machine.awake.set()
    got = asyncio.create_task(user.bytes(len(data) + 6))
    await sending
    user.end()
    assert await asyncio.wait_for(got, LIMIT_S) == b"hello " + data.upper()

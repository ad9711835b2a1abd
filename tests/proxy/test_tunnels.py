"""Bytes both ways: upgrades such as WebSocket, and plain TCP services."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from tests.kit.raw_http import Visit, head, saying
from tests.kit.routers import FakeMachine, FakeRoute
from tests.kit.waiting import at_rest, until
from tests.proxy.conftest import Stage

from hawker.proxy.base import ServicePort

ASKED = "GET /chat | Connection: keep-alive, Upgrade | Upgrade: websocket | Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


async def shouting(visit: Visit) -> None:
    """Switches protocols, and says everything back in capitals."""
    assert (visit["connection"], visit["upgrade"]) == ("upgrade", "websocket")
    await visit.send(SWITCHED + b"first ")
    visit.complete = True
    early = visit.surplus
    while early or (early := await visit.reader.read(1 << 16)):
        await visit.send(early.upper())
        early = b""
    await visit.send(b"bye")
    visit.close()


async def test_an_upgrade_passes_and_bytes_after_it(stage: Stage) -> None:
    await stage.machine(shouting)
    user = await stage.user()
    await user.send(head(ASKED) + b"early ")
    answer = await user.head(upgrade=True)
    assert (answer.status, answer["connection"], answer["upgrade"]) == (101, "upgrade", "websocket")
    assert answer["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert await user.bytes(12) in (b"first EARLY ", b"EARLY first ")
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"
    assert stage.web.machines[0].in_flight == 1
    user.end()
    assert await user.bytes(3) == b"bye"
    assert await user.ended() == "closed"
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_an_upgrade_that_the_machine_does_not_want_is_an_ordinary_answer(stage: Stage) -> None:
    await stage.machine(saying(b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno"))
    user = await stage.user()
    await user.send(head(ASKED))
    assert (await user.answer()).body == b"no"
    assert (await user.ask("GET /")).body == b"no"


@pytest.mark.parametrize("text", ["GET / | Upgrade: websocket", "GET / | Connection: upgrade | Upgrade: h2c"])
async def test_an_upgrade_that_is_not_meant_for_the_machine_does_not_pass(stage: Stage, text: str) -> None:
    machine = await stage.machine()
    assert (await stage.ask(text)).status == 200
    assert machine.visits[0].all("upgrade") == []


@pytest.mark.parametrize("who", ["user", "machine"])
async def test_a_tunnel_that_breaks_on_one_side_breaks_on_the_other(stage: Stage, who: str) -> None:
    ended = asyncio.Event()

    async def waiting(visit: Visit) -> None:
        await visit.send(SWITCHED)
        visit.complete = True
        if who == "machine":
            visit.reset()
        else:
            try:
                await visit.reader.read()
            except ConnectionError:
                ended.set()
            visit.close()

    await stage.machine(waiting)
    user = await stage.user()
    await user.send(head(ASKED))
    await user.head(upgrade=True)
    if who == "user":
        user.reset()
        await asyncio.wait_for(ended.wait(), 5)
    else:
        assert await user.ended() == "reset"


async def test_a_silent_upgrade_ends_after_the_services_idle_time(stage: Stage) -> None:
    stage.serves(idle_timeout_s=0.5)
    await stage.machine(shouting)
    user = await stage.user()
    await user.send(head(ASKED))
    await user.head(upgrade=True)
    await user.bytes(6)
    assert await user.ended() in ("reset", "closed")


async def plain_machine(stage: Stage, **port: Any) -> tuple[FakeMachine, list[bytes]]:
    """A machine of a plain TCP service: it says back in capitals what it gets. Returns what it was sent, too."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.append(data)
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"bye")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stage.servers.append(server)
    route = stage.router.by_port[5432] = stage.app("db")
    route.port = ServicePort(**port)
    machine = FakeMachine("d1", server.sockets[0].getsockname())
    route.machines.append(machine)
    return machine, seen


async def test_bytes_of_a_plain_service_pass_both_ways(stage: Stage) -> None:
    machine, _ = await plain_machine(stage)
    user = await stage.user("own")
    for word in (b"one", b"two", b"three"):
        await user.send(word)
        assert await user.bytes(len(word)) == word.upper()
    assert machine.in_flight == 1
    user.end()
    assert await user.bytes(3) == b"bye"
    assert await user.ended() == "closed"
    await until(lambda: machine.in_flight == 0)


async def test_much_passes_both_ways_at_once(stage: Stage) -> None:
    await plain_machine(stage)
    user = await stage.user("own")
    data = bytes(range(97, 123)) * 200_000
    sending = asyncio.create_task(user.send(data))
    got = await user.bytes(len(data))
    await sending
    assert hashlib.sha256(got).digest() == hashlib.sha256(data.upper()).digest()


async def test_a_plain_service_that_reads_slowly_slows_its_user_down(stage: Stage) -> None:
    go = asyncio.Event()
    got = 0

    async def reluctant(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await go.wait()
        while data := await reader.read(1 << 20):
            got += len(data)
        writer.close()

    machine, _ = await plain_machine(stage)
    server = await asyncio.start_server(reluctant, "127.0.0.1", 0)
    stage.servers.append(server)
    machine.address = server.sockets[0].getsockname()
    user = await stage.user("own")
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(32):
            await user.send(bytes(1 << 20))
            sent += 1
        user.end()

    flooding = asyncio.create_task(flood())
    assert await at_rest(lambda: sent) < 24
    go.set()
    await flooding
    assert await user.ended() == "closed"
    assert got == 32 << 20


async def test_a_plain_connection_is_held_until_a_machine_is_awake(stage: Stage) -> None:
    machine, seen = await plain_machine(stage)
    machine.awake.clear()
    user = await stage.user("own")
    await user.send(b"early")
    await until(lambda: machine.waiting == 1)
    assert seen == []
    machine.awake.set()
    assert await user.bytes(5) == b"EARLY"


async def test_a_plain_connection_that_nobody_takes_is_ended(stage: Stage) -> None:
    machine, _ = await plain_machine(stage)
    stage.router.by_port[5432].machines.clear()
    user = await stage.user("own")
    assert await user.ended() in ("closed", "reset")
    assert machine.in_flight == 0


async def test_a_plain_connection_goes_to_the_next_machine_when_the_first_refuses(stage: Stage) -> None:
    machine, _ = await plain_machine(stage)
    dead = await stage.machine(route=FakeRoute("other", []))
    await dead.stop()
    stage.router.by_port[5432].machines.insert(0, FakeMachine("d0", dead.address))
    user = await stage.user("own")
    await user.send(b"hello")
    assert await user.bytes(5) == b"HELLO"
    assert machine.taken == 1


async def test_a_plain_service_may_be_told_in_text_who_connects(stage: Stage) -> None:
    _, seen = await plain_machine(stage, proxy_protocol="v1")
    user = await stage.user("own", source="127.0.0.5")
    port = user.writer.get_extra_info("sockname")[1]
    await user.send(b"hello")
    await until(lambda: b"hello" in b"".join(seen))
    assert b"".join(seen) == f"PROXY TCP4 127.0.0.5 127.0.0.1 {port} {stage.plane.own[1]}\r\nhello".encode()


async def test_a_plain_service_may_be_told_in_binary_who_connects(stage: Stage) -> None:
    _, seen = await plain_machine(stage, proxy_protocol="v2")
    user = await stage.user("own", source="127.0.0.5")
    port = user.writer.get_extra_info("sockname")[1]
    await user.send(b"hello")
    await until(lambda: b"hello" in b"".join(seen))
    ports = port.to_bytes(2, "big") + stage.plane.own[1].to_bytes(2, "big")
    expected = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes((127, 0, 0, 5, 127, 0, 0, 1)) + ports
    assert b"".join(seen) == expected + b"hello"

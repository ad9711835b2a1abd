"""HTTP/2 as a strict reader of RFC 9113 takes it: what must not become a second answer, or another request's harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import PingFrame, SettingsFrame
from tests.kit.http2 import Visit2, head2, hello2
from tests.kit.raw_http import LIMIT_S, Visit
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Add, Connect, Stage

# HAProxy's own HTTP/2 is not ours to test; where it hands on, it is to this plane.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstole"


# --- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [(204,), (304,), (304, (b"content-length", b"%d" % len(SECOND)))],
    ids=["204", "304", "304 with a length"],
)
async def test_an_answer_that_has_no_body_has_none(stage: Stage, h2_machine: Add, fields: tuple[Any, ...]) -> None:
    """To a user of HTTP/1.1 what follows such a head would be the next answer."""

    async def talking(visit: Visit2) -> None:
        if visit[":path"] == "/next":
            await hello2(visit)
            return
        status, *more = fields
        await visit.head(status, *more)
        await visit.send(SECOND, ended=True)

    await h2_machine(talking)
    user = await stage.user()
    await user.send(b"GET / HTTP/1.1\r\nHost: web.example\r\n\r\n")
    came = b""
    with contextlib.suppress(ConnectionError):
        while b"stole" not in came and b"hello" not in came:
            data = await asyncio.wait_for(user.reader.read(1 << 16), LIMIT_S)
            if not data:
                break
            came += data
            if came.count(b"\r\n\r\n") == 1:
                await user.send(b"GET /next HTTP/1.1\r\nHost: web.example\r\n\r\n")
    assert b"stole" not in came


async def test_an_empty_body_that_is_said_to_be_empty_has_one_framing(stage: Stage, h2_machine: Add) -> None:
    async def empty(visit: Visit2) -> None:
        await visit.head(200, (b"content-length", b"0"))
        await visit.end()

    await h2_machine(empty)
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("GET /")
        assert (answer.status, answer.body, answer["content-length"]) == (200, b"", "0")
        assert not answer.all("transfer-encoding")


async def test_a_machine_of_http2_switches_to_nothing(stage: Stage, h2_machine: Add) -> None:
    """101 is not there in HTTP/2 (RFC 9113, 8.6). Told to a user it would end what is HTTP of its connection."""

    async def switching(visit: Visit2) -> None:
        await visit.head(101)
        await hello2(visit)

    await h2_machine(switching)
    answer = await stage.ask("GET /")
    assert (answer.status, answer.interim, b"PC03" in answer.body) == (502, [], True)


async def test_a_connection_that_nobody_waits_for_any_more_is_closed(stage: Stage) -> None:
    """Who asked for it has left before the machine spoke."""
    stage.settings["pool_idle_s"] = 0.1
    stage.serves(h2_backend=True)
    go, ended = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(SettingsFrame(0).serialize())
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    stage.servers.append(server)
    stage.web.machines.append(FakeMachine("m1", server.sockets[0].getsockname()))
    stage.settings["connect_timeout_s"] = LIMIT_S
    user = await stage.user()
    await user.send(b"GET / HTTP/1.1\r\nHost: web.example\r\n\r\n")
    await until(lambda: stage.web.machines[0].in_flight == 1)
    user.reset()
    await until(lambda: stage.web.machines[0].in_flight == 0)
    go.set()
    await asyncio.wait_for(ended.wait(), LIMIT_S)


async def test_a_machine_that_has_no_end_of_pings_and_takes_no_answer_is_cut_off(stage: Stage) -> None:
    """What is to be said to it is not kept without end."""
    stage.settings |= {"head_bytes": 1024, "h2_streams": 4, "window_bytes": 4096}
    stage.serves(h2_backend=True)
    pings = PingFrame(0, b"12345678").serialize() * 100

    async def flooding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
        writer.write(SettingsFrame(0).serialize())
        (link,) = await links()
        link.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with contextlib.suppress(ConnectionError):
            while not link.ended:
                writer.write(pings)
                await writer.drain()
        writer.transport.abort()

    async def links() -> list[Any]:
        pool = stage.plane.context.upstreams.h2
        await until(lambda: any(pool._links.values()))
        return [link for every in pool._links.values() for link in every]

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server = await asyncio.start_server(flooding, sock=listening)
    stage.servers.append(server)
    stage.web.machines.append(FakeMachine("m1", server.sockets[0].getsockname()))
    answer = await stage.ask("POST /")
    assert (answer.status, b"takes nothing" in answer.body) == (502, True)


# --- users -----------------------------------------------------------------------------------------------------------


async def test_a_request_that_is_taken_back_at_once_harms_no_other(stage: Stage, connect: Connect) -> None:
    """It is answered by the proxy itself when the end of its stream is known already, but not looked at yet."""
    go = asyncio.Event()

    async def slow(visit: Visit) -> None:
        await go.wait()
        await visit.answer(b"finished")

    await stage.machine(slow)
    user = await connect()
    stream = await user.begin("GET /")
    await until(lambda: stage.web.machines[0].in_flight == 1)
    for text in ("GET / | :authority: nobody.example", "GET /a b", "GET / | expect: more"):
        other = user.h2.get_next_available_stream_id()
        user.h2.send_headers(other, head2(text), end_stream=False)
        user.h2.reset_stream(other, ErrorCodes.CANCEL)
        await user.send()
    go.set()
    assert (await user.answer(stream)).body == b"finished"

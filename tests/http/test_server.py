"""What a server keeps of those who say nothing, or too much; and one that cannot begin leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.host import live
from hawker.http.server import HEAD_BYTES_MAX, HEAD_S, Server, serve


async def app(scope: Scope, receive: Receive, send: Send) -> None: ...


@virtual_time
async def test_a_server_whose_address_is_taken_keeps_no_timer() -> None:
    host = virtual_host()
    asked = 0

    class Counting:
        def now_ms(self) -> int:
            nonlocal asked
            asked += 1
            return host.now_ms()

    server = Server(app, Counting())  # type: ignore[arg-type]
    with pytest.raises((OSError, NotImplementedError)):
        await server.open(("192.0.2.1", 80))  # of no interface
    before = asked
    await asyncio.sleep(10)
    assert asked == before


TCP_REPAIR = 19


async def answering(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    body = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection to a server over the machine's loopback."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = await serve(answering, listening, live())
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        await server.close()


@pytest.mark.root
async def test_a_client_that_goes_without_a_word_is_looked_after() -> None:
    """As a laptop that is closed. What was written to it for nothing is not needed to notice it."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = asyncio.Event()

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    server = await serve(silent, listening, live())
    client = socket.create_connection(listening.getsockname())
    client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    client.setblocking(False)
    assert b" 200 " in await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1000), 50)
    (connection,) = server._state.connections
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    quiet_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    quiet_s += sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * sock.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPCNT
    )
    assert quiet_s <= 120
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)  # a test has less time
    client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    client.close()  # nothing is sent for it
    await asyncio.wait_for(ended.wait(), 50)
    await server.close()


async def sent(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> int:
    """How many bytes were taken before the other side wanted no more."""
    count = 0
    with suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            count += len(piece)
    return count


ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"x-more: %s\r\n" % (b"x" * 8000)),
    "a header": (b"GET / HTTP/1.1\r\nx-more: ", b"x" * 8000),
    "a name": (b"GET / HTTP/1.1\r\n", b"x" * 8000),
    "a path": (b"GET /", b"x" * 8000),
    "a second head": (b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\n", b"x-more: %s\r\n" % (b"x" * 8000)),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_head_without_end_is_cut_off(what: str) -> None:
    """From anybody, before any token was seen: all of it was kept, in memory."""
    first, again = ENDLESS[what]
    async with connected() as (reader, writer):
        most = 64 << 20
        taken = await sent(writer, itertools.chain([first], itertools.repeat(again, most // len(again))))
        assert taken < most, "the connection was closed, and the rest was in the sockets' buffers"
        with suppress(ConnectionError):  # an answer may be lost when its connection is closed with bytes unread
            await reader.read()


async def test_a_large_body_and_many_requests_on_one_connection_are_no_head_without_end() -> None:
    size = 3 * HEAD_BYTES_MAX
    head = b"POST / HTTP/1.1\r\nhost: a\r\nx-large: %s\r\ncontent-length: %d\r\n\r\n" % (b"x" * 60_000, size)
    async with connected() as (reader, writer):
        for _ in range(8):
            writer.write(head + bytes(size) + head[:-7])  # the next one begins with the end of this one
            said = await reader.readuntil(b"%d" % size)
            assert said.startswith(b"HTTP/1.1 200 ")
            writer.write(head[-7:] + bytes(size))
            assert (await reader.readuntil(b"%d" % size)).startswith(b"HTTP/1.1 200 ")


class Waiting(asyncio.Transport):
    """A connection over which nothing comes by itself."""

    closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nhost: a\r\n"])
@virtual_time
async def test_a_head_that_does_not_come_is_waited_for_no_longer_than_its_time(begun: bytes) -> None:
    protocol, connection = Server(answering, virtual_host())._protocol(), Waiting()
    protocol.connection_made(connection)
    await asyncio.sleep(HEAD_S - 1)
    if begun:
        protocol.data_received(begun)
    assert not connection.is_closing()
    await asyncio.sleep(2)
    assert connection.is_closing()
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    "whole", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n"]
)
@virtual_time
async def test_a_request_may_take_longer_than_its_head(whole: bytes) -> None:
    protocol, connection = Server(answering, virtual_host())._protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(whole[:5])
    await asyncio.sleep(1)
    protocol.data_received(whole[5:])
    await asyncio.sleep(HEAD_S + 1)
    assert not connection.is_closing()
    protocol.data_received(bytes(9) + whole[:5] if b"POST" in whole else whole[:5])
    await asyncio.sleep(HEAD_S - 1)
    assert not connection.is_closing()
    await asyncio.sleep(2)
    assert connection.is_closing(), "the next head has its time, too"
    protocol.connection_lost(None)

"""What a server keeps of those who say nothing, or too much, or come in thousands; and one that cannot begin leaves
nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.kit.virtual_time import virtual_host, virtual_time
from tests.kit.waiting import until

from hawker.core.connection_limits import ConnectionLimits
from hawker.host import live
from hawker.http.server import BODY_LEAST, BODY_S, HEAD_BYTES_MAX, HEAD_S, LINGER_S, Server, serve
from hawker.listening import ACCEPT_FAILED, tell_of_accepts_once


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


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    """Its head, and a piece of its body for each that it is sent; a second one comes in the same turn."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": message["body"].upper(), "more_body": True})
        await send({"type": "http.response.body", "body": b"!", "more_body": more})


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("served", "asked", "ends"),
    [
        (answering, [b"content-length: 3\r\n\r\nabc"], [b"\r\n\r\n3"]),
        (streaming, [b"content-length: 3\r\n\r\n", b"abc"], [b"\r\n\r\n", b"3\r\nABC\r\n1\r\n!\r\n0\r\n\r\n"]),
        (streaming, [b"content-length: 6\r\n\r\nabc", b"def"], [b"\r\n1\r\n!\r\n", b"\r\n1\r\n!\r\n0\r\n\r\n"]),
    ],
)
async def test_what_is_said_in_one_turn_leaves_in_one_piece(
    served: ASGIApp, asked: list[bytes], ends: list[bytes]
) -> None:
    """A head and its body were two system calls, and woke whoever reads twice."""
    left: list[bytes] = []
    protocol = Server(served, live()).protocol()

    class Sink(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            left.append(bytes(data))

        def is_closing(self) -> bool:
            return False

        def pause_reading(self) -> None: ...
        def resume_reading(self) -> None: ...

    protocol.connection_made(Sink())
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\n")
    for number, piece in enumerate(asked):
        protocol.data_received(piece)
        await until(lambda number=number: len(left) > number)  # type: ignore[misc]
    assert [piece.startswith(HEAD) for piece in left] == [True, *(False for _ in ends[1:])]
    assert [piece.endswith(end) for piece, end in zip(left, ends, strict=True)] == [True] * len(ends), left
    protocol.connection_lost(ConnectionResetError())


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
    written = b""

    def __init__(self, address: str = "192.0.2.1") -> None:
        super().__init__({"peername": (address, 1000)})

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return super().get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nhost: a\r\n"])
@virtual_time
async def test_a_head_that_does_not_come_is_waited_for_no_longer_than_its_time(begun: bytes) -> None:
    protocol, connection = Server(answering, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    await asyncio.sleep(HEAD_S - 1)
    if begun:
        protocol.data_received(begun)
    assert not connection.is_closing()
    await asyncio.sleep(2)
    assert connection.is_closing()
    protocol.connection_lost(ConnectionResetError())


@virtual_time
async def test_a_request_may_take_longer_than_its_head_and_the_next_head_has_its_time_too() -> None:
    whole = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    protocol, connection = Server(answering, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(whole[:5])
    await asyncio.sleep(1)
    protocol.data_received(whole[5:])
    await asyncio.sleep(HEAD_S + 1)
    assert not connection.is_closing()
    protocol.data_received(whole[:5])
    await asyncio.sleep(HEAD_S - 1)
    assert not connection.is_closing()
    await asyncio.sleep(2)
    assert connection.is_closing()
    protocol.connection_lost(ConnectionResetError())


@pytest.mark.parametrize("enough", [True, False])
@virtual_time
async def test_a_body_comes_at_a_least_rate_or_its_connection_is_cut_off(enough: bool) -> None:
    protocol, connection = Server(answering, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999\r\n\r\n")
    for _ in range(10):
        protocol.data_received(bytes(BODY_LEAST // (1 if enough else 2)))
        await asyncio.sleep(BODY_S)
    assert connection.is_closing() is not enough
    protocol.connection_lost(ConnectionResetError())


@virtual_time
async def test_a_body_that_waits_for_the_program_is_not_slow() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(10 * BODY_S)
        await answering(scope, receive, send)

    protocol, connection = Server(slow, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n" + bytes(70_000))
    await asyncio.sleep(5 * BODY_S)
    assert not connection.is_closing()
    await asyncio.sleep(5 * BODY_S + 1)
    protocol.data_received(bytes(30_000))
    await asyncio.sleep(0)
    assert b" 200 " in connection.written
    protocol.connection_lost(ConnectionResetError())


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body, as to whoever shows no token."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@virtual_time
async def test_a_connection_whose_body_nobody_reads_ends_after_its_answer_however_slowly_the_body_comes() -> None:
    protocol, connection = Server(refusing, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n")
    for _ in range(4):
        await asyncio.sleep(LINGER_S / 3)
        protocol.data_received(b"x")
    assert b" 401 " in connection.written
    assert connection.is_closing()
    protocol.connection_lost(ConnectionResetError())


@virtual_time
async def test_a_refused_request_whose_body_is_whole_keeps_its_connection() -> None:
    protocol, connection = Server(refusing, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    for count in (1, 2):
        protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody")
        await asyncio.sleep(LINGER_S + 1)
        assert connection.written.count(b" 401 ") == count
    assert not connection.is_closing()
    protocol.connection_lost(ConnectionResetError())


@virtual_time
async def test_more_connections_than_the_limits_are_closed_at_once_and_room_is_given_back() -> None:
    server = Server(answering, virtual_host(), ConnectionLimits(3, 2))

    def comes(address: str) -> tuple[asyncio.Protocol, Waiting]:
        protocol, connection = server.protocol(), Waiting(address)
        protocol.connection_made(connection)
        return protocol, connection

    first, *others = [comes(address) for address in ("a", "a", "a", "b", "c")]
    assert [connection.is_closing() for _, connection in (first, *others)] == [False, False, True, False, True]
    for protocol, connection in (first, others[1]):
        connection.abort()
        protocol.connection_lost(ConnectionResetError())
    again = [comes(address) for address in ("a", "c")]
    assert [connection.is_closing() for _, connection in again] == [False, True]
    for protocol, _ in (others[0], others[2], others[3], *again):
        protocol.connection_lost(ConnectionResetError())
    assert server.limits.kept == 0


@virtual_time
async def test_two_host_fields_are_refused_in_the_form_of_the_api() -> None:
    protocol, connection = Server(answering, virtual_host()).protocol(), Waiting()
    protocol.connection_made(connection)
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
    assert connection.written.startswith(b"HTTP/1.1 400 ")
    assert connection.written.endswith(b'{"error":"The request has two Host fields.","status":"invalid_argument"}')
    assert connection.is_closing()
    protocol.connection_lost(ConnectionResetError())


@virtual_time
async def test_failed_accepts_are_told_once_a_second() -> None:
    loop = asyncio.get_running_loop()
    told: list[tuple[str, int]] = []
    tell_of_accepts_once(loop, lambda error, count: told.append((error, count)))

    def fails(times: int) -> None:
        for _ in range(times):
            loop.call_exception_handler({"message": ACCEPT_FAILED, "exception": OSError("Too many open files")})

    fails(64)
    assert told == [("Too many open files", 1)]
    await asyncio.sleep(1.5)
    assert told[1:] == [("and again", 63)]
    await asyncio.sleep(5)
    fails(1)
    assert told[2:] == [("Too many open files", 1)]

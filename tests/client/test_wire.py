"""How a connection takes bytes, however they are cut: no sockets, the transport records what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.client.connection import Connection, Peer, Response
from hawker.client.wire import Stale


class Recorder(asyncio.Transport):
    """Takes writes, or refuses them as asyncio's transports do: by closing."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.refuses = refuses
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        self.closed = self.refuses

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def connected(loop: asyncio.AbstractEventLoop, transport: Recorder) -> Connection:
    connection = Connection("peer", loop, Peer("127.0.0.1", 1))
    connection.connection_made(transport)
    return connection


LENGTH = b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = (
    b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n"
    b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\na: 1\r\nA: 2\r\n\r\n"
    b"3\r\nhel\r\n2;e=f\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"
)
REPLIES = {
    LENGTH: Response(200, {"a": "1", "content-length": "5"}, b"hello"),
    CHUNKS: Response(404, {"transfer-encoding": "chunked", "a": "1, 2"}, b"hello"),
}


@pytest.mark.parametrize("raw", list(REPLIES), ids=["length", "chunks"])
@given(data=st.data())
def test_a_reply_is_the_same_wherever_it_is_cut(
    loop: asyncio.AbstractEventLoop, raw: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1))))
    connection = connected(loop, Recorder())
    reply = connection.exchange("GET /x", b"request", 1.0, loop.time() + 1.0, 100)
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        assert not reply.done()
        connection.data_received(raw[start:end])
    assert reply.result() == REPLIES[raw]


@given(junk=st.binary(max_size=300), head=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", CHUNKS[:120]]))
def test_no_bytes_whatever_raise_in_the_event_loop(loop: asyncio.AbstractEventLoop, junk: bytes, head: bytes) -> None:
    transport = Recorder()
    connection = connected(loop, transport)
    reply = connection.exchange("GET /x", b"request", 1.0, loop.time() + 1.0, 100)
    connection.data_received(head)
    connection.data_received(junk)
    connection.eof_received()
    connection.connection_lost(None)
    assert reply.done()
    reply.exception()


def test_a_write_that_the_system_refuses_has_sent_nothing(loop: asyncio.AbstractEventLoop) -> None:
    transport = Recorder()
    connection = connected(loop, transport)
    first = connection.exchange("POST /1", b"1", 1.0, loop.time() + 1.0, 100)
    connection.data_received(LENGTH)
    assert first.result().status == 200
    transport.refuses = True
    second = connection.exchange("POST /2", b"2", 1.0, loop.time() + 1.0, 100)
    connection.connection_lost(BrokenPipeError())
    error = second.exception()
    assert isinstance(error, Stale)
    assert not error.sent
    assert transport.written == [b"1", b"2"]

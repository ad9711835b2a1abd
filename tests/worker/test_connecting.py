"""A connection in the place of a session's command: bytes both ways, each with an end of its own, nothing kept."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.kit.ports import free_port
from tests.kit.waiting import at_rest, until

from hawker.worker.machine.inside.connecting import LOST, PIECE_BYTES, SILENT_S, Connection, connect


class Machine:
    """A program that takes one connection: `reader` and `writer` are its side of it."""

    def __init__(self) -> None:
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.taken = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.taken.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Machine]]:
    machine = Machine()
    async with await asyncio.start_server(machine.take, "127.0.0.1", 0) as server:
        connection = await connect([server.sockets[0].getsockname()])
        await machine.taken.wait()
        try:
            yield connection, machine
        finally:
            await connection.close()
            machine.writer.close()


async def test_each_way_ends_by_itself() -> None:
    async with connected() as (connection, machine):
        await connection.write(b"question")
        await connection.end_input()
        assert await machine.reader.read() == b"question"
        machine.writer.write(b"answer")
        assert await connection.read() == ("stdout", b"answer")
        machine.writer.write_eof()
        assert await connection.read() == ("stdout", b""), "the end of what the machine sends"
        assert await connection.read() is None
        assert await connection.wait() == (0, None)


async def test_a_machine_that_has_sent_all_is_still_written_to() -> None:
    async with connected() as (connection, machine):
        machine.writer.write_eof()
        assert await connection.read() == ("stdout", b"")
        over = asyncio.ensure_future(connection.read())
        await connection.write(b"late")
        assert await machine.reader.readexactly(4) == b"late"
        assert not over.done()
        await connection.end_input()
        assert await over is None


async def test_a_connection_that_breaks_ends_at_once_and_says_so() -> None:
    async with connected() as (connection, machine):
        sock = machine.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        machine.writer.transport.abort()
        assert await connection.read() is None
        assert await connection.wait() == (LOST, None)
        await connection.write(b"is dropped")
        await connection.end_input()


async def test_a_connection_that_is_given_up_is_no_orderly_end_to_the_machine() -> None:
    async with connected() as (connection, machine):
        await connection.write(b"half")
        assert await machine.reader.readexactly(4) == b"half"
        await connection.close()
        with pytest.raises(ConnectionResetError):
            await machine.reader.read()


async def test_a_machine_that_does_not_read_makes_the_writer_wait() -> None:
    async with connected() as (connection, machine):
        machine.writer.transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(1000):
                await connection.write(bytes(PIECE_BYTES))
                written += PIECE_BYTES

        writing = asyncio.ensure_future(write())
        held = await at_rest(lambda: written)
        assert not writing.done()
        machine.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await machine.reader.readexactly(held)
        await until(lambda: written > held)
        writing.cancel()


async def test_a_machine_that_vanishes_is_not_waited_for_without_an_end() -> None:
    """It would take a network that loses everything, and a minute: so it is looked at what the kernel was told."""
    async with connected() as (connection, _):
        sock = connection._writer.get_extra_info("socket")
        tcp = socket.IPPROTO_TCP
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, interval_s, tries = (sock.getsockopt(tcp, option) for option in options)
        assert idle_s + interval_s * tries == SILENT_S
        assert not sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT), "a program may be slow to read"


async def test_the_next_address_is_taken_where_one_takes_no_connection() -> None:
    async with await asyncio.start_server(Machine().take, "127.0.0.1", 0) as server:
        connection = await connect([("127.0.0.1", free_port()), server.sockets[0].getsockname()])
        await connection.close()


async def test_what_the_last_address_says_is_what_is_told() -> None:
    with pytest.raises(ConnectionRefusedError):
        await connect([("127.0.0.1", free_port())])

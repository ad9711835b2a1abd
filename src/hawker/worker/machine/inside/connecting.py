"""A TCP connection to a port of a machine, in the place of a session's command (`hawker.model.inside_api`).

What the machine sends is read when somebody takes it, and what it does not take makes the sender wait: neither way is
more kept here than a buffer. Each way ends by itself, as TCP has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Literal

from hawker.worker.machine.inside.probing import Address

CONNECT_S = 5.0
"""How long to try each address."""
SILENT_S = 60
"""How long the machine's kernel may be silent before the connection counts as broken. A microVM that is killed closes
nothing."""
PIECE_BYTES = 128 << 10
LOST = 1
"""The exit code of a connection that was broken; 0: both sides ended it."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""For SO_LINGER: a closed socket resets its connection."""


async def connect(addresses: Sequence[Address]) -> Connection:
    """Connect to the first of `addresses`, at least one, that takes the connection. Raises `OSError`, that of the last
    one; `TimeoutError` is one."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return await _connect(address)
    return await _connect(addresses[-1])


async def _connect(address: Address) -> Connection:
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(*address, limit=PIECE_BYTES)
    _keep_watch(writer.get_extra_info("socket"))
    return Connection(reader, writer)


def _keep_watch(sock: socket.socket) -> None:
    """Break it when the other side is no more. TCP_USER_TIMEOUT is not set: it would break a connection to a program
    that does not read for a while, too."""
    tries = 3
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 2 // tries)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, tries)


class Connection:
    """See `hawker.worker.drivers.base.Terminal`. The end of what the machine sends is an empty piece; None follows once
    the other side has ended, too, or the connection broke."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._read_all = self._written_all = self._lost = False
        self._over = asyncio.Event()

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        if not self._read_all and not self._lost:
            try:
                data = await self._reader.read(PIECE_BYTES)
            except OSError:
                self._break()
                return None
            self._read_all = not data
            self._settle()
            return "stdout", data
        await self._over.wait()
        return None

    async def write(self, data: bytes) -> None:
        if self._lost:
            return
        if self._writer.is_closing():  # it broke
            self._break()
            return
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            self._break()

    async def end_input(self) -> None:
        if not self._lost and not self._writer.is_closing():
            with contextlib.suppress(OSError):  # it broke
                self._writer.write_eof()
        self._written_all = True
        self._settle()

    async def resize(self, columns: int, rows: int) -> None:
        """It has no terminal."""

    async def wait(self) -> tuple[int, int | None]:
        return (LOST if self._lost else 0), None

    async def close(self) -> None:
        """What was not ended by both sides is broken off, so that the machine does not take it for whole."""
        if not (self._read_all and self._written_all):
            sock = self._writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it is closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _settle(self) -> None:
        if self._read_all and self._written_all:
            self._over.set()

    def _break(self) -> None:
        self._lost = True
        self._over.set()

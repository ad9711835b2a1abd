"""Passes bytes both ways between two connections, until both have closed: upgrades, CONNECT, plain TCP services."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.settings import Settings


class Tunnels(Protocol):
    """Who can end tunnels that would go on for ever."""

    settings: Settings

    def came(self, which: Tunnel, transport: asyncio.Transport) -> None: ...

    def left(self, which: Tunnel) -> None: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


class Tunnel:
    """`client` and `machine` are open transports, which are the tunnel's from here on. It ends when nothing moves for
    `idle_s`; after the machine has closed its side, when nothing moves for the settings' `idle_timeout_s`, since a
    client could stay for ever. `done(sent, received)` is called once, with the bytes to the client and from it, when
    both are closed."""

    def __init__(
        self,
        client: asyncio.Transport,
        machine: asyncio.Transport,
        idle_s: float,
        done: Callable[[int, int], None],
        owner: Tunnels,
    ) -> None:
        self._owner = owner
        self._done = done
        self._idle_s = idle_s
        self._deadline = Deadline(owner.loop, self.abort)
        self._client = _End(self, client)
        self._machine = _End(self, machine)
        self._client.other, self._machine.other = self._machine, self._client
        self._open = 2

    def start(self, from_client: bytes, from_machine: bytes) -> None:
        """`from_client` and `from_machine` are what was read of them already."""
        self._owner.came(self, self._client.transport)
        self.moved()
        for end in (self._client, self._machine):
            end.transport.set_protocol(end)
        if from_client:
            self._client.data_received(from_client)
        if from_machine:
            self._machine.data_received(from_machine)
        for end in (self._client, self._machine):
            # A transport tells its protocol of a full buffer when it fills: the one before this was told.
            if end.transport.get_write_buffer_size() > end.transport.get_write_buffer_limits()[1]:
                end.pause_writing()
            elif not end.other.transport.is_closing():
                end.other.transport.resume_reading()
        for end in (self._client, self._machine):
            if end.transport.is_closing():
                end.other.transport.close()

    def abort(self) -> None:
        self._client.transport.abort()
        self._machine.transport.abort()

    def moved(self) -> None:
        if self._idle_s < math.inf:
            self._deadline.within(self._idle_s)

    def ended(self, end: _End) -> None:
        if end is self._machine:
            self._ending()

    def _ending(self) -> None:
        self._idle_s = min(self._idle_s, self._owner.settings.idle_timeout_s)
        self.moved()

    def lost(self) -> None:
        self._open -= 1
        if self._open:
            self._ending()
        else:
            self._deadline.close()
            self._owner.left(self)
            self._done(self._machine.bytes, self._client.bytes)


class _End(asyncio.Protocol):
    """One of the two ends. `bytes` counts what came from it."""

    __slots__ = ("_tunnel", "bytes", "ended", "other", "transport")

    other: _End

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport) -> None:
        self._tunnel = tunnel
        self.transport = transport
        self.bytes = 0
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        self.other.transport.write(data)
        self._tunnel.moved()

    def eof_received(self) -> bool:
        """One side is closed: the other direction may go on, but not over TLS, which asyncio does not half close."""
        self.ended = True
        self._tunnel.ended(self)
        if not self.transport.can_write_eof():
            self.other.transport.close()
            return False
        other = self.other.transport
        if self.other.ended or not other.can_write_eof():
            other.close()
            return False
        if not other.is_closing():
            other.write_eof()
        return True

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # An error must not look like an end: the other side gets one, too.
        if exc is not None:
            reset(self.other.transport)
        else:
            self.other.transport.close()
        self._tunnel.lost()


def keep_watch(transport: asyncio.Transport, gone_s: float) -> None:
    """Have the system look whether the peer's host is there, on a connection that may be silent for hours, and end it
    so long after the last sign of it."""
    its = transport.get_extra_info("socket")
    if its is None or its.family == socket.AF_UNIX:  # a stream of HTTP/2, or HAProxy's, which watches by itself
        return
    for option, value in (
        (socket.TCP_KEEPIDLE, max(int(gone_s / 2), 1)),
        (socket.TCP_KEEPINTVL, max(int(gone_s / 10), 1)),
        (socket.TCP_KEEPCNT, 5),
    ):
        its.setsockopt(socket.IPPROTO_TCP, option, value)
    its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def reset(transport: asyncio.Transport) -> None:
    """Close with a reset, which is no clean end: what was sent must not look complete."""
    its = transport.get_extra_info("socket")
    if its is not None:  # a stream of HTTP/2 has its own way to say so
        with suppress(OSError):  # it is closed already
            its.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


_NO_LINGER = struct.pack("ii", 1, 0)

"""The HTTP/1.1 client between agents: a `Peer` is one agent's address and the persistent connections to it.

Convenience clients cost 0.4 ms a call; this one costs little more than its system calls. A request takes the
connection that was used last, opens another while fewer than `connections_max` are open, or waits its turn. A
connection goes back to the pool in the very callback that completed its reply, before the caller wakes, so the next in
line never waits for the one before it to run.

A peer may close an idle connection at the moment it is used again. Such a request is repeated once on a new connection,
if no byte of it left this machine or if its repetition is harmless (`idempotent`). Anything else that goes wrong raises
`PeerUnreachable`, whose `sent` tells whether the outcome is in doubt.

The bytes are in `client/wire.py`, long replies in `client/stream.py`, many small calls made one in
`client/batching.py`. Only `loop.create_connection` touches the network, and timers are the loop's, so a simulator can
stand in for both. Give a host as an address: asyncio looks names up in a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from hawker.client.deadline import within
from hawker.client.stream import Stream, StreamConnection
from hawker.client.wire import NO_HEADERS, PeerUnreachable, Stale, Wire

__all__ = ["Connection", "Peer", "PeerStatistics", "PeerUnreachable", "Response", "Stream"]

BODY_BYTES_MAX = 16 << 20
"""A machine has less than 64 KiB as JSON, so that a batch or a listing of hundreds fits. A peer that sends more is
faulty."""
IDLE_S_MAX = 60.0
"""Below the 75 seconds after which an agent closes an idle connection (`hawker.http.server`), so that a request seldom
meets that very moment."""

_SAFE = frozenset(("GET", "HEAD"))
_OURS = frozenset(("connection", "content-length", "host", "transfer-encoding"))  # they say where a request ends
_BREAKS_TARGET = re.compile(r"[\x00-\x20\x7f]")
_BREAKS_VALUE = re.compile(r"[\r\n\x00]")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_C = TypeVar("_C", bound=Wire)


class Response(msgspec.Struct, frozen=True):
    """A whole reply. Header names are in lower case, repeated headers are joined by `, `."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class PeerStatistics(msgspec.Struct, frozen=True):
    """`open` counts the pool's connections, `idle` those of them at rest, `streams` the ones outside it. `requests`
    and, of them, those repeated on another connection (`reconnects`) count since the beginning."""

    open: int
    idle: int
    streams: int
    waiting: int
    requests: int
    reconnects: int


class Connection(Wire):
    """One connection of a pool: a request and its whole reply at a time."""

    def __init__(self, peer: str, loop: asyncio.AbstractEventLoop, pool: Peer) -> None:
        super().__init__(peer, loop)
        self.idle_since = 0.0
        self._pool = pool
        self._reply: asyncio.Future[Response] | None = None
        self._body: list[bytes] = []
        self._head_only = False

    def exchange(
        self, request: str, data: bytes, timeout_s: float, deadline: float, body_bytes_max: int
    ) -> asyncio.Future[Response]:
        """Send a request. The future is its reply, or raises `PeerUnreachable`."""
        reply = self._reply = self._loop.create_future()
        self._body = []
        self._body_bytes_max = body_bytes_max
        self._head_only = request.startswith("HEAD ")
        self._begin(request, data, timeout_s, deadline)
        return reply

    def give_up(self, reply: asyncio.Future[Response]) -> None:
        """The caller of `exchange` is gone. If its reply may still come, nobody else must get it."""
        if self._reply is reply:
            self.abort()
        elif not reply.cancelled():
            reply.exception()  # it may have failed as its caller was cancelled: asyncio would complain

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        self._body_bytes += len(data)
        if self._body_bytes <= self._body_bytes_max:
            self._body.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pool.lost(self)

    def _head(self) -> None:
        self._complete = self._head_only

    def _end(self, *, reusable: bool) -> None:
        reply, self._reply = self._reply, None
        response = Response(self._status, self._headers, b"".join(self._body))
        self._body = []
        self._finish()
        # After a HEAD the parser waits for a body that never comes.
        if reusable and self.usable and not self._head_only:
            self.idle_since = self._loop.time()
            self._pool.released(self)
        else:
            self._close()
        if reply is not None and not reply.done():
            reply.set_result(response)

    def _fail(self, error: PeerUnreachable) -> None:
        reply, self._reply = self._reply, None
        self._body = []
        if reply is not None and not reply.done():
            reply.set_exception(error)


class Peer:
    """One agent. Its methods may be called by any number of tasks of one event loop. `headers` go with every request.

    Waiters for a connection are served in order; their number is bounded by their time-outs alone, since whoever calls
    already bounds what it works on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        connections_max: int = 64,
        connect_timeout_s: float = 2.0,
        idle_s_max: float = IDLE_S_MAX,
    ) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host = host
        self._port = port
        self._headers = f"host: {_printable(self.name)}\r\n".encode() + _encode_headers(headers)
        self._connections_max = connections_max
        self._connect_timeout_s = connect_timeout_s
        self._idle_s_max = idle_s_max
        self._open: dict[Connection, None] = {}  # in the order of opening, so that closing has an order too
        self._idle: list[Connection] = []  # the one used last is at the end
        self._streams: dict[StreamConnection, None] = {}
        self._connecting = 0
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._requests = 0
        self._reconnects = 0
        self._closed = False

    async def request(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
        idempotent: bool = False,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> Response:
        """One call and its whole reply, of any status.

        `timeout_s` is for all of it, the wait for a connection included. GET and HEAD are always taken as
        `idempotent`. Raises `PeerUnreachable`; cancelled, it leaves no trace but a closed connection.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + timeout_s
        name = f"{method} {target}"
        data = self._encode(method, target, headers, body)
        self._requests += 1
        connection = self._take_idle(now) or await self._acquire(loop, name, timeout_s, deadline)
        for attempt in (1, 2):
            reply = connection.exchange(name, data, timeout_s, deadline, body_bytes_max)
            try:
                return await reply
            except asyncio.CancelledError:
                connection.give_up(reply)
                raise
            except Stale as error:
                if attempt == 2 or (error.sent and not (idempotent or method in _SAFE)):
                    raise
            self._reconnects += 1
            connection = await self._acquire(loop, name, timeout_s, deadline)
        raise AssertionError("the second attempt returns or raises")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
    ) -> AsyncIterator[Stream]:
        """A call whose reply is read as it comes, over a connection of its own that is closed at the end.

        `timeout_s` is for connecting and for the head of the reply. Never repeated. Raises `PeerUnreachable`, also
        from `chunks`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        name = f"{method} {target}"
        data = self._encode(method, target, headers, body)
        self._requests += 1
        connection = await self._connect(loop, name, deadline, lambda: StreamConnection(self.name, loop))
        self._streams[connection] = None
        try:
            yield await connection.open(name, data, timeout_s, deadline)
        finally:
            self._streams.pop(connection, None)
            connection.give_up()

    async def close(self) -> None:
        """Close every connection and wait until they are gone. Calls under way fail; may be called again."""
        self._closed = True
        connections: list[Wire] = [*self._open, *self._streams]
        self._idle.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(PeerUnreachable(self.name, "was closed here", sent=False))
        for connection in connections:
            connection.abort()
        for connection in connections:
            await asyncio.shield(connection.gone)

    def statistics(self) -> PeerStatistics:
        return PeerStatistics(
            open=len(self._open),
            idle=len(self._idle),
            streams=len(self._streams),
            waiting=len(self._waiters),
            requests=self._requests,
            reconnects=self._reconnects,
        )

    # --- called by connections ---------------------------------------------------------------------------------------

    def released(self, connection: Connection) -> None:
        """A connection has delivered its reply and can take another request."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is closed."""
        if connection in self._idle:
            self._idle.remove(connection)
        if connection in self._open:
            del self._open[connection]
            self._grant()

    # --- the pool ----------------------------------------------------------------------------------------------------

    def _take_idle(self, now: float) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since <= self._idle_s_max:
                return connection
            self._drop(connection)
        return None

    async def _acquire(
        self, loop: asyncio.AbstractEventLoop, request: str, timeout_s: float, deadline: float
    ) -> Connection:
        """A new connection, or the next that becomes free once `connections_max` are open. Never one that rested."""
        if len(self._open) + self._connecting < self._connections_max:
            self._connecting += 1
        elif self._idle:
            self._drop(self._idle.pop(0))  # after a stale one: the others are as old
            self._connecting += 1
        elif connection := await self._wait(loop, request, timeout_s, deadline):
            return connection
        try:
            connection = await self._connect(loop, request, deadline, lambda: Connection(self.name, loop, self))
            self._open[connection] = None
            return connection
        finally:
            self._connecting -= 1
            self._grant()

    async def _wait(
        self, loop: asyncio.AbstractEventLoop, request: str, timeout_s: float, deadline: float
    ) -> Connection | None:
        """The next free connection, or None with the right to open one, counted in `_connecting` already."""
        waiter: asyncio.Future[Connection | None] = loop.create_future()
        problem = f"has answered none of its {self._connections_max} connections' calls within {timeout_s:g} s"

        def expire() -> None:
            if not waiter.done():
                waiter.set_exception(PeerUnreachable(self.name, f"{problem}, before {request}", sent=False))

        timer = loop.call_at(deadline, expire)
        self._waiters.append(waiter)
        try:
            return await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())  # cancelled in the moment its turn came
            raise
        finally:
            timer.cancel()

    def _give_back(self, granted: Connection | None) -> None:
        if granted is None:
            self._connecting -= 1
            self._grant()
        elif granted.usable:
            self.released(granted)

    def _grant(self) -> None:
        """Let waiters open connections, as many as there is room for."""
        while self._waiters and len(self._open) + self._connecting < self._connections_max:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._connecting += 1
                waiter.set_result(None)

    def _drop(self, connection: Connection) -> None:
        """Close a resting connection and free its place at once."""
        self._open.pop(connection, None)
        connection.abort()

    async def _connect(
        self, loop: asyncio.AbstractEventLoop, request: str, deadline: float, make: Callable[[], _C]
    ) -> _C:
        self._check_open(request)
        try:
            async with within(min(deadline - loop.time(), self._connect_timeout_s)):
                _, connection = await loop.create_connection(make, self._host, self._port)
        except TimeoutError as error:
            raise PeerUnreachable(self.name, f"did not take a connection in time, for {request}", sent=False) from error
        except OSError as error:
            number = error.errno or 0  # asyncio puts a sentence of its own in the place of the system's
            reason = os.strerror(number) if number > 0 else error.strerror or str(error)
            raise PeerUnreachable(self.name, f"takes no connection ({reason}), for {request}", sent=False) from error
        except (OverflowError, ValueError) as error:  # no port, or no name: addresses may be a stranger's
            raise PeerUnreachable(self.name, f"is no address ({error}), for {request}", sent=False) from error
        try:
            self._check_open(request)
        except PeerUnreachable:
            connection.abort()
            raise
        return connection

    def _check_open(self, request: str) -> None:
        if self._closed:
            raise PeerUnreachable(self.name, f"was closed here, before {request}", sent=False)

    def _encode(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """The request as it goes over the wire. Raises `ValueError` for what would not be one request, and only for
        that: parts of it may be a stranger's, passed on."""
        if _BREAKS_TARGET.search(target) or not method.isalpha():
            raise ValueError(f"not a method and target: {method!r} {target!r}")
        line = f"{method} {target} HTTP/1.1\r\n".encode()
        extra = _encode_headers(headers) if headers else b""
        if not body and method in _SAFE:
            return b"".join((line, self._headers, extra, b"\r\n"))
        return b"".join((line, self._headers, extra, b"content-length: %d\r\n\r\n" % len(body), body))


def _printable(name: str) -> str:
    """The name with only the characters that a header may have. A name with others is no address in any case."""
    return "".join(c if "!" <= c <= "~" else "?" for c in name)


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    for name, value in headers.items():
        if name.lower() in _OURS:
            raise ValueError(f"not for callers to set: {name!r}")
        if _BREAKS_VALUE.search(value) or not _NAME.fullmatch(name):
            raise ValueError(f"not a header: {name!r}: {value!r}")
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")

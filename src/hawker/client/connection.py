"""The HTTP/1.1 client between agents: persistent connections, one `asyncio.Protocol` over httptools' parser.

Convenience clients cost 0.4 ms a call; this one costs about as much as the system calls. It knows no redirects,
cookies or compression: agents need none. Only `loop.create_connection` touches the network, so a simulator can
stand in for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httptools
import msgspec

from hawker.errors import Unreachable

BODY_BYTES_MAX = 64 << 20
_STREAM_CHUNKS_MAX = 64  # a stream's reader that falls behind makes the peer wait


class Response(msgspec.Struct, frozen=True):
    """Header names are lower case; of repeated headers the last one counts."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Doubt(Unreachable):
    """No answer. `sent` says whether the request may have reached the peer: its outcome is in doubt then."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message, details={"sent": sent})
        self.sent = sent


class _Connection(asyncio.Protocol):
    """One connection: at most one request at a time. Reusable while `idle`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Response] | None = None
        self._stream: asyncio.Queue[bytes | None] | None = None
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._keep = False
        self.answered = False  # a byte of the present reply has come
        self.closed = False

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.abort()  # bytes nobody asked for
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the reply is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection was closed{f': {exc}' if exc else ''}")

    # --- httptools callbacks -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        if self._stream is not None:
            self._answer(Response(self._parser.get_status_code(), self._headers, b""))

    def on_body(self, body: bytes) -> None:
        if self._stream is not None:
            self._stream.put_nowait(body)
            if self._stream.qsize() >= _STREAM_CHUNKS_MAX and self._transport:
                self._transport.pause_reading()
            return
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self._fail(f"the reply has more than {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        if self._stream is not None:
            self._stream.put_nowait(None)
        else:
            self._answer(Response(self._parser.get_status_code(), self._headers, bytes(self._body)))

    # --- used by Peer ------------------------------------------------------------------------------------------------

    def send(self, request: bytes, *, stream: bool = False) -> asyncio.Future[Response]:
        """Write a request. The future is its reply; of a stream, its head."""
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._stream = asyncio.Queue() if stream else None
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._body, self.answered = {}, bytearray(), False
        self._transport.write(request)
        return self._reply

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body of a stream as it comes. Raises `Doubt` when it breaks off."""
        assert self._stream is not None
        while (chunk := await self._stream.get()) is not None:
            if self._transport and self._stream.qsize() < _STREAM_CHUNKS_MAX // 2:
                self._transport.resume_reading()
            yield chunk
        if self.closed:
            raise Doubt("the stream broke off", sent=True)

    @property
    def idle(self) -> bool:
        """Whether the last reply came whole and the connection takes another request."""
        return not self.closed and self._keep and self._stream is None and self._reply is None

    def abort(self) -> None:
        self.closed = True
        if self._transport:
            self._transport.abort()

    def _answer(self, response: Response) -> None:
        reply, self._reply = self._reply, None
        if self._stream is None:
            self._parser = None
        if reply and not reply.done():
            reply.set_result(response)

    def _fail(self, why: str) -> None:
        self.abort()
        reply, self._reply = self._reply, None
        if reply and not reply.done():
            reply.set_exception(Doubt(why, sent=True))
        if self._stream is not None:
            self._stream.put_nowait(None)


class Peer:
    """One agent's address and the connections to it.

    Every call has a deadline. A reply that does not come raises `Doubt`; a connection whose reply is outstanding is
    closed, never used again. An idle connection that the peer closed just as it was used again is replaced once,
    since nothing of the request was answered, when the call is `repeatable`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        headers: Mapping[str, str] | None = None,
        connections_max: int = 64,
        connect_timeout_s: float = 2.0,
    ) -> None:
        self.name = f"{host}:{port}"
        self._host = host
        self._port = port
        fixed = {"host": self.name, **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode("latin-1")
        self._connections_max = connections_max
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def request(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        repeatable: bool | None = None,
    ) -> Response:
        """One call. `repeatable` defaults to whether the method is safe. Raises `Doubt`."""
        if repeatable is None:
            repeatable = method in ("GET", "HEAD")
        raw = self._encode(method, target, body, headers)
        try:
            async with asyncio.timeout(timeout_s):
                connection, reused = await self._acquire()
                try:
                    return await self._exchange(connection, raw)
                except Doubt:
                    if not (reused and repeatable and not connection.answered):
                        raise
                return await self._exchange(await self._connect(), raw)
        except TimeoutError:
            raise Doubt(f"{self.name}: no answer to {method} {target} within {timeout_s:g} s", sent=True) from None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[tuple[Response, AsyncIterator[bytes]]]:
        """A call whose reply is read as it comes. `timeout_s` is for the head. The connection is closed at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
                head = await connection.send(self._encode(method, target, body, headers), stream=True)
        except TimeoutError:
            raise Doubt(f"{self.name}: no answer to {method} {target} within {timeout_s:g} s", sent=True) from None
        try:
            yield head, connection.chunks()
        finally:
            connection.abort()
            self._gone(connection)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._idle.clear()

    def _encode(self, method: str, target: str, body: bytes, headers: Mapping[str, str] | None) -> bytes:
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode("latin-1")
        line = f"{method} {target} HTTP/1.1\r\n".encode("latin-1")
        return b"".join((line, self._head, extra, b"content-length: %d\r\n\r\n" % len(body), body))

    async def _exchange(self, connection: _Connection, raw: bytes) -> Response:
        try:
            response = await connection.send(raw)
        except Doubt as error:
            self._gone(connection)
            raise Doubt(f"{self.name}: {error.message}", sent=True) from None
        except BaseException:
            connection.abort()  # its reply may still come: never hand it to another request
            self._gone(connection)
            raise
        if connection.idle:
            self._idle.append(connection)
            self._wake()
        else:
            connection.abort()
            self._gone(connection)
        return response

    async def _acquire(self) -> tuple[_Connection, bool]:
        while True:
            while self._idle:
                connection = self._idle.pop()
                if connection.idle:
                    return connection, True
                self._gone(connection)
            if len(self._open) + self._connecting < self._connections_max:
                return await self._connect(), False
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # it was this one's turn: pass it on
                raise

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            self._wake()
            raise Doubt(f"{self.name}: cannot connect: {error or 'timed out'}", sent=False) from error
        finally:
            self._connecting -= 1
        self._open.add(connection)
        return connection

    def _gone(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

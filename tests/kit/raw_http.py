"""Both ends of HTTP/1.1 for tests: bytes are sent as they are given, and what comes is read by h11, which is strict."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import msgspec

Fields = list[tuple[bytes, bytes]]
LIMIT_S = 30.0


class Broken(Exception):
    """The connection ended before the message was complete."""


class Answer(msgspec.Struct):
    """`interim` has the 1xx answers before it: status and fields."""

    status: int
    reason: bytes
    fields: Fields
    body: bytes
    trailers: Fields
    interim: list[tuple[int, Fields]]
    version: bytes = b"1.1"

    def __getitem__(self, name: str) -> str:
        """The value of a field that is there once."""
        (value,) = self.all(name)
        return value

    def all(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.fields if key == name.lower().encode()]


class User:
    """A connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._left = b""
        self._events: h11.Connection | None = None

    @classmethod
    async def at(
        cls, address: tuple[str, int], source: str = "", tls: ssl.SSLContext | None = None, name: str = ""
    ) -> User:
        """With `tls` for this name, "" for none."""
        local = (source, 0) if source else None
        of_tls: dict[str, Any] = {"ssl": tls, "server_hostname": name} if tls else {}
        reader, writer = await asyncio.open_connection(*address, local_addr=local, limit=1 << 20, **of_tls)
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, method: str = "GET", upgrade: bool = False) -> Answer:
        """The next answer up to its body, which `piece` gives."""
        self._events = events = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        fields = [("host", "x")] + [("connection", "upgrade"), ("upgrade", "x")] * upgrade
        events.send(h11.Request(method=method, target="x:1" if method == "CONNECT" else "/", headers=fields))
        events.send(h11.EndOfMessage())
        events.receive_data(self._left) if self._left else None
        self._left = b""
        interim: list[tuple[int, Fields]] = []
        while True:
            event = await self._next()
            if isinstance(event, h11.InformationalResponse) and event.status_code != 101:
                interim.append((event.status_code, list(event.headers)))
            elif isinstance(event, h11.InformationalResponse | h11.Response):
                head = list(event.headers)
                return Answer(event.status_code, event.reason, head, b"", [], interim, event.http_version)
            else:
                raise AssertionError(f"{event!r} is no head of an answer")

    async def piece(self) -> bytes | Fields:
        """What comes next of the body as one event of the parser; at the end its trailers."""
        assert self._events is not None
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        assert isinstance(event, h11.EndOfMessage), event
        self._left = self._events.trailing_data[0]
        return list(event.headers)

    async def answer(self, method: str = "GET", *, within: float = LIMIT_S) -> Answer:
        """The next answer, complete. Raises `Broken`."""
        async with asyncio.timeout(within):
            answer = await self.head(method)
            pieces: list[bytes] = []
            while isinstance(piece := await self.piece(), bytes):
                pieces.append(piece)
            answer.trailers = piece
            answer.body = b"".join(pieces)
            return answer

    async def ask(self, text: str, body: bytes = b"", *, within: float = LIMIT_S) -> Answer:
        """Send a request whose head is given as lines, without Host, and read the answer."""
        await self.send(head(text) + body)
        return await self.answer(text.split()[0], within=within)

    async def bytes(self, count: int) -> bytes:
        """So many raw bytes, of a connection that was upgraded."""
        if self._events is not None:
            self._left += self._events.trailing_data[0]
            self._events = None
        while len(self._left) < count:
            more = await asyncio.wait_for(self.reader.read(1 << 16), LIMIT_S)
            if not more:
                raise Broken(f"{self._left!r} and then nothing")
            self._left += more
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    async def ended(self) -> str:
        """How the connection ends, with nothing more said: "closed" or "reset"."""
        try:
            rest = await asyncio.wait_for(self.reader.read(1 << 16), LIMIT_S)
        except ConnectionError:
            return "reset"
        assert not rest + self._left, rest + self._left
        return "closed"

    def end(self) -> None:
        """Say no more, but listen."""
        self.writer.write_eof()

    def reset(self) -> None:
        reset(self.writer)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _next(self) -> h11.Event:
        assert self._events is not None
        while True:
            try:
                event = self._events.next_event()
            except h11.RemoteProtocolError as error:
                raise Broken(str(error)) from None
            if event is h11.NEED_DATA:
                try:
                    self._events.receive_data(await self.reader.read(1 << 16))
                except ConnectionError as error:
                    raise Broken(repr(error)) from None
            elif isinstance(event, h11.ConnectionClosed):
                raise Broken("closed")
            else:
                assert isinstance(event, h11.Event), event
                return event


def head(text: str) -> bytes:
    """`GET / | name: value | ...` as a head of HTTP/1.1 for the app `web`, unless it says another Host."""
    line, *fields = text.split(" | ")
    if not any(field.lower().startswith("host:") for field in fields):
        fields.insert(0, "Host: web.example")
    return "\r\n".join((f"{line} HTTP/1.1", *fields, "", "")).encode("latin-1")


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a reset, as a crashed process does."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Visit:
    """A request as it came to an upstream. `connection` numbers the connections, `number` the requests on it."""

    def __init__(self, events: h11.Connection, upstream: Upstream, connection: int, number: int) -> None:
        self.connection = connection
        self.number = number
        self.method = self.target = ""
        self.fields: Fields = []
        self._body = bytearray()
        self.trailers: Fields = []
        self.complete = False
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.upstream = upstream
        self._events = events

    def __getitem__(self, name: str) -> str:
        (value,) = self.all(name)
        return value

    def all(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.fields if key == name.lower().encode()]

    @property
    def body(self) -> bytes:
        """What has come of it."""
        return bytes(self._body)

    async def begin(self) -> bool:
        """Read the head. False: the connection has ended."""
        event = await self._next()
        if not isinstance(event, h11.Request):
            return False
        self.method, self.target = event.method.decode(), event.target.decode()
        self.fields = list(event.headers)
        return True

    async def piece(self) -> bytes:
        """More of the body; b"" at its end. Raises `Broken`."""
        if self.complete:
            return b""
        event = await self._next()
        if isinstance(event, h11.Data):
            self._body += event.data
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            self.complete = True
            self.trailers = list(event.headers)
            return b""
        raise Broken(repr(event))

    async def read(self) -> bytes:
        """All of the body."""
        while await self.piece():
            pass
        return self.body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"", status: str = "200 OK", *fields: str) -> None:
        """A plain answer with a length."""
        lines = (f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(body)}", "", "")
        await self.send("\r\n".join(lines).encode() + body)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        reset(self.writer)

    @property
    def surplus(self) -> bytes:
        return bytes(self._events.trailing_data[0])

    async def _next(self) -> object:
        while True:
            event = self._events.next_event()
            if event is not h11.NEED_DATA:
                return event
            data = await self.reader.read(1 << 16)
            if not data and self._events.their_state is h11.SEND_BODY:
                raise Broken("closed in the middle of a body")
            self._events.receive_data(data)


Behaviour = Callable[[Visit], Awaitable[None]]


class Upstream:
    """A server whose answers a test gives as a function of each visit. What it is sent must be valid to h11: if not,
    `errors` has it."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.visits: list[Visit] = []
        self.connections = 0
        self.errors: list[str] = []
        self.address = ("127.0.0.1", 0)
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port, backlog=1024)
        self.address = self._server.sockets[0].getsockname()

    @property
    def held(self) -> int:
        """Connections that are open."""
        return len(self._tasks)

    async def stop(self) -> None:
        """Refuse connections from now on. Those that are open stay."""
        self._server.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        connection = self.connections
        left = b""
        try:
            for number in range(1, 1 << 30):
                events = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
                if left:
                    events.receive_data(left)
                visit = Visit(events, self, connection, number)
                visit.reader, visit.writer = reader, writer
                if not await visit.begin():
                    break
                self.visits.append(visit)
                await self.behaviour(visit)
                if writer.is_closing():
                    break
                await visit.read()
                left = visit.surplus
        except h11.RemoteProtocolError as error:
            self.errors.append(str(error))
        except (OSError, Broken, asyncio.CancelledError):
            pass  # a proxy that goes away in the middle is what many tests are about
        finally:
            self._tasks.discard(task)
            writer.close()


async def hello(visit: Visit) -> None:
    """Takes everything, and says who it is."""
    await visit.read()
    await visit.answer(b"hello")


async def echo(visit: Visit) -> None:
    await visit.answer(await visit.read())


def saying(data: bytes, then: str = "") -> Behaviour:
    """Answers every request with these bytes, and then does "close", "reset", or nothing."""

    async def behaviour(visit: Visit) -> None:
        await visit.read()
        await visit.send(data)
        if then == "close":
            visit.close()
        elif then == "reset":
            visit.reset()

    return behaviour


async def resetting(visit: Visit) -> None:
    """Reads the request and resets the connection."""
    await visit.read()
    visit.reset()


async def silent(visit: Visit) -> None:
    """Reads the request and never answers."""
    await visit.read()
    await asyncio.Event().wait()

"""Both ends of HTTP/2 for tests, made of the library h2: a client whose every frame a test may choose, and a server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    PingAckReceived,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from tests.kit.raw_http import LIMIT_S, Broken, Fields


class Answer2(msgspec.Struct):
    """`reset` is the error with which its stream was reset, None if it ended well."""

    status: int = 0
    fields: Fields = []
    body: bytes = b""
    trailers: Fields = []
    interim: list[int] = []
    complete: bool = False
    reset: int | None = None

    def __getitem__(self, name: str) -> str:
        (value,) = [value.decode("latin-1") for key, value in self.fields if key == name.encode()]
        return value


class _Patient(H2ConnectionStateMachine):
    """Takes answers after a goodbye, which the library does not."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        return [] if input_ is ConnectionInputs.RECV_GOAWAY else super().process_input(input_)


class User2:
    """A client's connection. With `eager` it takes what comes at once; else the test opens windows itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, eager: bool = True) -> None:
        self.reader = reader
        self.writer = writer
        self.eager = eager
        self.h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.state_machine = _Patient()
        self.answers: dict[int, Answer2] = defaultdict(Answer2)
        self.goodbye: ConnectionTerminated | None = None
        self.closed = False
        self.pongs = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None]

    @classmethod
    async def at(
        cls, address: tuple[str, int], tls: ssl.SSLContext | None = None, name: str = "", *, eager: bool = True
    ) -> User2:
        of_tls: dict[str, Any] = {"ssl": tls, "server_hostname": name} if tls else {}
        user = cls(*await asyncio.open_connection(*address, **of_tls), eager=eager)
        user.h2.initiate_connection()
        await user.send()
        user._task = asyncio.create_task(user._read())
        return user

    async def send(self, raw: bytes = b"") -> None:
        """What the library has to send, and then these bytes."""
        self.writer.write(self.h2.data_to_send() + raw)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def begin(self, text: str, *, ended: bool = True) -> int:
        """Ask without waiting for the answer. `text`: `GET / | name: value`. Returns the stream's number."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, head2(text), end_stream=ended)
        await self.send()
        return stream

    async def body(self, stream: int, data: bytes, *, ended: bool = True, trailers: Fields | None = None) -> None:
        """As the windows of the other side allow."""
        ended_here = False
        async with asyncio.timeout(LIMIT_S):
            while data:
                size = min(self.h2.local_flow_control_window(stream), 16384, len(data))
                if not size:
                    await self._change()
                    continue
                self.h2.send_data(stream, data[:size], end_stream=ended and size == len(data) and trailers is None)
                data = data[size:]
                await self.send()
                ended_here = ended and not data and trailers is None
            if not ended_here and ended and trailers is None:
                self.h2.end_stream(stream)
                await self.send()
        if trailers is not None:
            self.h2.send_headers(stream, trailers, end_stream=True)
            await self.send()

    async def answer(self, stream: int) -> Answer2:
        """Complete. Raises `Broken` with the reason of a reset."""
        await self.until(lambda: self.answers[stream].complete or self.answers[stream].reset is not None or self.closed)
        answer = self.answers[stream]
        if not answer.complete:
            raise Broken(f"reset: {answer.reset}" if answer.reset is not None else "closed")
        return answer

    async def ask(self, text: str, body: bytes | None = None, trailers: Fields | None = None) -> Answer2:
        stream = await self.begin(text, ended=body is None)
        if body is not None:
            await self.body(stream, body, trailers=trailers)
        return await self.answer(stream)

    async def cancel(self, stream: int) -> None:
        self.h2.reset_stream(stream, ErrorCodes.CANCEL)
        await self.send()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await self._change()

    async def close(self) -> None:
        self._task.cancel()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(1 << 16):
                for event in self.h2.receive_data(data):
                    self._heed(event)
                await self.send()
                self._changed.set()
        except (OSError, ProtocolError):
            pass
        self.closed = True
        self._changed.set()

    def _heed(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.goodbye = event
        elif isinstance(event, PingAckReceived):
            self.pongs += 1
        elif isinstance(event, ResponseReceived):
            answer = self.answers[event.stream_id]
            answer.fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            answer.status = int(dict(answer.fields)[b":status"])
        elif isinstance(event, InformationalResponseReceived):
            self.answers[event.stream_id].interim += [int(dict(event.headers)[b":status"])]
        elif isinstance(event, DataReceived):
            self.answers[event.stream_id].body += event.data
            if self.eager:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, TrailersReceived):
            self.answers[event.stream_id].trailers = [(bytes(name), bytes(value)) for name, value in event.headers]
        elif isinstance(event, StreamEnded):
            self.answers[event.stream_id].complete = True
        elif isinstance(event, StreamReset):
            self.answers[event.stream_id].reset = int(event.error_code)


def head2(text: str) -> Fields:
    """`GET /path | name: value` as fields, for the app `web` unless it says another `:authority`."""
    line, *rest = text.split(" | ")
    method, _, path = line.partition(" ")
    given = [(name.encode(), value.encode()) for name, _, value in (each.partition(": ") for each in rest)]
    pseudo = {b":method": method.encode(), b":scheme": b"http", b":authority": b"web.example", b":path": path.encode()}
    pseudo |= {name: value for name, value in given if name.startswith(b":")}
    return [*pseudo.items(), *(field for field in given if not field[0].startswith(b":"))]


class Visit2:
    """A request as it came to a server of HTTP/2."""

    def __init__(self, server: Upstream2, link: _Link, stream: int, fields: Fields) -> None:
        self.server = server
        self.stream = stream
        self.fields = fields
        self.trailers: Fields = []
        self.reset: int | None = None
        self.body = b""
        self.complete = asyncio.Event()
        self.changed = asyncio.Event()
        self._link = link

    def __getitem__(self, name: str) -> str:
        (value,) = [value.decode("latin-1") for key, value in self.fields if key == name.encode()]
        return value

    async def read(self) -> bytes:
        await asyncio.wait_for(self.complete.wait(), LIMIT_S)
        return self.body

    async def head(self, status: int = 200, *fields: tuple[bytes, bytes], ended: bool = False) -> None:
        self._link.h2.send_headers(self.stream, [(b":status", b"%d" % status), *fields], end_stream=ended)
        await self._link.send()

    async def send(self, data: bytes, *, ended: bool = False) -> None:
        h2 = self._link.h2
        while data:
            size = min(h2.local_flow_control_window(self.stream), 16384, len(data))
            if not size:
                self._link.changed.clear()
                await self._link.changed.wait()
                continue
            h2.send_data(self.stream, data[:size], end_stream=ended and size == len(data))
            data = data[size:]
            await self._link.send()

    async def end(self, *trailers: tuple[bytes, bytes]) -> None:
        if trailers:
            self._link.h2.send_headers(self.stream, trailers, end_stream=True)
        else:
            self._link.h2.end_stream(self.stream)
        await self._link.send()

    async def refuse(self, code: ErrorCodes) -> None:
        self._link.h2.reset_stream(self.stream, code)
        await self._link.send()

    async def goodbye(self, last: int) -> None:
        """As a server that restarts: streams above `last` were not looked at."""
        self._link.h2.close_connection(last_stream_id=last)
        await self._link.send()

    def cut(self) -> None:
        self._link.writer.transport.abort()


Behaviour2 = Callable[[Visit2], Awaitable[None]]


class Upstream2:
    """A server of h2c with prior knowledge, as machines have one that want `h2_backend`."""

    def __init__(self, behaviour: Behaviour2, *, streams: int = 100, deaf: bool = False) -> None:
        """It takes so many requests at once on a connection; if it is `deaf`, nothing of their bodies."""
        self.behaviour = behaviour
        self.streams = streams
        self.deaf = deaf
        self.visits: list[Visit2] = []
        self.connections = 0
        self.errors: list[str] = []
        self.address = ("127.0.0.1", 0)
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()

    async def close(self) -> None:
        self._server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            await _Link(self, writer).run(reader)
        except ProtocolError as error:
            self.errors.append(str(error))
        except (OSError, asyncio.CancelledError):
            pass  # a proxy that goes away in the middle is what many tests are about
        finally:
            self.tasks.discard(task)
            writer.close()


class _Link:
    def __init__(self, server: Upstream2, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.writer = writer
        self.changed = asyncio.Event()
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: server.streams}
        )
        self._visits: dict[int, Visit2] = {}

    async def send(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def run(self, reader: asyncio.StreamReader) -> None:
        self.h2.initiate_connection()
        await self.send()
        while data := await reader.read(1 << 16):
            for event in self.h2.receive_data(data):
                self._heed(event)
            await self.send()
            self.changed.set()

    def _heed(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            visit = self._visits[event.stream_id] = Visit2(self.server, self, event.stream_id, fields)
            self.server.visits.append(visit)
            task = asyncio.create_task(self._behave(visit))
            self.server.tasks.add(task)
            task.add_done_callback(self.server.tasks.discard)
        elif isinstance(event, DataReceived):
            visit = self._visits[event.stream_id]
            visit.body += event.data
            if not self.server.deaf:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, TrailersReceived):
            self._visits[event.stream_id].trailers = [(bytes(name), bytes(value)) for name, value in event.headers]
        elif isinstance(event, StreamEnded):
            self._visits[event.stream_id].complete.set()
        elif isinstance(event, StreamReset):
            self._visits[event.stream_id].reset = int(event.error_code)
            self._visits[event.stream_id].complete.set()

    async def _behave(self, visit: Visit2) -> None:
        # A proxy that goes away in the middle is what many tests are about.
        with contextlib.suppress(ProtocolError, OSError):
            await self.server.behaviour(visit)


async def hello2(visit: Visit2) -> None:
    await visit.read()
    await visit.head()
    await visit.send(b"hello", ended=True)


async def echo2(visit: Visit2) -> None:
    body = await visit.read()
    await visit.head()
    await visit.send(body)
    await visit.end()

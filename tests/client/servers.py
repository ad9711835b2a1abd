"""A server on loopback that does exactly what a test tells it to, also what no server should."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

LIMIT_S = 10.0
"""Every wait of these tests ends by then: a machine may be slow, a test may not hang."""


class Call:
    """One accepted connection as the script of a test sees it. `number` counts them from 1."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer
        self.number = server.accepted

    async def request(self) -> str:
        """Wait for a whole request and note it. Returns its method and target, "" when the client has closed."""
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return ""
        lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        self.server.heads.append(head)
        self.server.bodies.append(body)
        return lines[0].rsplit(" ", 1)[0]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, body: str | bytes = b"", status: str = "200 OK", headers: str = "") -> None:
        raw = body.encode() if isinstance(body, str) else body
        await self.send(f"HTTP/1.1 {status}\r\n{headers}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    async def closed(self) -> bool:
        """Wait until the client closes its side. False when it sends something instead."""
        try:
            return await asyncio.wait_for(self.reader.read(1), LIMIT_S) == b""
        except ConnectionResetError:
            return True


Script = Callable[[Call], Awaitable[None]]


class Server:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._calls: set[asyncio.Task[None]] = set()
        self.port = 0
        self.accepted = 0
        self.open = 0
        self.open_most = 0
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.ended = asyncio.Event()  # a script has come to its end
        self.errors: list[BaseException] = []

    @property
    def requests(self) -> list[str]:
        """Methods and targets, in the order they came."""
        return [head.split(" HTTP/", 1)[0] for head in self.heads]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self.accepted += 1
        self.open += 1
        self.open_most = max(self.open_most, self.open)
        try:
            await self._script(Call(self, reader, writer))
        except (ConnectionResetError, BrokenPipeError):
            pass  # the client gave up: some tests are about that
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.ended.set()

    async def stop(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    """Run `script` for every connection. What it raises fails the test."""
    server = Server(script)
    listener = await asyncio.start_server(server._accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await server.stop()
        await listener.wait_closed()
    if failures := [e for e in server.errors if not isinstance(e, asyncio.CancelledError)]:
        raise failures[0]


def chunk(data: bytes) -> bytes:
    """A piece of a body that is sent with `transfer-encoding: chunked`."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answers(call: Call) -> None:
    """A well-behaved server: every request is answered with its own method, target and body."""
    while request := await call.request():
        await call.reply(f"{request} ".encode() + call.server.bodies[-1])

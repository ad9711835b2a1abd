"""A front that stands before a registry, counts what it is asked, and spoils what passes.

```
async with Front(registry.port) as front:                   # what it is asked is in front.requests
    await put(front.host, "app:1", image([...]))
    front.spoil("blobs/", cut(after=1000), times=1)
```

Every port is the system's choice, and all is on loopback.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What the registry behind said."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Spoil = Callable[[Asked, Answer, asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer in the place of the true one; the connection is closed afterwards."""


def cut(after: int) -> Spoil:
    """Dies after so many bytes of the body."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        whole = answer(true.status, true.body, true.headers)
        head = len(whole) - len(true.body)
        writer.write(whole[: head + after])
        await writer.drain()
        writer.transport.abort() if after == 0 else writer.close()

    return spoil


def corrupt(at: int = 0) -> Spoil:
    """One bit of the body is another."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        body = bytearray(true.body)
        body[at] ^= 1
        writer.write(answer(true.status, bytes(body), true.headers))
        await writer.drain()

    return spoil


def shorten(to: int) -> Spoil:
    """A body of so many bytes, as if it were the whole."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, true.body[:to], true.headers))
        await writer.drain()

    return spoil


def replace(body: bytes) -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, body, true.headers))
        await writer.drain()

    return spoil


def status(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(code, body, headers or {}))
        await writer.drain()

    return spoil


def passed() -> Spoil:
    """Not spoiled: for counting."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(true.status, true.body, true.headers))
        await writer.drain()

    return spoil


def redirect(to: Callable[[Asked], str]) -> Spoil:
    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(307, b"", {"Location": to(asked)}))
        await writer.drain()

    return spoil


def hold(gate: asyncio.Event, after: int = 0) -> Spoil:
    """Stops after so many bytes of the body until the gate is open."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        whole = answer(true.status, true.body, true.headers)
        head = len(whole) - len(true.body)
        writer.write(whole[: head + after])
        await writer.drain()
        await gate.wait()
        writer.write(whole[head + after :])
        await writer.drain()

    return spoil


def trickle(over: asyncio.Event, after: int = 0) -> Spoil:
    """After so many bytes of the body it sends a kibibyte a tenth of a second, until `over`: then the rest."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        whole = answer(true.status, true.body, true.headers)
        sent = len(whole) - len(true.body) + after
        writer.write(whole[:sent])
        while sent < len(whole) and not over.is_set():
            writer.write(whole[sent : sent + 1024])
            await writer.drain()
            sent += 1024
            await passing(over, 0.1)
        writer.write(whole[sent:])
        await writer.drain()

    return spoil


async def passing(over: asyncio.Event, seconds: float) -> None:
    """So long, or until it is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()


@dataclass
class _Rule:
    part: str
    spoil: Spoil
    method: str
    times: int | None
    arrives: bool


@dataclass
class Front:
    """Listens on a port of its own and passes everything on to the registry at `to`, but for what is to be spoiled.

    `requests`: all that were asked, in order. `basic`: a user name and password that it wants to see first.
    `ranges` False: it does not pass ranges on.
    """

    to: int
    basic: tuple[str, str] | None = None
    ranges: bool = True
    requests: list[Asked] = field(default_factory=list)
    _rules: list[_Rule] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Front:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spoil(
        self, part: str, spoil: Spoil, *, times: int | None = None, method: str = "GET", arrives: bool = True
    ) -> None:
        """Spoil the answers to requests whose target contains `part`, the next so many; None: all. `arrives` False: the
        registry behind never sees them."""
        self._rules.append(_Rule(part, spoil, method, times, arrives))

    def heal(self) -> None:
        self._rules.clear()

    def asked(self, part: str, method: str = "GET") -> list[Asked]:
        return [one for one in self.requests if part in one.target and one.method == method]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await read_request(reader)
            if request is not None:
                await self._answer(request, writer)
        except ConnectionError:
            pass  # the client left
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.requests.append(asked)
        if self.basic is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.basic).encode()).decode()
            if asked.headers.get("authorization") != wanted:
                writer.write(answer(401, b"{}", {"WWW-Authenticate": 'Basic realm="front"'}))
                await writer.drain()
                return
        for rule in self._rules:
            if rule.part in asked.target and rule.method == asked.method and rule.times != 0:
                rule.times = None if rule.times is None else rule.times - 1
                await rule.spoil(asked, await self._true(asked) if rule.arrives else Answer(0, {}, b""), writer)
                return
        true = await self._true(asked)
        writer.write(answer(true.status, true.body, true.headers, head_only=asked.method == "HEAD"))
        await writer.drain()

    async def _true(self, asked: Asked) -> Answer:
        """By HTTP/1.0: the answer ends with the connection."""
        skipped = {"connection", "content-length", "transfer-encoding"}
        skipped |= {"authorization"} if self.basic else set()
        skipped |= set() if self.ranges else {"range"}
        headers = {name: value for name, value in asked.headers.items() if name not in skipped}
        headers["content-length"] = str(len(asked.body))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.to)
        head = f"{asked.method} {asked.target} HTTP/1.0\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(head.encode() + b"\r\n" + asked.body)
        raw = await reader.read()
        writer.close()
        top, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = top.decode().split("\r\n")
        found = dict(line.split(": ", 1) for line in lines)
        return Answer(int(first.split(" ")[1]), found, body)


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif length := int(headers.get("content-length", "0")):
        body = await reader.readexactly(length)
    return Asked(method, target, headers, body)


def answer(code: int, body: bytes, headers: Mapping[str, str] | None = None, *, head_only: bool = False) -> bytes:
    kept = {name: value for name, value in (headers or {}).items() if name.lower() not in ("connection", "date")}
    if not (head_only and any(name.lower() == "content-length" for name in kept)):
        kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        kept["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    return f"HTTP/1.1 {code} Status\r\n{lines}Connection: close\r\n\r\n".encode() + (b"" if head_only else body)

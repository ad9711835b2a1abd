"""Talking to a command that a supervisor started: its descriptors come over a connection of its own.

The connection is the command's life: it is killed when we close it or are killed ourselves, and it ends with the
supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import Any, Literal, Protocol

import msgspec

from hawker.supervisor.calls import Converse
from hawker.worker.drivers.wire import SupervisorLost, encoded, told

READ_BYTES = 64 * 1024
_LINE_BYTES_MAX = 64 * 1024
Chunk = tuple[Literal["stdout", "stderr"], bytes]


class _Dials(Protocol):
    async def dial(self) -> socket.socket: ...


async def converse(supervisor: _Dials, request: Converse) -> Conversation:
    """Start a command on a connection of its own."""
    sock = await supervisor.dial()
    fds: list[int] = []
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, encoded(0, request, None))
        answer, rest = await _answer(sock, fds)
        if "error" in answer:
            raise told(answer)
        return Conversation(sock, fds, rest)
    except BaseException:
        for fd in fds:
            os.close(fd)
        sock.close()
        raise


class Conversation:
    """See `hawker.worker.drivers.base.Terminal`. `fds` are the terminal, or standard input, output and error."""

    def __init__(self, sock: socket.socket, fds: list[int], rest: bytes) -> None:
        self._sock = sock
        self._tty = len(fds) == 1
        self._input = fds[0]
        self._outputs: dict[int, Literal["stdout", "stderr"]]
        self._outputs = {fds[0]: "stdout"} if self._tty else {fds[1]: "stdout", fds[2]: "stderr"}
        self._open = set(fds)
        self._ended: asyncio.Task[tuple[int, int | None]] = asyncio.get_running_loop().create_task(
            self._end(rest), name="end of a command"
        )

    async def read(self) -> Chunk | None:
        loop = asyncio.get_running_loop()
        while self._outputs:
            if chunk := self._read_nowait():
                return chunk
            if not self._outputs:
                break
            ready: asyncio.Future[None] = loop.create_future()
            for fd in self._outputs:
                loop.add_reader(fd, _wake, ready)
            try:
                # A terminal says nothing when a process in the background still holds it: then the end of the command
                # is the end of what it wrote.
                await _first(ready, self._ended)
            finally:
                ready.cancel()
                for fd in self._outputs:
                    loop.remove_reader(fd)
            if self._ended.done():
                if chunk := self._read_nowait():
                    return chunk
                break
        return None

    async def write(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data and self._input >= 0:
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                ready: asyncio.Future[None] = loop.create_future()
                loop.add_writer(self._input, _wake, ready)
                try:
                    await _first(ready, self._ended)
                finally:
                    ready.cancel()
                    loop.remove_writer(self._input)
                if self._ended.done():
                    return
            except OSError:  # it has ended, or reads no more
                return

    async def end_input(self) -> None:
        if self._tty:
            await self.write(b"\x04")
        elif self._input >= 0:
            self._close(self._input)
            self._input = -1

    async def resize(self, columns: int, rows: int) -> None:
        if self._tty and self._input in self._open:
            with contextlib.suppress(OSError):  # it has ended
                fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def wait(self) -> tuple[int, int | None]:
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        self._ended.cancel()
        await asyncio.gather(self._ended, return_exceptions=True)
        for fd in list(self._open):
            self._close(fd)
        self._outputs = {}
        self._input = -1
        self._sock.close()

    def _read_nowait(self) -> Chunk | None:
        for fd, stream in list(self._outputs.items()):
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # EIO: nobody holds the terminal's other end
                data = b""
            if data:
                return stream, data
            del self._outputs[fd]
        return None

    async def _end(self, rest: bytes) -> tuple[int, int | None]:
        data = rest
        while True:
            line, newline, after = data.partition(b"\n")
            if newline:
                data = after
                message = msgspec.json.decode(line)
                if message.get("event") == "ended":  # others are for every connection
                    return message["code"], message["signal"]
                continue
            try:
                more = await asyncio.get_running_loop().sock_recv(self._sock, _LINE_BYTES_MAX)
            except OSError:
                more = b""
            if not more:
                return 255, None  # nobody sees its end
            data += more

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


async def _answer(sock: socket.socket, fds: list[int]) -> tuple[dict[str, Any], bytes]:
    """The answer, and what came behind it. Events that are for every connection may come before it. Raises
    `SupervisorLost`."""
    data = b""
    while True:
        line, newline, rest = data.partition(b"\n")
        if not newline:
            if not (more := await _receive(sock, fds)):
                raise SupervisorLost()
            data += more
            continue
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "event" not in answer:
            return answer, rest
        data = rest


async def _receive(sock: socket.socket, fds: list[int]) -> bytes:
    """Receive data and the descriptors that came with it; child processes do not inherit them."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
    try:
        data, found, _, _ = socket.recv_fds(sock, _LINE_BYTES_MAX, 3, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return b""
    for fd in found:
        os.set_blocking(fd, False)
    fds += found
    return data


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait for any of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

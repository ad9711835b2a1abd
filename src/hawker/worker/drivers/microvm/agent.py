"""The conversation with a guest's init: one session over a unix socket that QEMU serves.

What the requests are is written in `init/guest.c` and the files beside it. A session begins with a hello, at which the
guest kills the commands of any session before; whatever comes ahead of its answer was meant for another. Requests are
answered in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Literal, cast

from hawker.worker.drivers.base import MAX_EXEC_OUTPUT, ExecResult, StartFailed
from hawker.worker.drivers.microvm import frames

CREDIT = 256 * 1024  # what a command may send, and be sent, ahead of who reads it; see init/guest_commands.c
CHUNK = 32 * 1024
PART = 512 * 1024  # of a configuration, which may have files in it
KILLED_S = 5.0
"""How long a guest may take to end a command that it was told to kill. A guest that hangs, or obeys a stranger, never
does."""
_KILLED = 128 + 9, 9
REFUSAL_BYTES_MAX = 1000  # of the words of a guest, which may be a stranger's
RETRY_S = 0.001
RETRY_LONGEST_S = 0.02

Pairs = Iterable[tuple[str, bytes | str | int]]


class AgentLost(Exception):
    """The guest is gone, or the connection to it broke in the middle of a request."""


class AgentRefused(Exception):
    """What the guest could not do, in its words."""


class _Stream(asyncio.Protocol):
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._decoder = frames.Decoder()
        self.transport: asyncio.Transport | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._decoder.feed(data):
            self._agent.received(kind, number, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._agent.lost()
        if not self.gone.done():
            self.gone.set_result(None)


async def dial(path: Path, protocol: asyncio.Protocol) -> bool:
    """Connect to a unix socket whose path may be longer than the 108 bytes that a socket's name takes. False when
    nobody listens there."""
    try:
        fd = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, f"/proc/self/fd/{fd}/{path.name}")
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    finally:
        os.close(fd)
    return True


class Agent:
    """A session. `connect` makes one; `close` or the end of the guest ends it."""

    def __init__(self) -> None:
        self._stream = _Stream(self)
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._commands: dict[int, Command] = {}
        self._greeted = False
        self.open = False
        self.idle = False  # no program has been started in it

    @classmethod
    async def connect(cls, path: Path | Callable[[asyncio.Protocol], Awaitable[bool]]) -> Agent:
        """Wait until somebody listens at `path`, or what dials in its place has somebody, and the guest behind it
        answers. Only cancelling ends the wait."""
        agent = cls()
        pause_s = RETRY_S
        while not await (dial(path, agent._stream) if isinstance(path, Path) else path(agent._stream)):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, RETRY_LONGEST_S)
        agent.open = True
        try:
            assert agent._stream.transport is not None
            agent._stream.transport.write(frames.END)
            agent.idle = await agent.ask("h") == b"idle"
        except BaseException:
            await agent.close()
            raise
        return agent

    async def close(self) -> None:
        if self._stream.transport:
            self._stream.transport.abort()
            await asyncio.shield(self._stream.gone)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def ask(self, kind: str, payload: bytes = b"") -> bytes:
        """Raises `AgentLost`, `AgentRefused`."""
        return await self._ask(kind, next(self._numbers), payload)

    async def start(self, pairs: Pairs) -> None:
        """Make the idle guest a machine and run its program. Repeating does nothing. Raises `StartFailed`."""
        payload = _pairs(pairs)
        *before, last = [payload[at : at + PART] for at in range(0, len(payload), PART)]
        try:
            for part in before:
                self.send("b", 0, part)
            await self.ask("s", last)
        except AgentRefused as error:
            raise StartFailed(str(error)) from error
        self.idle = False

    async def signal(self, number: int) -> None:
        await self.ask("g", frames.fields([number]))

    async def renew(self, clock_ns: int, seed: bytes) -> None:
        """Set the clock and mix new randomness in, after a pause that the guest did not see."""
        await self.ask("n", frames.fields([clock_ns, seed]))

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        terminal: tuple[int, int] | None = None,
    ) -> Command:
        """A command beside the program. Raises `StartFailed`, `AgentLost`."""
        pairs: list[tuple[str, bytes | str | int]] = [("argument", argument) for argument in argv]
        pairs += [("environment", f"{name}={value}") for name, value in env.items()]
        if terminal:
            pairs.append(("terminal", "{} {}".format(*terminal)))
        command = Command(self, next(self._numbers))
        self._commands[command.number] = command
        try:
            await self._ask("x", command.number, _pairs(pairs))
        except BaseException as error:
            await command.close()
            if isinstance(error, AgentRefused | ValueError):  # the latter of a command line that is too long
                raise StartFailed(str(error)) from error
            raise
        return command

    async def execute(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes,
        env: Mapping[str, str],
        timeout_s: float,
        killed_s: float = KILLED_S,
    ) -> ExecResult:
        """See `Driver.exec`. A command whose time is over has `killed_s` more to end."""
        command = await self.run(argv, env=env)
        output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        truncated = False

        async def feed() -> None:
            for at in range(0, len(stdin), CHUNK):
                await command.write(stdin[at : at + CHUNK])
            await command.end_input()

        async def collect() -> None:
            nonlocal truncated
            while found := await command.read():
                kept = output[found[0]]
                room = MAX_EXEC_OUTPUT - len(kept)
                kept += found[1][:room]
                truncated |= len(found[1]) > room

        feeding = asyncio.ensure_future(feed())
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await collect()
            except TimeoutError:
                timed_out = True
                command.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(killed_s):
                        await collect()
            code, signal = await command.wait() if command.over else _KILLED
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await command.close()
        return ExecResult(
            code=code,
            signal=signal,
            stdout=bytes(output["stdout"]),
            stderr=bytes(output["stderr"]),
            timed_out=timed_out,
            truncated=truncated,
        )

    # --- the stream --------------------------------------------------------------------------------------------------

    async def _ask(self, kind: str, number: int, payload: bytes) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self.send(kind, number, payload)
            return await future
        finally:
            self._answers.pop(number, None)

    def send(self, kind: str, number: int, payload: bytes = b"") -> None:
        """Raises `AgentLost`."""
        if not self.open or self._stream.transport is None:
            raise AgentLost("the guest is not connected")
        self._stream.transport.write(frames.encode(kind, number, payload))

    def received(self, kind: str, number: int, payload: bytes) -> None:
        if kind in "rf":
            if (future := self._answers.get(number)) and not future.done():
                self._greeted = True
                if kind == "r":
                    future.set_result(payload)
                else:
                    future.set_exception(AgentRefused(payload[:REFUSAL_BYTES_MAX].decode(errors="replace")))
        elif self._greeted and (command := self._commands.get(number)):
            command.received(kind, payload)

    def lost(self) -> None:
        self.open = False
        for future in self._answers.values():
            if not future.done():
                future.set_exception(AgentLost("the guest is gone"))
        for command in list(self._commands.values()):
            command.lost()

    def forget(self, number: int) -> None:
        self._commands.pop(number, None)


class Command:
    """A command beside the program: a `Terminal` of the driver's contract."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self.number = number
        self._read: deque[tuple[Literal["stdout", "stderr"], bytes]] = deque()
        self._unread = 0  # bytes of output that nobody has read yet
        self._some = asyncio.Event()
        self._untaken = 0  # bytes of input that the guest has not told to have taken
        self._taken = asyncio.Event()
        self._ended: asyncio.Future[tuple[int, int | None]] = asyncio.get_running_loop().create_future()

    def received(self, kind: str, payload: bytes) -> None:
        if self._ended.done():
            return
        if kind in "oe":
            self._unread += len(payload)
            if not payload or self._unread > CREDIT:  # our init sends no such thing: it is no longer ours
                self.kill()
                self.lost()
                return
            self._read.append(("stdout" if kind == "o" else "stderr", payload))
            self._some.set()
            return
        try:
            values = frames.read_fields(payload)
            if kind == "a":
                self._untaken = max(0, self._untaken - max(0, int(values[0])))
                self._taken.set()
            elif kind == "w":
                number = int(values[1]) & 0xFF
                self._ended.set_result((number, None) if values[0] == b"code" else (128 + number, number))
                self._some.set()
                self._taken.set()
        except (frames.Malformed, ValueError, IndexError):
            self.lost()

    def lost(self) -> None:
        if not self._ended.done():
            self._ended.set_exception(AgentLost("the guest is gone"))
            self._ended.exception()  # also when nobody waits for it
        self._some.set()
        self._taken.set()

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        while not self._read:
            if self._ended.done():
                return None
            self._some.clear()
            await self._some.wait()
        stream, data = self._read.popleft()
        self._unread -= len(data)
        if not self._ended.done():
            with contextlib.suppress(AgentLost):
                self._agent.send("c", self.number, frames.fields([len(data)]))
        return stream, data

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            while self._untaken >= CREDIT and not self._ended.done():
                self._taken.clear()
                await self._taken.wait()
            if self._ended.done():
                return
            chunk = data[at : at + CHUNK]
            self._untaken += len(chunk)
            self._agent.send("i", self.number, chunk)

    async def end_input(self) -> None:
        if not self._ended.done():
            self._agent.send("z", self.number)

    async def resize(self, columns: int, rows: int) -> None:
        if not self._ended.done():
            self._agent.send("t", self.number, frames.fields([columns, rows]))

    @property
    def over(self) -> bool:
        return self._ended.done()

    async def wait(self) -> tuple[int, int | None]:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        with contextlib.suppress(AgentLost):
            self._agent.send("k", self.number)

    async def close(self) -> None:
        if not self._ended.done():
            self.kill()
        self._agent.forget(self.number)
        self.lost()


def _pairs(pairs: Pairs) -> bytes:
    return frames.fields(value for pair in pairs for value in pair)

"""Sessions: commands inside machines that somebody talks to by one HTTP request after another.

`hawker.model.inside_api` has the form. A session keeps one piece of output between the command and its reader: a slow
reader makes the command wait. It keeps input up to `INPUT_BYTES_MAX` until the command takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from hawker.errors import NotFound, TooManyRequests
from hawker.host import Host
from hawker.model.inside_api import (
    AWAY_S,
    FIRST_S,
    KIND_QUIET,
    KIND_STDERR,
    KIND_STDOUT,
    QUIET_S,
    end_frame,
    frame,
)
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import Terminal

SESSIONS_MAX = 256
"""How many a worker has at most: each holds descriptors and a process."""
CONNECTIONS_MAX = 1024
"""How many sessions that are connections a worker has at most: each holds a descriptor."""
INPUT_BYTES_MAX = 1 << 20
INPUT_S = 20.0
"""How long a request with input waits for room."""


class Sessions:
    """The sessions of one worker, `most` at a time. They end with it."""

    def __init__(self, host: Host, most: int = SESSIONS_MAX) -> None:
        self._host = host
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, machine: str, start: Callable[[], Awaitable[Terminal]]) -> str:
        """The id of a session with the command that `start` starts. Raises `TooManyRequests` before that, and what
        `start` raises."""
        if len(self._sessions) + self._opening >= self._most:
            raise TooManyRequests(f"this worker has {self._most} sessions of this kind already; close some")
        self._opening += 1
        try:
            terminal = await start()
        finally:
            self._opening -= 1
        session_id = self._host.token(128)
        self._sessions[session_id] = Session(machine, terminal, lambda: self._drop(session_id))
        return session_id

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, machine: str, session_id: str) -> Session:
        """Raises `NotFound`."""
        session = self._sessions.get(session_id)
        if session is None or session.machine != machine:
            raise NotFound(f"session not found: {session_id}", hint="it has ended, or nobody read it for too long")
        return session

    async def remove(self, machine: str, session_id: str) -> None:
        """Raises `NotFound`."""
        session = self.get(machine, session_id)
        del self._sessions[session_id]
        await session.close()

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()), *self._closing)

    def _drop(self, session_id: str) -> None:
        if session := self._sessions.pop(session_id, None):
            task = asyncio.get_running_loop().create_task(session.close(), name=f"close session {session_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class Session:
    """One command. `output` may be read by one at a time: another one takes over."""

    def __init__(self, machine: str, terminal: Terminal, drop: Callable[[], None]) -> None:
        self.machine = machine
        self._terminal = terminal
        self._drop = drop
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._reading: asyncio.Task[tuple[str, bytes] | None] | None = None
        self._superseded = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._writing = loop.create_task(self._write(), name="input of a session")
        self._away: asyncio.TimerHandle | None = loop.call_later(FIRST_S, self._nobody)
        self._closed = False

    async def output(self) -> AsyncIterator[bytes]:
        """Frames up to the command's end. The session is over when that was taken."""
        self._superseded.set()
        mine = self._superseded = asyncio.Event()
        self._arm(False)
        taken_over = asyncio.get_running_loop().create_task(mine.wait(), name="another reader of a session")
        ended = False
        try:
            while not mine.is_set() and not self._closed:
                reading = self._reading = self._reading or self._read_later()
                await asyncio.wait({reading, taken_over}, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                if mine.is_set() or self._closed:
                    return
                if not reading.done():
                    yield frame(KIND_QUIET)
                    continue
                self._reading = None
                chunk = reading.result()
                if chunk is None:
                    ended = True
                    yield end_frame(*await self._terminal.wait())
                    return
                yield frame(KIND_STDERR if chunk[0] == "stderr" else KIND_STDOUT, chunk[1])
        finally:
            taken_over.cancel()
            if ended:
                self._drop()
            elif not mine.is_set() and not self._closed:
                self._arm(True)

    async def write(self, data: bytes, *, end: bool) -> None:
        """Raises `TooManyRequests` when the command reads too little of what it was given before; nothing is taken
        then."""
        try:
            async with asyncio.timeout(INPUT_S):
                while self._waiting_bytes and self._waiting_bytes + len(data) > INPUT_BYTES_MAX:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise TooManyRequests("the command does not read its input; try again later") from None
        if data:
            self._waiting_bytes += len(data)
            self._input.put_nowait(data)
        if end:
            self._input.put_nowait(None)

    async def resize(self, columns: int, rows: int) -> None:
        await self._terminal.resize(columns, rows)

    async def close(self) -> None:
        """Kill the command if it runs."""
        self._closed = True
        self._arm(False)
        self._superseded.set()
        tasks = [task for task in (self._writing, self._reading) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._terminal.close()

    async def _write(self) -> None:
        while (data := await self._input.get()) is not None:
            await self._terminal.write(data)
            self._waiting_bytes -= len(data)
            self._room.set()
        await self._terminal.end_input()

    def _read_later(self) -> asyncio.Task[tuple[str, bytes] | None]:
        async def read() -> tuple[str, bytes] | None:
            return await self._terminal.read()

        return asyncio.get_running_loop().create_task(read(), name="output of a session")

    def _arm(self, on: bool) -> None:
        if self._away:
            self._away.cancel()
        self._away = asyncio.get_running_loop().call_later(AWAY_S, self._nobody) if on else None

    def _nobody(self) -> None:
        _logger.info("session.killed", resource=self.machine, cause="local rule: nobody reads it")
        self._drop()


_logger = get_logger()

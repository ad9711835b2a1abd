"""Standby processes (`hawker/init/standby.c`): they are made before anybody knows which program each will become.

Making a process takes longer than all the rest of a start, and what it is to become can be said later. So the
supervisor keeps a few that have been told nothing yet. Each ends with the supervisor, and with the daemon that it is
kept for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

from hawker.supervisor import proc
from hawker.supervisor.common import Common
from hawker.supervisor.loop import Timer
from hawker.supervisor.programs import CannotStart, Launch, spawn
from hawker.supervisor.protocol import GATE

KEPT: Final = 4
AGAIN_S: Final = 0.02
"""How long after a standby process was taken the next one is made. By then the client that waits for the program has
most likely been answered; making a process takes a millisecond of a core that the program has a small share of."""
LEAST: Final = 2
"""With fewer left, the next one is made after `SOON_S`, whatever else is going on: a start that finds no standby
process has to make its own."""
SOON_S: Final = 0.005
BLANK: Final = "blank"


class Gone(Exception):
    """The process that waited at the gate has ended."""


class StartGate:
    """One such process and the gate it waits at. It is told once what to become; the first byte that anybody writes
    into the pipe at `name` then lets it become that, or end."""

    def __init__(self, program: str, path: str, mark: str) -> None:
        """`program` is its file, `path` a name for its pipe. Raises OSError."""
        self.name = path
        self._ends: list[int] = []
        os.mkfifo(path, 0o600)
        try:
            wait = self._opened(path, os.O_RDONLY | os.O_NONBLOCK)
            self._tell = self._opened(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(wait, True)
            self._said, say = os.pipe2(os.O_CLOEXEC)
            self._ends += [self._said, say]
            null = self._opened(os.devnull, os.O_RDWR)
            argv, env = [program, str(wait), str(say)], {proc.MARKER: mark}
            self.pid = spawn(Launch(program, argv, env, cwd="/", output=(null, null), kept=[wait, say]))
        except BaseException:
            self.close()
            raise
        for fd in (wait, say, null):
            os.close(fd)
        self._ends = [self._tell, self._said]
        now = proc.stat(self.pid)
        self.start_ticks = now.start if now else 0

    def _opened(self, path: str, flags: int) -> int:
        self._ends.append(os.open(path, flags | os.O_CLOEXEC))
        return self._ends[-1]

    def tell(self, launch: Launch, output: Sequence[str], groups: Sequence[str], name: str) -> None:
        """Tell it what to become: `launch`, but with its output to two named pipes, in the groups of these `entrances`.
        From then on its pipe has the name `name`. Raises `Gone`, and ValueError for what cannot be told."""
        env = [f"{key}={value}" for key, value in launch.env.items()]
        user = "" if launch.user is None else str(launch.user)
        said = [name, launch.cwd, *output, user, *_counted(groups), launch.program, *_counted(launch.argv)]
        said += _counted(env)
        data = os.fsencode("\0".join(said)) + b"\0"
        if data.count(b"\0") > len(said):
            raise ValueError("embedded null byte")
        data = len(data).to_bytes(4, sys.byteorder) + data
        try:
            if os.write(self._tell, data) < len(data):
                raise ValueError("its words are too many")
        except (BrokenPipeError, BlockingIOError) as error:
            raise Gone from error
        os.rename(self.name, name)
        self.name = name

    def open(self) -> None:
        """Release it to become the program, unless somebody has done so already, or has `shut` the gate. Raises
        `Gone`."""
        try:
            os.write(self._tell, b"g")
        except BrokenPipeError as error:
            raise Gone from error

    def shut(self) -> None:
        """Have it end, unless somebody has released it before."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._tell, b"x")

    def became(self) -> bool:
        """Wait until it has left the gate, and return whether it runs its program, or did. Call this after `open`,
        `shut` or its end. Raises OSError when the program cannot be run."""
        why = os.read(self._said, 4)
        if len(why) == 4:
            number = int.from_bytes(why, sys.byteorder)
            raise OSError(number, os.strerror(number))
        return not os.path.exists(self.name)

    def close(self) -> None:
        """Close its pipes. The process ends if it was still waiting."""
        ends, self._ends = self._ends, []
        for fd in ends:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name)


class StandbyProcesses:
    """Standby processes that have been told nothing yet. `keep` the file that they run to have them made."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._program = ""
        self._blank: list[StartGate] = []
        self._numbers = count()
        self._mark = common.mark(BLANK, "")
        self._timer: Timer | None = None
        self._due_s = 0.0

    def keep(self, program: str) -> None:
        """Keep some ready from now on, until `keep` is called with ""."""
        if program != self._program:
            self._program = program
            self.clear()
            if program:
                self._fill_at(time.monotonic() + AGAIN_S)

    def take(self, program: str) -> StartGate:
        """Raises `CannotStart`."""
        if program == self._program:
            gate = self._blank.pop() if self._blank else None
            self._soon()
            if gate is not None:
                return gate
        try:
            return self._made(program)
        except OSError as error:
            raise CannotStart(f"no process can wait for a program: {error}") from error

    def clear(self) -> None:
        """End those that are there."""
        blank, self._blank = self._blank, []
        for gate in blank:
            gate.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(gate.pid, signal.SIGKILL)  # not reaped yet: it is watched

    def _made(self, program: str) -> StartGate:
        path = self._common.files.instance(f"{BLANK}/{next(self._numbers)}") + GATE
        with self._common.host_mounts():
            return StartGate(program, path, self._mark)

    def _soon(self) -> None:
        """Make another one soon: one was taken, or is gone."""
        now_s = time.monotonic()
        if len(self._blank) >= LEAST:
            self._fill_at(now_s + AGAIN_S)
        elif self._timer is None or self._due_s > now_s + SOON_S:
            self._fill_at(now_s + SOON_S)

    def _fill_at(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._common.loop.later(max(0.0, due_s - time.monotonic()), self._fill)

    def _fill(self) -> None:
        self._timer = None
        if not self._program or len(self._blank) >= KEPT:
            return
        with contextlib.suppress(OSError):  # then they are made when they are needed, or not
            gate = self._made(self._program)
            self._common.children.watch(gate.pid, lambda status: self._ended(gate))
            self._blank.insert(0, gate)
            self._fill_at(time.monotonic())

    def _ended(self, gate: StartGate) -> None:
        """A standby process ended while it waited: somebody killed it."""
        if gate in self._blank:
            self._blank.remove(gate)
            gate.close()
            self._soon()


def _counted(words: Sequence[str]) -> list[str]:
    return [str(len(words)), *words]

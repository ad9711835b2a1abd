"""What a program is started from and with: its file, its environment, and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat as stats
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


class CannotStart(Exception):
    """The program cannot be started; nothing is left of the attempt but its group, if it was made."""


class Gone(Exception):
    """What waited in front of a program has ended."""


@dataclass(frozen=True)
class Invocation:
    """Of a command beside a program. `descriptors` are its standard ones by number; with `terminal`, columns and rows,
    it gets one instead."""

    argv: Sequence[str]
    env: Mapping[str, str]
    descriptors: Mapping[int, int]
    terminal: tuple[int, int] | None = None

    def environment(self, program: Mapping[str, str]) -> dict[str, str]:
        """The command's, where this is the program's."""
        return {**program, **({"TERM": "xterm"} if self.terminal else {}), **self.env}


@dataclass(frozen=True)
class Launch:
    """How a process begins: its file, what it is told, its two standard outputs, and what it keeps of our descriptors.
    It has nothing to read, and a session of its own."""

    program: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    output: tuple[int, int]
    kept: Sequence[int] = ()


def which(program: str, path: str) -> str:
    """The program's file, looked up in `path` unless it has a slash. Raises `CannotStart` with what is wrong."""
    names = [program] if "/" in program else [f"{d or '.'}/{program}" for d in path.split(":")]
    for name in names:
        with contextlib.suppress(OSError):
            mode = os.stat(name).st_mode
            if stats.S_ISREG(mode) and os.access(name, os.X_OK):
                return name
            if "/" in program:
                raise CannotStart(f"{program}: not an executable file")
    raise CannotStart(f"{program}: not found" + ("" if "/" in program else f" in PATH ({path})"))


def spawn(launch: Launch) -> int:
    """Its pid. Raises OSError, ValueError."""
    child = subprocess.Popen(
        launch.argv,
        executable=launch.program,
        env=launch.env,
        cwd=launch.cwd,
        stdin=subprocess.DEVNULL,
        stdout=launch.output[0],
        stderr=launch.output[1],
        pass_fds=launch.kept,
        start_new_session=True,
    )
    child.returncode = 0  # reaped by the loop's waitid, not by subprocess
    return child.pid


class Gate:
    """In front of a program, whose process is there and waits (`hawker/init/hold.c`). It ends when we do."""

    def __init__(self, hold: str, program: str) -> None:
        """`hold` is the file of what waits."""
        self._program = program
        self._hold = hold
        self._wait, self._open = os.pipe2(os.O_CLOEXEC)
        self._said, self._say = os.pipe2(os.O_CLOEXEC)

    def before(self, launch: Launch, groups: Sequence[str]) -> Launch:
        """What is to be started instead. `groups` as `hawker.supervisor.cgroups.Groups.entrances` has them."""
        ends = self._wait, self._say
        argv = [self._hold, *map(str, ends), launch.program, str(len(groups)), *groups, *launch.argv]
        return replace(launch, program=self._hold, argv=argv, kept=[*launch.kept, *ends])

    def spawned(self) -> None:
        """The child has its ends, or there is none."""
        for fd in (self._wait, self._say):
            os.close(fd)

    def open(self) -> None:
        """Let it become its program. Raises `Gone`."""
        try:
            os.write(self._open, b"g")
        except BrokenPipeError as error:
            raise Gone from error

    def passed(self) -> None:
        """Return once it runs its program. Raises OSError when that cannot be started."""
        why = os.read(self._said, 4)
        if len(why) == 4:
            number = int.from_bytes(why, sys.byteorder)
            raise OSError(number, os.strerror(number), self._program)

    def close(self) -> None:
        os.close(self._open)
        os.close(self._said)


def open_terminal(columns: int, rows: int) -> tuple[int, int]:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, slave


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

"""What a program is started from and with: its file, its environment, and a terminal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as stats
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hawker.supervisor.users import become


class CannotStart(Exception):
    """The program cannot be started; nothing is left of the attempt but its group, if it was made."""


@dataclass(frozen=True)
class Invocation:
    """How a command beside a program begins. `descriptors` are its standard streams by number; with `terminal`
    (columns, rows) it gets a terminal instead."""

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
    It has nothing to read, and a session of its own. `user` is who it becomes first, None for who we are."""

    program: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    output: tuple[int, int]
    kept: Sequence[int] = ()
    user: int | None = None


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
    try:
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
            preexec_fn=None if launch.user is None else partial(become, launch.user),
        )
    except subprocess.SubprocessError as error:  # all that it says of an error in `become`
        raise PermissionError(errno.EPERM, f"it cannot become user {launch.user}") from error
    child.returncode = 0  # reaped by the loop's waitid, not by subprocess
    return child.pid


def open_terminal(columns: int, rows: int) -> tuple[int, int]:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, slave


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

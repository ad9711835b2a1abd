"""The processes that end as our children: those we spawned, and orphans that came to us as their subreaper."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hawker.supervisor.loop import Loop

Ended = Callable[[int], None]
"""Is told the exit code, or minus the signal."""

_ABOVE: Final = 16  # descriptors that are renumbered for a child are first moved out of the way of their new numbers


class Children:
    """Tells whoever watches a process of its end. A process that a container runtime leaves to us becomes known by a
    number in a file only after the runtime has ended, and may have ended itself by then: so ends of unknown processes
    are kept while somebody `expects` one."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._told: dict[int, Ended] = {}
        self._meant: dict[int, Callable[[int], int]] = {}
        self._unknown: dict[int, int] = {}
        self._expecting = 0

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        descriptors: Mapping[int, int],
        ended: Ended,
    ) -> int:
        """Start a program in a session of its own, with our descriptors by the numbers it is to know them by; 0 to 2
        are /dev/null where they are not given. Raises OSError."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        moved = []
        try:
            actions = []
            for number in sorted({0, 1, 2} | descriptors.keys()):
                moved.append(_above(descriptors.get(number, null)))
                actions.append((os.POSIX_SPAWN_DUP2, moved[-1], number))
            pid = os.posix_spawn(argv[0], list(argv), dict(env), file_actions=actions, setsid=True)
        finally:
            for fd in (null, *moved):
                os.close(fd)
        self.watch(pid, ended)
        return pid

    def watch(self, pid: int, ended: Ended) -> None:
        """Tell of the end of a child, also of one that has ended since we expected it."""
        if (status := self._unknown.pop(pid, None)) is not None:
            self._loop.later(0, lambda: ended(status))
        else:
            self._told[pid] = ended

    def translate(self, pid: int, meant: Callable[[int], int]) -> None:
        """Watch a child that runs a command for us: `meant` turns its status into that of the command."""
        self._meant[pid] = meant

    def forget(self, pid: int) -> None:
        self._told.pop(pid, None)

    def expect(self, expecting: bool) -> None:
        """Call in pairs."""
        self._expecting += 1 if expecting else -1
        if not self._expecting:
            self._unknown.clear()

    def reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if meant := self._meant.pop(found.si_pid, None):
                status = meant(status)
            if ended := self._told.pop(found.si_pid, None):
                ended(status)
            elif self._expecting:
                self._unknown[found.si_pid] = status


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)

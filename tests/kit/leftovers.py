"""Finds processes that outlive the tests that started them, however far they were detached.

A process belongs to this run of the tests when its environment carries the run's mark, which children inherit, or when
its working directory is inside the run's temporary directory, which is where machines run (a driver gives a machine an
environment of its own). Parentage says nothing: daemons leave it behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.kit import leaks

MARK = "HAWKER_TEST_RUN"


class Leftovers:
    """`note` after each module of tests, `end` after all of them. Processes are told apart by id and start time."""

    def __init__(self, base: Path) -> None:
        self._base = base.resolve()
        self._mark = f"{MARK}={os.getpid()}-{self._base}"
        name, _, value = self._mark.partition("=")
        os.environ[name] = value
        self._first_seen: dict[tuple[int, str], str] = {}

    def note(self, where: str) -> None:
        """Remember `where` for every process of this run that is alive now and was not before."""
        for process in self.alive():
            self._first_seen.setdefault(process, where)

    def end(self) -> list[str]:
        """Give what is left a moment to end, kill the rest and describe it."""
        deadline = time.monotonic() + leaks.SETTLE_S
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        lines = []
        for pid, started in alive:
            where = self._first_seen.get((pid, started), "the last test")
            lines.append(f"  {pid} {_command(pid)} (first seen after {where})")
            with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
        return lines

    def alive(self) -> list[tuple[int, str]]:
        """(process id, start time in clock ticks) of every live process of this run but ourselves."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if self._is_ours(entry):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if fields[0] not in "ZX":  # a zombie runs no more; its parent has yet to ask for its status
                        found.append((int(entry.name), fields[19]))
            except OSError:
                continue  # ended while we looked, or another user's: not ours
        return found

    def _is_ours(self, entry: Path) -> bool:
        if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
            return True
        return Path(os.readlink(entry / "cwd")).is_relative_to(self._base)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "(ended)"

"""Processes of this host, found by a word in their command lines that no other test uses, or by their ids."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from tests.kit.waiting import eventually

_words = count(1)


def _open_to_all(program: str) -> bool:
    real = Path(program).resolve()
    return all(place.stat().st_mode & 0o001 for place in (real, *real.parents))


PYTHON = sys.executable if _open_to_all(sys.executable) else "/usr/bin/python3"
"""For programs of machines, which are other users than we are. It need not have our packages."""


def word() -> str:
    """A number that is in no other command line of this host: seconds to sleep, days of them."""
    return str(os.getpid() * 10_000 + next(_words))


async def gone(mark: str = "", pid: int | None = None) -> None:
    """Wait until no process with this word in its command line is on the host, nor the one with this id."""

    async def nothing() -> bool:
        return not (pid and alive(pid)) and not (mark and marked(mark))

    await eventually(nothing, f"nothing of {mark} {pid} runs")


def marked(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read() and alive(int(name)):
                    found.append(int(name))
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

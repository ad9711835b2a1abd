"""A file that keeps room on the disk and is deleted when the disk is full.

What makes room again needs some itself: a destroy is a commit, and an agent that starts writes a little before it can
serve. With the file gone there is enough for thousands of those. It is made again once the disk has more.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NAME = "reserve"
LEAST_BYTES = 1 << 20
"""With less free room than this, an agent gives the reserve up at its start."""


class Reserve:
    """The file `reserve` in a directory, of so many bytes; 0: there is none. `given_up`: it should be there, and there
    is no room for it."""

    def __init__(self, directory: Path, size: int) -> None:
        self._path = directory / NAME
        self._size = size
        self.given_up = False

    def open(self) -> None:
        """Make the file at an agent's start, or give it up if the start needs its room."""
        if self._free() < LEAST_BYTES and self._path.exists():
            self.give_up()
        else:
            self.make()

    def give_up(self) -> bool:
        """Delete the file. Returns whether that made room."""
        self.given_up = self._size > 0
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True

    def make(self) -> None:
        """Make it if it is missing and twice as much is free. May take a while on a disk that is slow."""
        if self._size == 0 or (self._path.exists() and self._path.stat().st_size == self._size):
            self.given_up = False
            return
        if self._free() < 2 * self._size:
            self.given_up = True
            return
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, self._size)
                os.posix_fallocate(file, 0, self._size)
            finally:
                os.close(file)
        except OSError:
            with suppress(OSError):
                os.unlink(self._path)
            self.given_up = True
        else:
            self.given_up = False

    def _free(self) -> int:
        """The free bytes of its disk."""
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

"""What is to be removed may be a million files, and the supervisor has one thread: it is moved out of the way at once,
and removed by a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil

from hawker.supervisor.children import Children


class Trash:
    """Under the supervisor's directory. What an earlier supervisor left in it is removed first."""

    def __init__(self, directory: str, children: Children) -> None:
        self._place = f"{directory}/trash"
        self._children = children
        os.makedirs(self._place, mode=0o700, exist_ok=True)
        self._empty()

    def discard(self, path: str) -> None:
        """A file or a directory on the same file system. Not there: success."""
        with contextlib.suppress(FileNotFoundError):
            if not os.path.isdir(path) or os.path.islink(path):
                os.unlink(path)
                return
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)
                return
            os.rename(path, f"{self._place}/{os.stat(path).st_ino}")
            self._empty()

    def _empty(self) -> None:
        names = os.listdir(self._place)
        if names and (program := shutil.which("rm", path="/usr/bin:/bin")):
            argv = [program, "-rf", "--", *(f"{self._place}/{name}" for name in names)]
            self._children.spawn(argv, {}, {}, lambda status: None)

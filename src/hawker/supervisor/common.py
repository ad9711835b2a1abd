"""What all that a supervisor runs has in common: its loop, files, children and groups."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

from hawker.supervisor import proc
from hawker.supervisor.cgroups import Groups, find
from hawker.supervisor.children import Children
from hawker.supervisor.files import Files, in_memory
from hawker.supervisor.loop import Loop
from hawker.supervisor.notify import Writes
from hawker.supervisor.trash import Trash

KILL_AGAIN_S: Final = 0.002
KILL_AGAIN_MOST_S: Final = 0.25
TIDY_S: Final = 0.1
TIDY_MOST_S: Final = 20.0
_CLONE_NEWNS: Final = 0x20000
_libc = ctypes.CDLL(None, use_errno=True)


class Common:
    """Of the supervisor of one directory."""

    def __init__(self, directory: str, *, cgroups: bool) -> None:
        self.directory = directory
        self.host_namespace = -1  # of mounts, where we have one of our own
        self.id = hashlib.blake2b(os.path.realpath(directory).encode(), digest_size=6).hexdigest()
        self.files = Files(directory, in_memory())
        self.group_prefix = f"hawker-{self.id}"
        self.groups: Groups | None = find(self.group_prefix) if cgroups else None
        self.loop = Loop()
        self.children = Children(self.loop)
        self.trash = Trash(directory, self.children, self.loop)
        self.writes = Writes(self.loop)

    @contextlib.contextmanager
    def host_mounts(self) -> Iterator[None]:
        """For programs of the host itself: they see its mounts, and what they mount is its own. The working directory
        is the root meanwhile."""
        if self.host_namespace < 0:
            yield
            return
        back = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            _enter(self.host_namespace)
            yield
        finally:
            _enter(back)
            os.fchdir(here)
            os.close(here)
            os.close(back)

    def mark(self, machine: str, key: str) -> str:
        """What the environment of an instance's processes holds, where it is ours to set."""
        return f"{self.id}:{machine}:{key}"

    def kill_marked(self, mark: str, then: Callable[[], None] = lambda: None) -> None:
        """Kill what has this mark until nothing has."""
        its = [pid for pid in proc.everyone() if proc.marker(pid) == mark]
        for pid in its:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if its:
            self.loop.later(KILL_AGAIN_S, lambda: self.kill_marked(mark, then))
        else:
            then()

    def remove_group(
        self,
        name: str,
        then: Callable[[], None] = lambda: None,
        again_s: float = KILL_AGAIN_S,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Kill what is in a group until nothing is, and remove it. It is left, and `then` not called, as soon as
        `unless` is true: somebody has a use for it."""
        if unless():
            return
        if self.groups:
            with contextlib.suppress(OSError):  # a dying process may hold it a moment longer
                if self.groups.kill(name):
                    self.groups.remove(name)
                    self._tidy()
                    then()
                    return
            longer = min(again_s * 2, KILL_AGAIN_MOST_S)
            self.loop.later(again_s, lambda: self.remove_group(name, then, longer, unless))
        else:
            then()

    def _tidy(self, again_s: float = TIDY_S) -> None:
        """After a group went: what was mounted for it goes a little later, when the kernel has written the rest."""
        assert self.groups
        if self.groups.tidy() and again_s < TIDY_MOST_S:
            self.loop.later(again_s, lambda: self._tidy(4 * again_s))


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNS) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace cannot be entered: {os.strerror(number)}")

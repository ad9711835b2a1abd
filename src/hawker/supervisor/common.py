"""What all that a supervisor runs has in common: its loop, files, children and groups."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Final

from hawker.supervisor import mounts, proc
from hawker.supervisor.cgroups import Groups, find
from hawker.supervisor.children import Children
from hawker.supervisor.files import Files, in_memory
from hawker.supervisor.instance import Instance, Record
from hawker.supervisor.loop import Loop
from hawker.supervisor.trash import Trash

KILL_AGAIN_S: Final = 0.002
KILL_AGAIN_MOST_S: Final = 0.25
TIDY_S: Final = 0.1
TIDY_MOST_S: Final = 20.0
_CLONE_NEWNS: Final = 0x20000
_IN_MODIFY = 2
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Writes:
    """Calls for each file that is watched, after it was written to, by inotify(7): Python's library has no call for
    it."""

    def __init__(self, loop: Loop) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._calls: dict[int, Callable[[], None]] = {}
        loop.watch(self._fd, self._ready)

    def watch(self, path: str, call: Callable[[], None]) -> int:
        """Gives a number for `forget`. Raises OSError."""
        watch = _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY))
        self._calls[watch] = call
        return watch

    def forget(self, watch: int) -> None:
        """A file that was removed is forgotten by the kernel itself."""
        self._calls.pop(watch, None)
        _libc.inotify_rm_watch(self._fd, watch)

    def _ready(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 65536)
            at = 0
            while at < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if call := self._calls.get(watch):
                    call()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"inotify: {os.strerror(number)}")
    return result


class Common:
    """What the supervisor of one directory shares among its parts."""

    def __init__(self, directory: str, *, cgroups: bool) -> None:
        self.directory = directory
        self.host_namespace = -1  # of mounts, where programs of the host do not have ours
        self.work_shown = ""  # where they see the directory of their working directories; "" where it is
        self.id = hashlib.blake2b(os.path.realpath(directory).encode(), digest_size=6).hexdigest()
        self.files = Files(directory, in_memory())
        self.group_prefix = f"hawker-{self.id}"
        self.groups: Groups | None = find(self.group_prefix) if cgroups else None
        self.loop = Loop()
        self.children = Children(self.loop)
        self.trash = Trash(directory, self.children, self.loop)
        self.writes = Writes(self.loop)

    def show_work(self) -> None:
        """Have programs of the host see their working directories where the way to them is open, whoever they are, and
        nobody else sees them. Where that cannot be they begin in theirs, but know no way to it."""
        if not (shown := self.files.shown):
            return
        os.chmod(f"{self.directory}/work", 0o711)
        os.makedirs(shown, mode=0o700, exist_ok=True)
        try:
            with self.host_mounts():
                mounts.own_namespace()
                mounts.bind(f"{self.directory}/work", shown)
                theirs = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            print(f"programs cannot be shown their working directories elsewhere: {error}", file=sys.stderr)
            return
        self.host_namespace, self.work_shown = theirs, shown

    def place(self, machine: str, user: int | None) -> str:
        """A machine's working directory, as its programs see it."""
        return f"{self.work_shown}/{machine}" if self.work_shown and user is not None else self.files.work(machine)

    def instance(self, record: Record) -> Instance:
        """An instance of a program of the host."""
        instance = Instance(record, self.files, self.mark(record.machine, record.key), self.groups)
        instance.outside = self.host_mounts
        instance.place = self.place(record.machine, record.user)
        return instance

    @contextlib.contextmanager
    def host_mounts(self) -> Iterator[None]:
        """Enter the host's mount namespace to start a program of the host: it sees the host's mounts, and what it
        mounts belongs to the host. Meanwhile the working directory is the root."""
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
        """Tidy after a group was removed: what was mounted for it goes a little later, when the kernel has written the
        rest."""
        assert self.groups
        if self.groups.tidy() and again_s < TIDY_MOST_S:
            self.loop.later(again_s, lambda: self._tidy(4 * again_s))


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNS) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace cannot be entered: {os.strerror(number)}")

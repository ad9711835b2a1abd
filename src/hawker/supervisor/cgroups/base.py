"""What is asked of control groups, whatever their version: limits of an instance, and the groups of a supervisor, and
what their files say, the same in both versions."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from typing import Protocol

from hawker.supervisor.calls import Limits


class CannotResize(Exception):
    """The limits cannot be changed to these now; the text says why."""


class Groups(Protocol):
    """The groups of one supervisor, one for each instance, named by it."""

    kind: str

    def create(self, name: str, limits: Limits, disks: Collection[str] = ()) -> None:
        """`disks` as `hawker.supervisor.disks` names them."""

    def limit_disks(self, name: str, limits: Limits, disks: Collection[str]) -> None:
        """Limit what an existing group reads from and writes to each of these disks. `resize` sets these limits
        again."""

    def entered(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The supervisor itself inside the group: what it spawns meanwhile is born there."""

    def entrances(self, name: str) -> list[str]:
        """Files by which a process of one thread goes into the group, all of them: it writes "0" to each."""

    def attach(self, name: str, pid: int) -> None:
        """Put a process that runs already into the group."""

    def names(self) -> list[str]:
        """All groups that are there."""

    def pids(self, name: str) -> list[int]: ...

    def kill(self, name: str) -> bool:
        """Kill everything inside, also what forks meanwhile. True once nothing is left; call again until then."""

    def freeze(self, name: str, frozen: bool) -> None: ...

    def resize(self, name: str, limits: Limits) -> None:
        """Raises `CannotResize`, and then nothing was changed."""

    def oom_kills(self, name: str) -> int: ...

    def usage(self, name: str) -> tuple[float, int]:
        """Cpu seconds and bytes of memory."""

    def remove(self, name: str) -> None: ...

    def tidy(self) -> bool:
        """Take away what outlives a group: call it once what was mounted for one is gone, too. May be repeated; whether
        it has to be."""

    def close(self) -> None:
        """Remove the parent group, if nothing is left in it."""


ANY_SPEED = Limits(cpu_millis=0, memory_mib=0, dedicated=False, pids=0)
"""The limits of a group that is killed: a process dies only after the disk has done what it asked for, which a limit
may put off for hours."""


def check_use(limits: Limits, usage: int, stat: str) -> None:
    """Raises `CannotResize` when more is in use than the kernel can take back by forgetting what files hold, too."""
    used = usage - field(stat, "inactive_file") - field(stat, "active_file")
    if used > limits.memory_mib << 20:
        raise CannotResize(f"memory cannot be limited to {limits.memory_mib} MiB: {-(-used >> 20)} MiB are in use")


def own_groups() -> dict[str, str]:
    """The supervisor's own group by controller; "" is version 2's."""
    found = {}
    for line in read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[name] = path
    return found


@contextlib.contextmanager
def no_such_disk() -> Iterator[None]:
    """Ignore disks that the kernel cannot limit, or that are gone."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ENXIO):
            raise


def read(path: str) -> str:
    """ "" when the group is gone."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def directories(path: str) -> list[str]:
    with os.scandir(path) as found:
        return [entry.name for entry in found if entry.is_dir()]


def pids_in(path: str) -> list[int]:
    return [int(line) for line in read(path).split()]


def field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

"""What the files of control groups say, the same in both versions."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups.base import CannotResize


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

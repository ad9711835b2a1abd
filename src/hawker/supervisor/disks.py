"""The disks that a machine's files are on, as control groups name them: `major:minor`, of whole disks.

A machine whose root file system is bounded has a disk of its own, a loop device. What its programs write without
waiting for it is written later by threads of the kernel, which control groups of version 1 take for nobody's. As that
device is the machine's alone, they are held back on it: by a rule of the root group for this one device, and by a bound
of what may wait to be written to it (`hold_later_writes`). Both stay with the device when it is taken off its file, so
they are taken away then (`forget_unused`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable

LOOP_MAJOR = 7
WAITING_S = 1.0
"""How long writing takes what may wait to be written."""
_WRITES = ("blkio.throttle.write_bps_device", "blkio.throttle.write_iops_device")


def disks_of(paths: Iterable[str]) -> list[str]:
    """The disks below these files and directories, each once. A path on no disk, as in memory, or on several, as with
    btrfs, has none."""
    found: dict[str, None] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            if disk := whole(os.stat(path).st_dev):
                found[disk] = None
    return list(found)


def whole(device: int) -> str:
    """The disk that a block device is, or is a part of; "" for what is none."""
    number = f"{os.major(device)}:{os.minor(device)}"
    if os.major(device) == 0:
        return ""
    place = f"/sys/dev/block/{number}"
    if os.path.exists(f"{place}/partition"):
        with open(f"{os.path.realpath(place)}/../dev") as file:
            return file.read().strip()
    return number if os.path.exists(place) else ""


def is_loop(disk: str) -> bool:
    return disk.startswith(f"{LOOP_MAJOR}:")


def hold_later_writes(root: str, disk: str, bytes_: int, operations: int) -> None:
    """Hold back what the kernel's own threads write to a loop device. `root` is the directory of blkio's root group; 0
    is without bound. Raises OSError."""
    for name, most in zip(_WRITES, (bytes_, operations), strict=True):
        with contextlib.suppress(FileNotFoundError):  # the root of a container's groups has no rules
            write(f"{root}/{name}", f"{disk} {most}")
    waiting = f"/sys/class/bdi/{disk}"
    with contextlib.suppress(FileNotFoundError):  # since Linux 6.2
        write(f"{waiting}/strict_limit", int(bytes_ > 0))
        if not (bytes_ and _may_wait(waiting, int(bytes_ * WAITING_S))):
            write(f"{waiting}/max_ratio", 100)


def _may_wait(waiting: str, bytes_: int) -> bool:
    """False where the kernel lets less than that wait to be written to all disks of this host together, by its
    `vm.dirty_ratio` or `vm.dirty_bytes` and the memory that is free: that is bound enough."""
    try:
        write(f"{waiting}/max_bytes", bytes_)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def forget_unused(root: str) -> bool:
    """Take away the root group's rules for loop devices that have no file any more, whoever left them. Whether any are
    left, of devices that are in use or were a moment ago."""
    found = set()
    for name in _WRITES:
        with contextlib.suppress(OSError), open(f"{root}/{name}") as file:
            found |= {line.split(" ")[0] for line in file}
    loops = list(filter(is_loop, found))
    for disk in loops:
        if not in_use(disk):
            with contextlib.suppress(OSError):
                hold_later_writes(root, disk, 0, 0)
    return bool(loops)


def in_use(loop: str) -> bool:
    return os.path.exists(f"/sys/dev/block/{loop}/loop/backing_file")


def write(path: str, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)

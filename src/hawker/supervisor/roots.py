"""What machines write over their image: a directory for each, or, where its size is bounded, a file system in a sparse
file, mounted as long as the machine runs.

Under the supervisor's directory, `roots/<machine>/kept` is kept from one start to the next and `roots/<machine>/<name>`
belongs to one instance; with a size it is a file, `.ext4`, instead of a directory. A machine cannot fill the host's
disk beyond its size, and what was written is removed at once with the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from hawker.supervisor import disks, mounts
from hawker.supervisor.children import Children
from hawker.supervisor.trash import Trash

KEPT: Final = "kept"
_MKFS: Final = "mke2fs"

# <linux/loop.h>
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_CONFIG = struct.Struct("=II QQQQQ IIII 64s64s32s QQ 64s")
_MS_NOATIME = 0x400
_libc = ctypes.CDLL(None, use_errno=True)


def can_bound() -> bool:
    """Whether file systems of bounded size can be made here: it takes root, mke2fs and loop devices."""
    return os.geteuid() == 0 and _mkfs() is not None and os.path.exists("/dev/loop-control")


def _mkfs() -> str | None:
    return shutil.which(_MKFS, path="/usr/sbin:/sbin:/usr/bin:/bin")


@dataclass(frozen=True)
class Root:
    """A machine's own layer. `size_mib` 0 is without bound."""

    machine: str
    name: str
    size_mib: int = 0

    @property
    def kept(self) -> bool:
        return self.name == KEPT


class Roots:
    """All of one supervisor's. Only for root (CAP_SYS_ADMIN)."""

    def __init__(self, directory: str, children: Children, trash: Trash) -> None:
        self._directory = f"{directory}/roots"
        self._trash = trash
        self._blanks = f"{directory}/blank"
        self._children = children
        self._formatting: dict[str, list[Callable[[str, str], None]]] = {}
        for path in (self._directory, self._blanks):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def make(self, root: Root, done: Callable[[str], None]) -> None:
        """Have it there, new or kept; `done` is told what went wrong, "" when nothing."""
        path = self._path(root)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if not root.size_mib:
            os.makedirs(path, mode=0o700, exist_ok=True)
            done("")
            return
        if os.path.exists(path):
            done(self._grown(path, root.size_mib))
            return
        self._with_blank(root, lambda blank, problem: done(problem or _copied(blank, path)))

    def _with_blank(self, root: Root, then: Callable[[str, str], None]) -> None:
        """Have an empty file system of this size to copy, formatted once: mke2fs takes some 20 ms, a copy of the little
        that is in it less than one. `then` is told its path, and what went wrong, "" when nothing."""
        blank = f"{self._blanks}/{root.size_mib}{'-kept' if root.kept else ''}.ext4"
        if os.path.exists(blank):
            then(blank, "")
            return
        waiting = self._formatting.setdefault(blank, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def formatted(problem: str) -> None:
            if problem:
                _unlink(new)
            else:
                os.rename(new, blank)
            for told in self._formatting.pop(blank):
                told(blank, problem)

        new = f"{blank}.new"
        program = _mkfs()
        if program is None:
            formatted(f"a root file system of bounded size needs {_MKFS} (on Debian: apt install e2fsprogs)")
            return
        features = "" if root.kept else "^has_journal,"
        argv = [program, "-q", "-F", "-t", "ext4", "-m", "0", "-O", f"{features}^resize_inode"]
        argv += ["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", new]
        try:
            with open(new, "wb") as file:
                os.truncate(file.fileno(), root.size_mib << 20)
            self._children.spawn(
                argv, {}, {}, lambda status: formatted(f"{_MKFS} ended with {status}" if status else "")
            )
        except OSError as error:
            formatted(str(error))

    def mount(self, root: Root, layers: Iterable[str], place: str, target: str, ids: mounts.IdMap | None) -> str:
        """Mount the machine's tree at `target`. `place` is a directory for the way there. Gives the disk that it has to
        itself, "" for none (see `hawker.supervisor.disks`). Raises OSError."""
        path, disk = self._path(root), ""
        if root.size_mib:
            os.makedirs(place, exist_ok=True)
            disk = _mount_file(path, place)
            path = place
        try:
            mounts.mount_overlay(list(layers), f"{path}/upper", f"{path}/work", target, ids=ids, volatile=not root.kept)
        finally:
            if root.size_mib:  # the overlay holds it
                mounts.unmount(place)
        return disk

    def drop(self, root: Root) -> None:
        """Remove what one instance wrote, unless it is to be kept. Nothing there: success."""
        if not root.kept:
            self._trash.discard(self._path(root))
            with contextlib.suppress(OSError):  # what is kept may be there
                os.rmdir(f"{self._directory}/{root.machine}")

    def purge(self, machine: str) -> None:
        """Remove all that a machine wrote."""
        self._trash.discard(f"{self._directory}/{machine}")

    def keep_only(self, roots: Iterable[Root]) -> None:
        """Remove what earlier supervisors left of instances that are no more."""
        known = {self._path(root) for root in roots}
        for machine in os.listdir(self._directory):
            for name in os.listdir(f"{self._directory}/{machine}"):
                path = f"{self._directory}/{machine}/{name}"
                if path not in known and name not in (KEPT, f"{KEPT}.ext4"):
                    self._trash.discard(path)
            with contextlib.suppress(OSError):
                os.rmdir(f"{self._directory}/{machine}")

    def _path(self, root: Root) -> str:
        return f"{self._directory}/{root.machine}/{root.name}" + (".ext4" if root.size_mib else "")

    def _grown(self, path: str, size_mib: int) -> str:
        """Why a kept file system cannot have this size, or "": it was made for a size, cannot grow, and is not made
        smaller."""
        there = os.path.getsize(path) >> 20
        if there >= size_mib:
            return ""
        return f"the machine's root file system was made for {there} MiB and cannot grow to {size_mib} MiB"


def _copied(blank: str, path: str) -> str:
    """Copy a sparse file, its holes as holes. What went wrong, or ""."""
    new = f"{path}.new"
    try:
        with open(blank, "rb") as source, open(new, "wb") as target:
            size = os.fstat(source.fileno()).st_size
            os.truncate(target.fileno(), size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(source.fileno(), at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # holes up to the end
                        break
                    raise
                end = os.lseek(source.fileno(), at, os.SEEK_HOLE)
                while at < end:
                    at += os.copy_file_range(source.fileno(), target.fileno(), end - at, at, at)
        os.rename(new, path)
    except OSError as error:
        _unlink(new)
        return str(error)
    return ""


def _mount_file(path: str, target: str) -> str:
    """Mount the ext4 file system in a file. The loop device, which is given, goes with the mount."""
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        loop, device = _attached(control, backing, path)
        try:
            flags = ctypes.c_ulong(mounts.MS_NODEV | _MS_NOATIME)
            done = _libc.mount(device.encode(), os.fsencode(target), b"ext4", flags, b"errors=remount-ro")
            if done < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"{path} cannot be mounted: {os.strerror(number)}")
            return disks.whole(os.fstat(loop).st_rdev)
        finally:
            os.close(loop)
    finally:
        os.close(control)
        os.close(backing)


def _attached(control: int, backing: int, path: str) -> tuple[int, str]:
    """A free loop device, made ours: another process may take the one we were told of first."""
    for _ in range(100):
        device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
        loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        flags = (0, 0, 0, _LO_FLAGS_AUTOCLEAR)
        config = _LOOP_CONFIG.pack(backing, 0, *[0] * 5, *flags, os.fsencode(path)[-63:], b"", b"", 0, 0, b"")
        try:
            fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
            return loop, device
        except OSError as error:
            os.close(loop)
            if error.errno != errno.EBUSY:
                raise
    raise OSError(errno.EBUSY, "no loop device is free")


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

"""Making files and directories in a machine's tree, whose symbolic links mean paths of that tree, never of the host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct

_SYS_OPENAT2 = 437  # on every architecture
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 0x10, 0x02
_HOW = struct.Struct("=QQQ")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def directory(root: int, path: str, owner: int) -> int:
    """A descriptor of this directory, made with those above it where they are missing, which are the owner's then.
    Raises OSError."""
    done = ""
    fd = _open(root, ".", os.O_PATH | os.O_DIRECTORY)
    for name in filter(None, path.split("/")):
        done = f"{done}/{name}"
        try:
            below = _open(root, done, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
                below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)
            finally:
                os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            os.close(fd)
        fd = below
    return fd


def write(root: int, path: str, content: bytes, mode: int, owner: int) -> None:
    """Put a file there in the place of whatever has that name. Raises OSError."""
    where, _, name = path.rpartition("/")
    parent = directory(root, where, owner)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            os.fchown(fd, owner, owner)
            os.fchmod(fd, mode)
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)
    finally:
        os.close(parent)


def _open(root: int, path: str, flags: int) -> int:
    how = _HOW.pack(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    fd: int = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{path}: {os.strerror(number or errno.EIO)}")
    return fd

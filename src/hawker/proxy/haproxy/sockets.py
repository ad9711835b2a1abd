"""Makes the sockets where the activator takes connections. HAProxy holds them, too, so that they outlive this process.

HAProxy's master inherits them and keeps them open over reloads. While there is nobody to accept, connections wait in
them. The process that steers HAProxy next takes a copy out of the master (pidfd_getfd, Linux 5.6).
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

BACKLOG = 4096
_PIDFD_GETFD = 438  # the same on all architectures


def bound(path: Path) -> socket.socket:
    """A socket that listens at this path, whatever was there before. The path is never without one."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.bind(str(new))
        sock.listen(BACKLOG)
        os.rename(new, path)
    except OSError:
        sock.close()
        raise
    return sock


def copied(pidfd: int, number: int, path: Path) -> socket.socket | None:
    """The socket that a process has under this number; None: it may not be had, or is another."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if found < 0:
        return None
    try:
        sock = socket.socket(fileno=found)
    except OSError:
        os.close(found)
        return None
    # It was bound under another name, and renamed.
    if sock.family != socket.AF_UNIX or sock.getsockname() != str(path.with_suffix(".new")):
        sock.close()
        return None
    sock.setblocking(False)
    return sock

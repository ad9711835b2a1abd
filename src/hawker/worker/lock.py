"""One process at a time over a worker's directory: a lock that the kernel takes back when its holder ends, however."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hawker.errors import Conflict

LOCK = "worker.lock"


@contextmanager
def sole_holder(directory: Path) -> Iterator[None]:
    """Hold the directory, which is made if need be, until the block ends.

    Raises `Conflict`, naming the process that holds it. The file stays: a name that is removed and made again could be
    locked twice.
    """
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode().strip() or "unknown"
            raise Conflict(
                f"{directory} is in use by another agent, process {holder}",
                hint="stop that one first, or give each worker a directory of its own",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(fd)

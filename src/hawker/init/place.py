"""Where a host keeps what is compiled or found out once for all of its workers.

Root's is /var/cache/hawker, a user's `$XDG_CACHE_HOME/hawker` or ~/.cache/hawker. What is there gets run, so it is
taken only where nobody else could have put it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOTS = Path("/var/cache/hawker")


def shared() -> Path | None:
    """The directory, made where it was not there; None where there is none to be trusted and written to."""
    place = ROOTS if os.geteuid() == 0 else _of_user()
    if place is None:
        return None
    with suppress(OSError):
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        if is_ours_alone(place) and os.access(place, os.W_OK):
            return place
    return None


def is_ours_alone(place: Path) -> bool:
    """Whether nobody but us, and root, can put a file into a directory, or another directory in its place. Raises
    `OSError`."""
    if place.is_symlink() or place.stat().st_uid != os.geteuid():
        return False
    real = place.resolve()
    for each in (real, *real.parents):
        about = each.stat()
        open_to_others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if open_to_others and (each == real or not about.st_mode & stat.S_ISVTX):
            return False
        if about.st_uid not in (0, os.geteuid()):
            return False
    return True


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """Let one process and thread at a time work on a directory. It blocks; a process that dies gives the lock up."""
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _of_user() -> Path | None:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # others are to be ignored (XDG Base Directory Specification)
        return given / "hawker"
    with suppress(RuntimeError):  # no home
        return Path.home() / ".cache" / "hawker"
    return None

"""What other users of the host can do with a directory."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Of this process, and of those that it starts meanwhile."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def open_directory() -> Iterator[Path]:
    """One that every user of the host finds the way to, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="hawker-test-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        yield Path(place)


def open_to_others(path: Path) -> list[str]:
    """What is below a directory that users without any part in it may read, list or write to, however they come by its
    name. To pass through a directory is no harm by itself."""
    found: list[str] = []
    todo = [str(path)]
    while todo:
        each = todo.pop()
        try:
            mode = os.lstat(each).st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            continue
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            found.append(f"{stat.filemode(mode)} {each}")
        if stat.S_ISDIR(mode) and mode & stat.S_IXOTH:
            todo += [f"{each}/{name}" for name in os.listdir(each)]
    return sorted(found)

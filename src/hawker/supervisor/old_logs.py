"""The last words of machines that are destroyed: who looks why one failed comes after its end.

At a machine's purge the end of its log goes to `old-logs/<machine>` under the supervisor's directory. What is there is
forgotten an hour later, by its time, or sooner where there is more of it than anybody reads. Nothing else knows of
these files, so that a crash at any moment leaves none of them for longer.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence

KEEP_S = 3600.0
TAIL_BYTES = 64 << 10
MOST = 4096
"""Logs, the newest of one supervisor: with their ends they take 256 MiB of the disk at most."""
_DIRECTORY = "old-logs"


def place(directory: str) -> str:
    return f"{directory}/{_DIRECTORY}"


def retire(directory: str, machine: str, logs: Sequence[str]) -> None:
    """Keep the end of a machine's log, whose files are `logs`, the newest first. They are left or moved away: whoever
    calls this removes them. A disk that has no room for it keeps nobody from being destroyed."""
    target = f"{place(directory)}/{machine}"
    with contextlib.suppress(OSError):
        newest = os.lstat(logs[0]) if os.path.exists(logs[0]) else None
        if newest and not stat.S_ISREG(newest.st_mode):
            return
        if newest and newest.st_size <= TAIL_BYTES and not os.path.exists(logs[1]):
            os.utime(logs[0])
            os.rename(logs[0], target)
        elif tail := _tail(logs):
            with open(target, "wb") as file:
                file.write(tail)


def _tail(logs: Sequence[str]) -> bytes:
    """Whole lines."""
    tail = b""
    for path in logs:
        wanted = TAIL_BYTES - len(tail)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - wanted)
            file.seek(max(0, start - 1))
            found = file.read()
            if start:  # up to the first line that begins in here
                found = found.partition(b"\n")[2]
            tail = found + tail
            if start:
                break
    return tail


def forget(directory: str, most: int = MOST) -> int:
    """Remove what has been kept for its time, or was brought at a time that is none, and of the rest all but the
    newest. Returns how many are left."""
    now_s = time.time()
    kept: list[tuple[float, str]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(place(directory)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it is another one by now
                at_s = entry.stat(follow_symlinks=False).st_mtime
                if abs(now_s - at_s) < KEEP_S:  # a clock that was set back must not keep it for so much longer
                    kept.append((at_s, entry.path))
                else:
                    os.unlink(entry.path)
    for _, path in sorted(kept)[:-most]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return min(len(kept), most)

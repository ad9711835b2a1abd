"""Reading a machine's log files: the last lines of what was rotated, then what is added while someone follows."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from hawker.worker.drivers.base import LogLine

FILES = 3
_READ_BYTES = 256 * 1024
_LINE = re.compile(rb"([0-9]{1,13}) ([oe]) ([!-~]+) (.*)", re.DOTALL)
"""Milliseconds have this many digits until the year 2286. A longer number is two numbers, the first of them cut off."""

Position = tuple[int, int]
"""Inode of the newest file and the offset read up to."""


def parse_line(raw: bytes) -> LogLine | None:
    """A line as the supervisor writes it: `milliseconds stream key text`. None: the line was torn. A power cut leaves
    zeros, or anything, in place of what was not on the disk yet, and one such line must not hide the others.
    """
    found = _LINE.fullmatch(raw.lstrip(b"\0"))
    if found is None:
        return None
    at_ms, stream, key, text = found.groups()
    return LogLine(
        at_ms=int(at_ms),
        stream="stdout" if stream == b"o" else "stderr",
        instance=key.decode(),
        text=text.decode(errors="replace"),
    )


def tail_lines(path: Path, limit: int) -> tuple[list[LogLine], Position]:
    """The last `limit` lines over all files, oldest first, and where to go on from. No log yet: none."""
    lines: list[bytes] = []
    position = (0, 0)
    for number in range(FILES):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            with open(name, "rb") as file:
                if number == 0:
                    position = (os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END))
                lines = _last_lines(file.fileno(), limit - len(lines)) + lines
        except FileNotFoundError:
            continue  # rotated away a moment ago, and nothing was written since
        if len(lines) >= limit:
            break
    return [found for line in lines if (found := parse_line(line))], position


async def follow_lines(path: Path, position: Position, wakeup: asyncio.Event) -> AsyncIterator[LogLine]:
    """Lines added after `position`, as they come. Reads on over a rotation. Ends when the caller stops iterating.

    The file is held open, so that its last lines are read even if it was removed before we looked at it.
    """
    fd = _reopen(path, position)
    rest = b""
    try:
        while True:
            await wakeup.wait()
            wakeup.clear()
            while True:
                rotated = _is_another(path, fd)  # before reading: nothing is added to a file that was rotated away
                while fd >= 0 and (chunk := os.read(fd, _READ_BYTES)):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if found := parse_line(line):
                            yield found
                if not rotated:
                    break
                _close(fd)
                fd, rest = _open(path), b""
    finally:
        _close(fd)


def _reopen(path: Path, position: Position) -> int:
    """The file of a position, which may have been rotated since, at its offset. -1: it is gone, or there was none."""
    inode, offset = position
    for name in (path, path.with_name(f"{path.name}.1")):
        fd = _open(name)
        if fd >= 0 and os.fstat(fd).st_ino == inode:
            os.lseek(fd, offset, os.SEEK_SET)
            return fd
        _close(fd)
    return -1


def _is_another(path: Path, fd: int) -> bool:
    """Whether the newest file is there and is not the open one."""
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError:
        return False
    return fd < 0 or os.fstat(fd).st_ino != inode


def _open(path: Path) -> int:
    """-1 when it is not there."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _last_lines(fd: int, limit: int) -> list[bytes]:
    """The last complete lines of a file, read from its end."""
    end = os.fstat(fd).st_size
    data = b""
    while end > 0 and data.count(b"\n") <= limit:
        start = max(0, end - _READ_BYTES)
        data = os.pread(fd, end - start, start) + data
        end = start
    return data.split(b"\n")[:-1][-limit:] if limit else []

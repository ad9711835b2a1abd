"""What programs write: two named pipes per instance, one rotated log file per machine.

The program holds its pipes open for reading and writing, so when the supervisor dies it gets no SIGPIPE: its writes
fill the pipe and wait for the next supervisor, which opens the same names and goes on. A line of the log is
`milliseconds stream key text`, stream `o` or `e`.
"""

from __future__ import annotations

import contextlib
import os
import time
from itertools import pairwise

LINE_BYTES_MAX = 16 * 1024
FILE_BYTES_MAX = 10 << 20
FILES = 3
_READ_BYTES = 64 * 1024


class MachineWriter:
    """The log files of one machine: `path`, and from before `path.1`, `path.2`."""

    def __init__(self, path: str, *, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = path
        self._max = file_bytes_max

    def write(self, lines: bytes) -> None:
        """Append, then rotate when the file has grown past its size. A full disk loses lines, not the program: those
        that it has room for stay whole."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                done = os.write(fd, lines)
                if done < len(lines):  # what comes next would be read as the rest of a line that was cut off
                    done = lines.rfind(b"\n", 0, done) + 1
                    os.ftruncate(fd, size + done)
            finally:
                os.close(fd)
            if size + done > self._max:
                self._rotate()

    def _rotate(self) -> None:
        names = [self._path, *(f"{self._path}.{n}" for n in range(1, FILES))]
        for old, new in reversed(list(pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                os.rename(old, new)


class Pipe:
    """One of an instance's two streams: it reads what is there, cuts it into lines and stamps them with the time."""

    def __init__(self, path: str, stream: str, key: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        self._label = f" {stream} {key} ".encode()
        self._rest = b""
        # For writing, too: with a writer of its own it never reads as closed, whatever the program does with its end.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.path = path

    def open_for_child(self) -> int:
        """The program's end; close it once the program has started."""
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def read_lines(self, *, last: bool = False) -> bytes:
        """Complete lines that are there now, ready for the log.

        With `last`, reads until nothing is left and gives an unfinished line, too.
        """
        stamp = str(int(time.time() * 1000)).encode() + self._label
        out: list[bytes] = []
        while True:
            try:
                chunk = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                break
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                out += [line[i : i + LINE_BYTES_MAX] for i in range(0, len(line), LINE_BYTES_MAX)] or [b""]
            while len(self._rest) > LINE_BYTES_MAX:
                out.append(self._rest[:LINE_BYTES_MAX])
                self._rest = self._rest[LINE_BYTES_MAX:]
            if not last:
                break
        if last and self._rest:
            out.append(self._rest)
            self._rest = b""
        return b"".join(stamp + line.rstrip(b"\r") + b"\n" for line in out)

    def remove(self) -> None:
        """Close it and take its name away. What still holds it open writes to nobody."""
        os.close(self.fd)
        os.unlink(self.path)

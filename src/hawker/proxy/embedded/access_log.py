"""The access log: one line for each request in the Combined Log Format, followed by what only a proxy knows.

    203.0.113.7 - - [21/Nov/2026:17:30:01 +0000] "GET /a HTTP/1.1" 200 5 "-" "curl/8.5" 01M7..-0-ams web 3d8e.. 0.8 1.2

After the user agent come request id, app, machine ("-": none), milliseconds to the answer's first byte and to its end.
A request whose client left has status 499. Lines are written some at a time; when the file was moved away, a new one is
begun.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from hawker.core.tracing import Mark
from hawker.host import Host
from hawker.proxy.embedded.heads import RequestHead

FLUSH_S = 1.0
FLUSH_LINES = 256
_ESCAPED = {byte: f"\\x{byte:02x}" for byte in (*range(32), 0x22, 0x5C, *range(0x7F, 0x100))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that is over. `sent` counts the bytes of its answer's body. `marks` are what it waited for, `edge` says
    whether it came from a user. Times are of the loop's clock; `first` is 0 where no answer began."""

    client: bytes
    request: RequestHead
    request_id: bytes
    edge: bool
    status: int
    sent: int
    app: str
    machine: str
    begun: float
    first: float
    ended: float
    marks: Sequence[Mark]


class AccessLog:
    """`open` raises `OSError`. What cannot be written later is dropped and counted in `lost`: a full disk stops no
    request."""

    def __init__(self, path: str, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self.lost = 0
        self._host = host
        self._loop = loop
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def add(self, record: RequestRecord) -> None:
        """A request is over."""
        request, begun = record.request, record.begun
        referer = agent = "-"
        for name, value in request.headers:
            if name == b"user-agent":
                agent = quoted(value)
            elif name == b"referer":
                referer = quoted(value)
        line = f"{request.method.decode()} {quoted(request.target)} HTTP/{_VERSIONS[request.minor]}"
        first = f"{(record.first - begun) * 1000:.1f}" if record.first else "-"
        self.put(
            f'{record.client.decode()} - - [{self._now()}] "{line}" {record.status} {record.sent or "-"} "{referer}" '
            f'"{agent}" {record.request_id.decode("latin-1")} {record.app or "-"} {record.machine or "-"} {first} '
            f"{(record.ended - begun) * 1000:.1f}\n"
        )

    def put(self, line: str) -> None:
        """Add a line that is ready, with its end."""
        self._lines.append(line)
        if len(self._lines) >= FLUSH_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        try:
            self._follow()
            data = "".join(lines).encode()
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self.lost += len(lines)

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    def _follow(self) -> None:
        """Write to the file that bears the name now: whoever rotates logs moves the file away."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            pass
        else:
            if os.path.samestat(named, os.fstat(self._file)):
                return
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        os.close(self._file)
        self._file = file

    def _now(self) -> str:
        second = self._host.now_ms() // 1000
        if second != self._second:
            self._second = second
            self._stamp = datetime.fromtimestamp(second, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000")
        return self._stamp


_VERSIONS = {0: "1.0", 1: "1.1", 2: "2.0"}


def quoted(value: bytes) -> str:
    """The value as it stands between quotes in a line."""
    return value.decode("latin-1").translate(_ESCAPED)

"""The supervisor's side of the socket: a JSON object a line.

Requests are `{"id", "op", ...}`, answers `{"id", "ok"}` or `{"id", "error", "message"}`, and events `{"event": "exit" |
"log", ...}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from hawker.supervisor.loop import READ, WRITE, Loop

OUTBOX_BYTES_MAX = 64 << 20


class Refused(Exception):
    """An answer that is an error. `kind` is the driver's exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Ask:
    """A request. `answer` may be called later, once."""

    def __init__(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self.connection = connection
        self._message = message

    def __getitem__(self, field: str) -> Any:
        return self._message[field]

    def get(self, field: str, default: Any) -> Any:
        return self._message.get(field, default)

    def answer(self, value: Any) -> None:
        self.connection.send({"id": self["id"], "ok": value})

    def answer_with(self, fds: list[int]) -> None:
        """With descriptors. Only as the first on its connection: nothing may be waiting to be sent."""
        self.connection.send_with({"id": self["id"], "ok": len(fds)}, fds)

    def refuse(self, kind: str, message: str) -> None:
        self.connection.send({"id": self["id"], "error": kind, "message": message})


class Connection:
    """A daemon. Answers are queued when it reads slowly; one that does not read at all is dropped."""

    def __init__(self, loop: Loop, sock: socket.socket, on_ask: Callable[[Ask], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._on_ask = on_ask
        self._in = b""
        self._out = bytearray()
        self._watched = READ
        self.open = True
        self.following: set[str] = set()
        self.on_close: Callable[[], None] = lambda: None
        loop.watch(sock.fileno(), self._ready)

    def send(self, message: dict[str, Any]) -> None:
        """Does nothing once it is closed."""
        if not self.open:
            return
        self._out += _line(message)
        if len(self._out) > OUTBOX_BYTES_MAX:
            self.close()
        else:
            self._flush()

    def send_with(self, message: dict[str, Any], fds: list[int]) -> None:
        if not self.open:
            return
        try:
            socket.send_fds(self._sock, [_line(message)], fds)
        except OSError:
            self.close()

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            self.on_close()

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        if mask & READ and self.open:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            *lines, self._in = (self._in + data).split(b"\n")
            for line in lines:
                self._on_ask(Ask(self, json.loads(line)))

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._out) if self._out else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        del self._out[:sent]
        ready = READ | WRITE if self._out else READ
        if ready != self._watched:
            self._watched = ready
            self._loop.watch(self._sock.fileno(), self._ready, ready)


def _line(message: Mapping[str, Any]) -> bytes:
    """Names that a program has given itself or its files may be no text: what cannot be written is a "?" then."""
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


def listen(directory: str) -> socket.socket:
    """A socket at `directory/socket`, this user's alone.

    Bound by a path relative to the directory: absolute ones may be longer than the 108 bytes a socket takes.
    """
    os.chdir(directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink("socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        listener.bind("socket.new")
    finally:
        os.umask(old)
    listener.listen(16)
    os.rename("socket.new", "socket")
    return listener

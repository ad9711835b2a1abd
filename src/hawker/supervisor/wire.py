"""The supervisor's side of the socket: a JSON object a line.

Requests are `{"id", "op", ...}` (`hawker.supervisor.calls`), answers `{"id", "ok"}` or `{"id", "error", "message"}`,
and events `{"event": "exit" | "log", ...}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, get_args, get_type_hints

from hawker.supervisor.calls import Request
from hawker.supervisor.loop import READ, WRITE, Loop

OUTBOX_BYTES_MAX = 64 << 20


class Refused(Exception):
    """An answer that is an error. `kind` is the driver's exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Ask:
    """A request on its way. `answer` may be called later, once."""

    def __init__(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self.connection = connection
        self.message = message
        self._id = message["id"]

    def answer(self, value: Any) -> None:
        self.connection.send({"id": self._id, "ok": value})

    def answer_with(self, fds: list[int]) -> None:
        """Answer with descriptors. This must be the first answer on its connection: nothing may be waiting to be
        sent."""
        self.connection.send_with({"id": self._id, "ok": len(fds)}, fds)

    def refuse(self, kind: str, message: str) -> None:
        self.connection.send({"id": self._id, "error": kind, "message": message})


class Connection:
    """The connection of a daemon. Answers are queued when the daemon reads slowly; a daemon that does not read at all
    is dropped."""

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
    """Listen at `directory/socket`, which only this user can reach. The path is relative to the directory, because an
    absolute one may be longer than the 108 bytes that a socket's name takes.
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


_REQUESTS: Final[Mapping[tuple[str, str], type[Request]]] = {
    (request.op, getattr(request, "kind", "")): request for request in get_args(Request)
}


class UnknownCall(ValueError):
    """A request whose `op` this supervisor does not know."""


def request_of(message: Mapping[str, Any]) -> Request:
    """Raises `UnknownCall`, and TypeError for a request that lacks a field."""
    kind = _REQUESTS.get((message["op"], message.get("kind", "")))
    if kind is None:
        raise UnknownCall(message["op"])
    request: Request = built(kind, message)
    return request


def built(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A struct from JSON, without the fields that it does not know."""
    known, parts = _fields(kind)
    return kind(**{name: _part(parts.get(name), value) for name, value in fields.items() if name in known})


def _part(kind: Any, value: Any) -> Any:
    if kind is None or value is None:
        return value
    return [built(kind, each) for each in value] if isinstance(value, list) else built(kind, value)


@cache
def _fields(kind: Any) -> tuple[frozenset[str], Mapping[str, Any]]:
    """The names of a struct's fields, and the structs that they are made of."""
    hints = get_type_hints(kind)
    parts = {
        name: each for name, hint in hints.items() for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)
    }
    return frozenset(field.name for field in dataclasses.fields(kind)), parts

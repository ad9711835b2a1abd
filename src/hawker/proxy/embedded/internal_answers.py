"""Handles answers that the client does not get: their fields say what the proxy is to do instead."""

from __future__ import annotations

from collections.abc import Callable

from hawker.core.replay import JSON_TYPE
from hawker.core.retrying import SENT_MOST
from hawker.proxy.base import Failure, Header, Lease
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import ABSENT, AnswerHead
from hawker.proxy.embedded.response_handler import ResponseHandler
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.fields import ANYWHERE, ELSEWHERE, LOAD

INTERNAL_BYTES = 64 << 10
"""How many bytes are read of an answer that is not passed on, so that its connection can be used again, and of a
replay's JSON."""


class Signals:
    """What an answer's head says to the proxy. Over the backhaul a worker's proxy says its `load`, that the machine is
    `elsewhere`, and to how many machines something was `sent`: to as many as may be, if that proxy has chosen them
    itself. An app says that the request is `handed` on, by a field or by JSON."""

    __slots__ = ("elsewhere", "handed", "load", "sent")

    def __init__(self, head: AnswerHead, lease: Lease) -> None:
        self.load = b""
        self.elsewhere: Failure | None = None
        self.sent = 0
        self.handed = ""
        inner = bool(lease.headers)
        for name, value in head.headers:
            if name == b"fly-replay":
                self.handed = "field"
            elif name == b"content-type" and not self.handed and value[: len(JSON_TYPE)].lower() == JSON_TYPE:
                self.handed = "json"
            elif inner and name == LOAD:
                self.load = value
            elif inner and name == ELSEWHERE and head.status == 421:
                self.elsewhere = _FAILURES.get(value, "elsewhere")
                if self.elsewhere in ("reset", "timeout", "unhealthy"):
                    self.sent = SENT_MOST if ANYWHERE in lease.headers else 1


_FAILURES: dict[bytes, Failure] = {
    b"refused": "refused",
    b"reset": "reset",
    b"timeout": "timeout",
    b"crowded": "crowded",
    b"unhealthy": "unhealthy",
}


class InternalAnswer(ResponseHandler):
    """The handler of an answer that the client does not get. It reads to the answer's end, then calls `then` with the
    body, of which it keeps `INTERNAL_BYTES`. When more is to come the connection is closed instead."""

    def __init__(self, head: AnswerHead, of: ResponseHandler, then: Callable[[bytes], None]) -> None:
        self._of = of
        self._then = then
        self._body: list[bytes] = []
        self._bytes = 0
        self._large = head.length not in (ABSENT, 0) and not 0 < head.length <= INTERNAL_BYTES
        self._over = False
        self._connection: UpstreamConnection | UpstreamStream

    def begin(self, connection: UpstreamConnection | UpstreamStream, *, read: bool) -> None:
        """Take the place of the connection's handler. `read`: the body is wanted, whatever its length says."""
        self._connection = connection
        if self._large and not read:
            self._end()
        else:
            connection.hand_over(self)

    @property
    def sending(self) -> bool:
        return self._of.sending

    @property
    def may_go_elsewhere(self) -> bool:
        return False  # it is answered

    def data(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= INTERNAL_BYTES:
            self._body.append(data)
        elif not self._over:
            self._end()

    def ended(self, trailers: list[Header]) -> None:
        self._then(b"".join(self._body))

    def broken(self, how: Failure, problem: str) -> None:
        self._then(b"".join(self._body))

    def _end(self) -> None:
        """Wait for no more of it."""
        self._over = True
        self._connection.abandon()
        self._then(b"")

    def stalled(self, stalled: bool) -> None:
        self._of.stalled(stalled)

    def flush(self) -> None:
        pass

    def interim(self, head: AnswerHead) -> None:
        raise NotImplementedError  # the head has come

    def answer(self, head: AnswerHead) -> None:
        raise NotImplementedError

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        raise NotImplementedError

"""One request on its way to a machine: its head there, and its body, which is kept until an answer comes.

What is kept can be sent again. When that is too much, of this request or of its app's together, it passes as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hawker.proxy.base import ANY, Header, Lease
from hawker.proxy.embedded.downstream import Downstream
from hawker.proxy.embedded.errand import Errand
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import CHUNKED
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.fields import ANYWHERE, SENT, WAIT


class Outgoing(Errand):
    """The front calls `body` and `body_end` as the body comes, also before `start`. `_connection` is what has the
    request, `over` whether it has had its answer."""

    __slots__ = ("_connection", "_downstream", "_kept", "_kept_bytes", "_kept_of", "_trailers", "over")

    _connection: UpstreamConnection | UpstreamStream | None
    _downstream: Downstream
    _kept: list[bytes]
    _kept_bytes: int
    _kept_of: str
    """The app that it counts for. Set before anything is kept."""
    _trailers: Sequence[Header]
    over: bool

    # --- its body ----------------------------------------------------------------------------------------------------

    def body(self, data: bytes) -> None:
        """More of the request's body."""
        connection = self._connection
        upload = self._upload
        if upload is not None:
            upload.came += len(data)
        if self._whole:
            self._kept.append(data)
            self._keep(len(data))
            if self._keeps_too_much:
                if connection is None:
                    if upload is not None and upload.awaited:
                        self._all_came()  # of all requests too much is kept: it passes as it comes
                    if self._connection is None and not self.over:
                        self._hold(True)
                else:
                    self._whole = False
                    self._forget_kept()
        if connection is not None:
            connection.body(data)

    def body_end(self, trailers: Sequence[Header]) -> None:
        self.sending = False
        self._trailers = trailers
        if self._connection is not None:
            self._connection.body_end(trailers)
        upload = self._upload
        if upload is not None:
            self._context.uploads.drop(upload)
            if upload.awaited:
                self._all_came()

    def _hold(self, held: bool) -> None:
        if self._upload is not None:
            self._upload.held = held
        self._downstream.hold(held)

    def _sending_kept(self) -> None:
        if self._keeps_too_much:
            self._whole = False
            self._forget_kept()
        self._hold(False)

    @property
    def _keeps_too_much(self) -> bool:
        self._keep(0)
        context = self._context
        return self._kept_bytes > context.settings.replay_bytes or context.keep.too_much(self._kept_of)

    def _keep(self, more: int) -> None:
        """Count so many bytes more, all for the app that the request is for by now: it is not known from the start, and
        another one may get it."""
        keep, app = self._context.keep, self.app
        if self._kept_bytes and self._kept_of != app:
            keep.drop(self._kept_of, self._kept_bytes)
            keep.add(app, self._kept_bytes)
        self._kept_of = app
        keep.add(app, more)
        self._kept_bytes += more

    def _forget_kept(self) -> None:
        if self._kept_bytes:
            self._context.keep.drop(self._kept_of, self._kept_bytes)
        self._kept_bytes = 0
        self._kept = []

    # --- its head ----------------------------------------------------------------------------------------------------

    def _fields(self, lease: Lease) -> list[Header]:
        """As they go to the machine."""
        request, retry = self._request, self._retry
        wishes = ANY if retry is None else retry.wishes
        fields = self._ingress.forward(request, self.request_id, lease, wishes, request.upgrade)
        if not (request.host or request.minor):  # HTTP/1.0 on a port that is one app's; the machine gets HTTP/1.1
            fields.insert(0, (b"host", self.app.encode()))
        if retry is not None:
            fields += retry.added
        if lease.headers:
            until = self._ingress.until if retry is None else retry.deadline
            if until < math.inf:
                fields.append((WAIT, b"%d" % max(0, round((until - self._context.now()) * 1000))))
            if retry is not None and retry.sent_tries and ANYWHERE in lease.headers:
                fields.append((SENT, b"%d" % retry.sent_tries))
        return fields

    def _head(self, lease: Lease) -> bytes:
        """As it goes to the machine."""
        request = self._request
        fields = self._fields(lease)
        framing = b"\r\ntransfer-encoding: chunked\r\n\r\n" if request.length == CHUNKED else b"\r\n\r\n"
        lines = b"\r\n".join(map(b": ".join, fields))
        data = b"%b %b HTTP/1.1\r\n%b%b" % (request.method, request.target, lines, framing)
        if self._retry is None and not lease.headers:
            around = data.split(self.request_id)
            if len(around) == 2:  # else the client wrote it, too
                request.passed = around[0], around[1]
        return data

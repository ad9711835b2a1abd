"""Connections of HTTP/2 to machines that want it (`h2_backend`): many requests on each, as gRPC does.

A stream takes the place of an `UpstreamConnection` for its exchange. There is no TLS and nothing is negotiated: the
configuration says that the machine speaks HTTP/2 (RFC 9113, 3.3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

from hawker.proxy.base import Address, Header
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.h2_heads import read_answer, request_fields, trailers_of
from hawker.proxy.embedded.h2_wire import Stream, Wire
from hawker.proxy.embedded.heads import ABSENT, BadHead
from hawker.proxy.embedded.response_handler import ResponseHandler
from hawker.proxy.embedded.settings import Settings

_LAST_STREAM = 1 << 30
"""A connection is given up after so many streams, long before their numbers run out."""


class UpstreamLink(Wire):
    """A connection of HTTP/2 to a machine. `served` counts the answers that it has brought. `left` is called when it
    takes no more requests."""

    _heeded: ClassVar[dict[type[Event], str]] = {
        RemoteSettingsChanged: "_settings_came",
        ResponseReceived: "_response",
        InformationalResponseReceived: "_interim",
        StreamEnded: "_stream_ended",
        TrailersReceived: "_trailers",
    }

    def __init__(
        self,
        address: Address,
        left: Callable[[UpstreamLink], None],
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(settings, loop.time, client_side=True)
        self.address = address
        self.loop = loop
        self.served = 0
        self.closing = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self._left = left
        self._deadline = Deadline(loop, self.close)

    def stream(self) -> UpstreamStream | None:
        """A stream for one more request; None: the connection takes no more."""
        most = min(self.h2.remote_settings.max_concurrent_streams, self._settings.h2_streams)
        if self.ended or self.closing or len(self.streams) >= most or self.transport.is_closing():
            return None
        number = self.h2.get_next_available_stream_id()
        if number > _LAST_STREAM:
            self.close()
            return None
        self._deadline.clear()
        stream = self.streams[number] = UpstreamStream(self, number)
        return stream

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        """Close it when nothing is under way on it."""
        self.closing = True
        if not self.streams:
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline.close()

    def _settings_came(self, event: RemoteSettingsChanged) -> None:
        """The settings have come, the first thing that a server says: it speaks HTTP/2, and takes so many requests."""
        if not self.ready.done():
            self.ready.set_result(None)

    def _response(self, event: ResponseReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, UpstreamStream):
            stream.answered(event.headers, ended=event.stream_ended is not None)

    def _interim(self, event: InformationalResponseReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, UpstreamStream):
            stream.answered(event.headers, ended=False)

    def _stream_ended(self, event: StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, UpstreamStream):
            stream.all_came()

    def _trailers(self, event: TrailersReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, UpstreamStream):
            try:
                stream.trailers = trailers_of(event.headers, self._settings.fields)
            except BadHead as bad:
                stream.unreadable(bad)

    def _left_alone(self, event: ConnectionTerminated) -> None:
        self.closing = True
        self._left(self)
        for stream in list(self.streams.values()):
            if stream.id > (event.last_stream_id or 0):
                assert isinstance(stream, UpstreamStream)
                stream.unseen = True
                self.forget(stream)
                stream.gone(None)

    def _one_less(self) -> None:
        if self.closing and not self.streams and not self.ended:
            self._end("")
        else:
            self.rest()

    def rest(self) -> None:
        """Keep it for a while, unless something is under way on it."""
        if not self.streams and not self.ended:
            self._deadline.within(self._settings.pool_idle_s)

    def _over(self, problem: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("it does not speak HTTP/2, as its service says with h2_backend"))
        self._deadline.close()
        self._left(self)


class UpstreamStream(Stream):
    """One request to a machine, what `UpstreamConnection` is for HTTP/1.1. `unseen`: the machine did nothing with
    it."""

    __slots__ = (
        *("_handler", "_bare", "_complete", "_deadline", "_idle_s", "_interim_bytes", "_interims", "_link", "_method"),
        "_stalled",
        *("heard", "trailers", "unseen"),
    )

    def __init__(self, link: UpstreamLink, number: int) -> None:
        super().__init__(link, number)
        self._link = link
        self._handler: ResponseHandler | None = None
        self._method = b""
        self._idle_s = link._settings.idle_timeout_s
        self._deadline = Deadline(link.loop, self._late)
        self._complete = False  # all of the request was given
        self._stalled = False
        self._bare = False  # nothing follows the answer's head
        self._interims = self._interim_bytes = 0
        self.heard = False
        self.unseen = False
        self.trailers: list[Header] = []

    # --- for the response handler -------------------------------------------------------------------------------------

    @property
    def served(self) -> int:
        return self._link.served

    def ask(
        self,
        handler: ResponseHandler,
        method: bytes,
        target: bytes,
        fields: list[Header],
        body: Sequence[bytes],
        trailers: Sequence[Header] | None,
        idle_s: float,
    ) -> None:
        """Send a request. `body` is what is there of its body; `trailers` come after it, None: more is to come."""
        self._handler = handler
        self._method = method
        self._idle_s = idle_s
        bare = trailers is not None and not trailers and not body
        self.wire.h2.send_headers(self.id, request_fields(method, target, fields), end_stream=bare)
        self._complete = bare
        self._deadline.within(idle_s)
        for piece in body:
            self.put(piece)
        if trailers is not None and not bare:
            self.body_end(trailers)
        elif body:
            self.wire.wait(self)
        else:
            self.wire.write()

    def body(self, data: bytes) -> None:
        """More of the request's body."""
        self.put(data)
        self._deadline.within(self._idle_s)
        self.wire.wait(self)
        if self.pending > self._link._settings.window_bytes and not self._stalled and self._handler is not None:
            self._stalled = True
            self._handler.stalled(True)

    def body_end(self, trailers: Sequence[Header]) -> None:
        self._complete = True
        self.finish(trailers)
        self.wire.wait(self)

    def pause(self) -> None:
        self.held = True
        self._deadline.clear()

    def resume(self) -> None:
        if self.held:
            self.go_on()
        self._deadline.within(self._idle_s)

    def hand_over(self, handler: ResponseHandler) -> None:
        self._handler = handler

    def abandon(self) -> None:
        """The response handler is gone. The others of the connection are not."""
        self._handler = None
        self._deadline.close()
        self.wire.reset(self, ErrorCodes.CANCEL)

    close = abandon

    def release(self) -> asyncio.Transport:
        raise NotImplementedError  # it never switches

    def unanswered_s(self, now: float) -> float:
        """Does the same as `UpstreamConnection`'s."""
        if self._handler is None or self.heard or self._handler.sending:
            return 0.0
        return max(0.0, now - (self._deadline.at - self._idle_s))

    def give_up(self, problem: str, every: bool) -> None:
        """As of `UpstreamConnection`."""
        handler = self._handler
        if handler is not None and not self.heard and (every or handler.may_go_elsewhere):
            self._break(problem)

    # --- for the connection ------------------------------------------------------------------------------------------

    def answered(self, fields: list[Header], *, ended: bool) -> None:
        handler = self._handler
        if handler is None:
            return
        self.heard = True
        self._deadline.within(self._idle_s)
        try:
            head = read_answer(fields, self._method, ended=ended, fields_max=self._link._settings.fields)
            if head.status < 200:
                limits = self._link._settings
                self._interims += 1
                self._interim_bytes += sum(len(name) + len(value) + 4 for name, value in fields)
                if self._interims > limits.interim_answers or self._interim_bytes > limits.head_bytes:
                    raise BadHead("it has no end of 1xx answers")
                handler.interim(head)
                return
        except BadHead as bad:
            self.unreadable(bad)
            return
        self._bare = head.length in (ABSENT, 0)
        handler.answer(head)
        if self._handler is handler and not ended:
            handler.flush()

    def unreadable(self, bad: BadHead) -> None:
        handler, self._handler = self._handler, None
        self._deadline.close()
        self.wire.reset(self, ErrorCodes.PROTOCOL_ERROR)
        if handler is not None:
            handler.broken("unhealthy", f"its answer is not HTTP: {bad.problem}")

    def came(self, data: bytes) -> None:
        handler = self._handler
        if handler is not None and data:
            if self._bare:  # to a client of HTTP/1.1 it would be the next answer
                self.unreadable(BadHead("it has a body that it cannot have"))
                return
            handler.data(data)
            if self._handler is handler:
                handler.flush()
                if not self.held:
                    self._deadline.within(self._idle_s)

    def all_came(self) -> None:
        handler, self._handler = self._handler, None
        self._deadline.close()
        self._link.served += 1
        if self._complete and not self.pending:
            self.wire.forget(self)
        else:
            self.wire.reset(self, ErrorCodes.NO_ERROR)
        if handler is not None:
            handler.ended(self.trailers)

    def gone(self, event: StreamReset | None) -> None:
        handler, self._handler = self._handler, None
        self._deadline.close()
        link = self._link
        if handler is None:
            return
        if event is None:
            problem = link.problem or "it ends the connection"
            handler.broken("unhealthy" if link.broke_rules else "reset", problem)
        else:
            self.unseen = event.error_code == ErrorCodes.REFUSED_STREAM
            handler.broken("reset", f"it reset the stream ({event.error_code!r})")

    def drained(self) -> None:
        if self._stalled and self._handler is not None:
            self._stalled = False
            self._handler.stalled(False)

    def _late(self) -> None:
        handler = self._handler
        if handler is None:
            return
        if handler.sending and not self.heard:
            self._deadline.within(self._idle_s)  # the machine waits for its request: the client's time-out counts
            return
        self._break(f"nothing came from it for {self._idle_s:g} s")

    def _break(self, problem: str) -> None:
        handler, self._handler = self._handler, None
        self._deadline.close()
        self.wire.reset(self, ErrorCodes.CANCEL)
        if handler is not None:
            handler.broken("timeout", problem)

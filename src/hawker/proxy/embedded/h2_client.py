"""A client's connection that speaks HTTP/2: any number of requests at once, each with its exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, cast

from h2.errors import ErrorCodes
from h2.events import Event, RequestReceived, StreamEnded, StreamReset, TrailersReceived

from hawker.core.preface import Way
from hawker.proxy.base import Header, Refused, ServicePort
from hawker.proxy.embedded import refusals
from hawker.proxy.embedded.context import PlaneContext, peer_of
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.h2_heads import Malformed, read_request, trailers_of
from hawker.proxy.embedded.h2_transport import StreamTransport
from hawker.proxy.embedded.h2_wire import Stream, Wire
from hawker.proxy.embedded.heads import AnswerHead, BadHead
from hawker.proxy.embedded.ingress import ForwardedIngress, PublicIngress, client_of

_LOOKS = 4
"""How often within the idle time-out each stream is looked at."""


class H2Connection(Wire):
    """A connection of HTTP/2 at the public port `port`. `way` is what a load balancer has told of it."""

    _heeded: ClassVar[dict[type[Event], str]] = {
        RequestReceived: "_request",
        StreamEnded: "_stream_ended",
        TrailersReceived: "_trailers",
    }

    def __init__(self, context: PlaneContext, port: int, secure: bool, app: str = "", way: Way | None = None) -> None:
        super().__init__(context.settings, context.now, client_side=False)
        self.context = context
        self._way = way
        self._shared: Over2 | None = None  # unless a trusted proxy brings requests of many users
        self._client = b""
        self._port = port
        self._secure = secure
        self._app = app
        self._draining = False
        self._idle_s = context.settings.idle_timeout_s
        self._deadline = Deadline(context.loop, self._late)
        self._served = 0

    @property
    def busy(self) -> int:
        return sum(isinstance(stream, H2Request) and stream.under_way for stream in self.streams.values())

    def drain(self, *, patiently: bool = False) -> None:
        """Answer what is under way, and close. The client knows which requests were not taken, and may make them
        elsewhere."""
        if not self._draining and not self.ended and (self._served or not patiently):
            self._draining = True
            self.goodbye()
            self._one_less()

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.context.came(self, transport)
        self._client = peer_of(transport) if self._way is None else client_of(self._way)
        if self._client not in self.context.trusted:
            self._shared = Over2(self.context, self._port, self._client, self._secure, self._app)
        self._deadline.within(self._settings.head_timeout_s)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline.close()
        self.context.left(self)

    @property
    def ingress(self) -> PublicIngress:
        """Whether there is room for one more request."""
        return self._shared or ForwardedOver2(self.context, self._port, self._client, self._secure, self._app)

    # --- events ------------------------------------------------------------------------------------------------------

    def _request(self, event: RequestReceived) -> None:
        stream = H2Request(self, event.stream_id)
        self.streams[event.stream_id] = stream
        if self._draining:
            self.reset(stream, ErrorCodes.REFUSED_STREAM)
            return
        self._served += 1
        if self._served == self._settings.requests_per_connection:
            self.drain()
        if len(self.streams) == 1:
            self._deadline.within(self._idle_s / _LOOKS)
        stream.begin(event.headers, ended=event.stream_ended is not None)

    def _stream_ended(self, event: StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, H2Request):
            stream.all_came()

    def _trailers(self, event: TrailersReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, H2Request):
            try:
                stream.trailers = trailers_of(event.headers, self._settings.fields)
            except BadHead:
                self.refuse(stream)

    def refuse(self, stream: H2Request) -> None:
        """What came on the connection breaks the rules of HTTP/2."""
        self.context.counters.unread(400)
        self.reset(stream, ErrorCodes.PROTOCOL_ERROR)
        stream.gone(None)
        self.strike()

    # --- and what follows --------------------------------------------------------------------------------------------

    def served(self, port: ServicePort | None) -> None:
        """A request was answered."""
        self.pardon()
        if port is not None:
            self._idle_s = port.idle_timeout_s

    def _one_less(self) -> None:
        if self.streams or self.ended:
            return
        if self._draining:
            self._end("")
        else:
            self._deadline.within(self._idle_s)

    def _over(self, problem: str) -> None:
        self._deadline.close()

    def _late(self) -> None:
        if not self.streams:
            self.drain()
            return
        now, least = self._now(), self._settings.answer_least
        since = now - self._idle_s
        for stream in list(self.streams.values()):
            if not isinstance(stream, H2Request) or not stream.owing:
                continue
            slow = False
            if stream.pending and stream.since <= since:  # while the connection is choked, all of its streams are slow
                slow = not self._choked and stream.given - stream.given_before < least * (now - stream.since)
                stream.begin_to_wait()
            if slow or stream.moved_at <= since:
                stream.late(self._idle_s)
        if self.streams:
            self._deadline.within(self._idle_s / _LOOKS)


class Over2(PublicIngress):
    """A user's connection of HTTP/2."""

    __slots__ = ()
    _version = b"2"

    def answer_lines(self, head: AnswerHead, port: ServicePort, request_id: bytes) -> Sequence[bytes] | None:
        return None


class ForwardedOver2(ForwardedIngress):
    """A request on a connection of a trusted proxy."""

    __slots__ = ()
    _version = b"2"

    def answer_lines(self, head: AnswerHead, port: ServicePort, request_id: bytes) -> Sequence[bytes] | None:
        return None


class H2Request(Stream):
    """One request and its answer, a `hawker.proxy.embedded.downstream.Downstream`."""

    __slots__ = ("_complete", "_connection", "_early", "_exchange", "_head", "_over", "_transport", "trailers")

    def __init__(self, connection: H2Connection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self._connection = connection
        self._exchange: Exchange | None = None
        self._head: list[Header] = []
        self._complete = False  # all of the request has come
        self._over = False  # nothing is added to the answer any more
        self._early: bytes | None = None  # what came for a tunnel that is not there yet
        self._transport: StreamTransport | None = None
        self.trailers: Sequence[Header] = ()

    @property
    def under_way(self) -> bool:
        return self._exchange is not None

    @property
    def owing(self) -> bool:
        """Whether the client is waited for."""
        return self._transport is None and (self.pending > 0 or not (self._complete or self.held or self._over))

    # --- what comes --------------------------------------------------------------------------------------------------

    def begin(self, fields: list[Header], *, ended: bool) -> None:
        context = self._connection.context
        self._complete = ended
        try:
            head = read_request(fields, ended=ended, fields_max=context.settings.fields)
        except Malformed:
            self._connection.refuse(self)
            return
        except BadHead as bad:
            context.counters.unread(bad.status)
            status, headers, body = self._connection.ingress.refusal(refusals.of_head(bad.problem, bad.status), b"")
            self.answer(status, b"", headers, len(body))
            self.data(body)
            self.end(())
            return
        if head.upgrade:
            head.headers.append((b"sec-websocket-key", context.websocket_key()))
            self._early = b""
            self.held = True
        exchange = self._exchange = Exchange(context, self, self._connection.ingress, head)
        exchange.start()

    def came(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.came(data)
        elif self._early is not None:
            self._early += data
        elif self._exchange is not None and data:  # an empty frame must not become the chunk that ends a body
            self._exchange.body(data)

    def all_came(self) -> None:
        if self._complete:
            return  # the head said already that nothing follows
        self._complete = True
        if self._transport is not None:
            self._transport.ended()
        elif self._exchange is not None and self._exchange.sending:
            self._exchange.body_end(self.trailers)

    def gone(self, event: StreamReset | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone()
        if self._transport is not None:
            self._transport.lost(ConnectionResetError("the client reset the stream"))

    def late(self, idle_s: float) -> None:
        """The client sends nothing more, or takes nothing."""
        exchange = self._exchange
        if exchange is not None and not self.pending:
            exchange.refuse(Refused(408, "PH03", f"nothing of the request's body came for {idle_s:g} s"))
        else:
            self._exchange = None
            self._connection.reset(self, ErrorCodes.CANCEL)
            if exchange is not None:
                exchange.gone()

    # --- what goes ---------------------------------------------------------------------------------------------------

    def drained(self) -> None:
        if self._transport is not None:
            self._transport.drained()
        elif self._exchange is not None:
            self._exchange.resume()

    def sent(self) -> None:
        if self._transport is not None:
            self._transport.all_sent()
        elif self._complete:
            self._connection.forget(self)
        else:  # an early answer: the rest of the request is not wanted (RFC 9113, 8.1)
            self._connection.reset(self, ErrorCodes.NO_ERROR)

    # --- the exchange's front ----------------------------------------------------------------------------------------

    def interim(self, status: int, headers: Sequence[Header]) -> None:
        if not self.shut:
            self.wire.send_head(self, [(b":status", b"%d" % status), *headers])
            self.wire.write()

    def answer(self, status: int, reason: bytes, headers: list[Header], length: int) -> None:
        self._head = [(b":status", b"%d" % status), *headers]

    def answer_lines(self, status: int, reason: bytes, lines: Sequence[bytes], length: int) -> None:
        raise NotImplementedError  # `Over2` gives none

    def data(self, data: bytes) -> None:
        self.put(data)
        if self.pending > self._connection.context.settings.window_bytes and self._exchange is not None:
            self._exchange.pause()

    def flush(self) -> None:
        if self.shut:
            return
        if self._head:
            head, self._head = self._head, []
            self.wire.send_head(self, head)
            if not self.pending:
                self.wire.write()
        if self.pending:
            self.wire.wait(self)

    def end(self, trailers: Sequence[Header]) -> None:
        exchange, self._exchange = self._exchange, None
        self._over = True
        self._connection.served(None if exchange is None else exchange.port)
        if self.shut:
            return
        if self._head and not self.pending and not trailers:
            self.wire.send_head(self, self._head, ended=True)
            self.wire.write()
            if not self.shut:
                self.sent()
            return
        self.finish(trailers)
        self.flush()
        if not self.shut:
            self.wire.wait(self)

    def cut(self) -> None:
        self._exchange = None
        self._connection.reset(self, ErrorCodes.INTERNAL_ERROR)

    def switch(self, status: int, reason: bytes, headers: list[Header]) -> tuple[asyncio.Transport, bytes]:
        """Answer as RFC 8441 says: 200, and what came before is the tunnel's."""
        self._exchange = None
        early, self._early = self._early or b"", None
        transport = self._transport = StreamTransport(self, self._connection.context.settings.window_bytes)
        if not self.shut:
            kept = [field for field in headers if field[0] not in _OF_UPGRADES]
            self.wire.send_head(self, [(b":status", b"200"), *kept])
            self.wire.write()
        else:
            transport.lost(None)
        if self._complete:
            transport.ended()
        return transport, early

    def hold(self, held: bool) -> None:
        if held or self._early is not None:
            self.held = True
        elif self.held:
            self.moved_at = self._connection.context.now()
            self.go_on()


_OF_UPGRADES = (b"connection", b"upgrade", b"sec-websocket-accept")

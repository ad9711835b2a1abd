"""One request and its answer: what comes from the client goes to a machine, what the machine says to the client.

Nothing here knows which version of HTTP the client speaks (`Downstream`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from hawker.proxy.base import Failure, Header, Refused, ServicePort
from hawker.proxy.embedded.access_log import RequestRecord
from hawker.proxy.embedded.bodies import chunk, last_chunk
from hawker.proxy.embedded.body_buffer import BodyBuffer
from hawker.proxy.embedded.compression import Gzip, compressed, compressible
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.downstream import Downstream
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import CHUNKED, AnswerHead, RequestHead
from hawker.proxy.embedded.ingress import Ingress
from hawker.proxy.embedded.internal_answers import InternalAnswer, Signals
from hawker.proxy.embedded.tunnel import Tunnel, keep_watch
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.embedded.upstream_request import UpstreamRequest

GONE = 499
"""The status in logs and counts of a request whose client left before its answer was complete, as nginx has it."""


class Exchange:
    """The downstream side calls `start` once, `body` and `body_end` as the body comes (also before `start`), `pause`
    and `resume` when it cannot take more, `gone` when its client has left. The rest is for the connection to the
    machine, which is `_connection`, and for `UpstreamRequest`. `over`: the request has had its answer."""

    __slots__ = (
        *("_answered", "_body", "_connection", "_context", "_downstream", "_gzip", "_ingress", "_upstream"),
        *("begun", "bytes", "first", "machine", "over", "sending", "status"),
    )

    def __init__(self, context: PlaneContext, downstream: Downstream, ingress: Ingress, request: RequestHead) -> None:
        self._context = context
        self._downstream = downstream
        self._ingress = ingress
        self._body = BodyBuffer(context)
        self._upstream = UpstreamRequest(context, self, ingress, request, self._body)
        self._connection: UpstreamConnection | UpstreamStream | None = None
        self._answered = False
        self._gzip: Gzip | None = None
        self.sending = request.length > 0 or request.length == CHUNKED
        self.over = False
        self.begun = context.now()
        self.first = 0.0
        self.status = 0
        self.bytes = 0
        self.machine = ""

    @property
    def app(self) -> str:
        route = self._upstream.route
        return "" if route is None else route.app

    @property
    def port(self) -> ServicePort | None:
        """The service's, once it is known."""
        route = self._upstream.route
        return None if route is None else route.port

    # --- the downstream side -----------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.sending and self._body.upload is None:
            request = self._upstream.request
            most = self._context.settings.replay_bytes
            # The machine tells a client to go on that waits for that.
            awaited = self._ingress.edge and 0 < request.length <= most and not request.expects
            self._body.watch(self, self.app, sized=request.length > 0, awaited=awaited)
        self._upstream.start()

    def body(self, data: bytes) -> None:
        """More of the request's body."""
        connection, body = self._connection, self._body
        if body.add(data, self.app):
            if connection is not None:
                body.pass_on()
            else:
                if body.awaited:
                    self._upstream.body_came()  # all requests together keep too much: this one passes as it comes
                if self._connection is None and not self.over:
                    self._hold(True)
        if connection is not None:
            connection.body(data)

    def body_end(self, trailers: Sequence[Header]) -> None:
        self.sending = False
        self._body.end(trailers)
        if self._connection is not None:
            self._connection.body_end(trailers)
        if self._body.awaited:
            self._upstream.body_came()

    def _hold(self, held: bool) -> None:
        if self._body.upload is not None:
            self._body.upload.held = held
        self._downstream.hold(held)

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def gone(self) -> None:
        """The client has left, or took too long."""
        if not self.over:
            self.status = self.status or GONE
            self._upstream.leave()
            if self._connection is not None:
                self._connection.abandon()
            self._finish()

    @property
    def placed(self) -> bool:
        """Whether the request has a lease of a machine, and is not held."""
        return self._upstream.lease is not None

    def refuse(self, refusal: Refused) -> None:
        """The rest of the request cannot be read, or does not come."""
        if self._answered:
            self._downstream.cut()
            self.gone()
        elif not self.over:
            self._upstream.leave()
            if self._connection is not None:
                self._connection.abandon()
            self.deny(refusal)

    # --- for the machine's connection --------------------------------------------------------------------------------

    def interim(self, head: AnswerHead) -> None:
        ingress = self._ingress
        if head.status == 100:
            passes = self._upstream.request.expects and (ingress.hears or self.sending)
        else:
            passes = ingress.hears
            assert self._upstream.route is not None
            self._context.observer.hinted(self._upstream.route)
        if passes:
            self._downstream.interim(head.status, self._ingress.interim(head))

    def answer(self, head: AnswerHead) -> None:
        if head.signals and self._heed(head):
            return
        upstream = self._upstream
        self.first = self._context.now()
        self._answered = True
        self._body.whole = False
        if self._body.kept:
            self._body.release()
        self.status = head.status
        assert upstream.route is not None
        port = upstream.route.port
        lines = None
        if port.compress and self._ingress.edge and compressible(upstream.request, head):
            self._gzip = Gzip()
            self._downstream.answer(head.status, head.reason, compressed(self._headers(head)), CHUNKED)
            return
        if upstream.retry is None:
            lines = self._ingress.answer_lines(head, port, upstream.request_id)
        if lines is None:
            self._downstream.answer(head.status, head.reason, self._headers(head), head.length)
        else:
            self._downstream.answer_lines(head.status, head.reason, lines, head.length)

    def data(self, data: bytes) -> None:
        if self._gzip is not None:
            data = self._gzip.add(data)
        if data:
            self.bytes += len(data)
            self._downstream.data(data)

    def flush(self) -> None:
        if self._answered:
            if self._gzip is not None and (data := self._gzip.pause()):
                self._downstream.data(data)
            self._downstream.flush()

    def ended(self, trailers: list[Header]) -> None:
        self._connection = None
        if self._gzip is not None:
            self._downstream.data(self._gzip.end())
        self._finish()
        self._downstream.end(trailers)

    def broken(self, how: Failure, problem: str) -> None:
        connection, self._connection = self._connection, None
        if self._answered:
            self._finish()
            self._downstream.cut()
        else:
            assert connection is not None
            stale = how == "reset" and connection.served > 0 and not connection.heard
            self._upstream.again(how, problem, sent=not connection.unseen, stale=stale)

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if head.status == 101 and not self._upstream.request.upgrade:
            connection.close()
            self._upstream.again("unhealthy", "it switched protocols unasked", sent=True)
            return
        self.status = head.status
        self.first = self._context.now()
        self._tunnel(self._downstream.switch(head.status, head.reason, self._headers(head)), connection.release(), rest)

    def stalled(self, stalled: bool) -> None:
        self._hold(stalled)

    @property
    def may_go_elsewhere(self) -> bool:
        return self._upstream.may_go_elsewhere

    # --- for uploads -------------------------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        return self._answered

    @property
    def others(self) -> int:
        lease = self._upstream.lease
        return 0 if lease is None else lease.others

    # --- for the upstream request ------------------------------------------------------------------------------------

    def send(self, connection: UpstreamConnection | UpstreamStream) -> None:
        upstream, body = self._upstream, self._body
        request, lease = upstream.request, upstream.lease
        assert lease is not None
        assert upstream.route is not None
        idle_s = upstream.route.port.idle_timeout_s
        kept = body.kept
        if isinstance(connection, UpstreamStream):
            if kept:
                self._sending_kept()
            self._connection = connection
            trailers = None if self.sending else body.trailers
            connection.ask(self, request.method, request.target, upstream.fields(lease), kept, trailers, idle_s)
            return
        if request.method == b"CONNECT" and not lease.headers:
            self._join(connection)
            return
        data = upstream.head(lease)
        chunked = request.length == CHUNKED
        if kept:
            data += b"".join(map(chunk, kept) if chunked else kept)
        if chunked and not self.sending:
            data += last_chunk(body.trailers)
        if kept:
            self._sending_kept()
        self._connection = connection
        if lease.headers:  # another proxy may hold it first, and looks at the machine's time itself
            idle_s += self._context.settings.wait_s
        connection.send(self, request.method, data, idle_s, chunked)

    def redirect(self, host: bytes) -> None:
        location = b"https://" + host + self._upstream.request.target
        self._answer(301, [(b"location", location), (b"content-length", b"0")], b"")

    def deny(self, refusal: Refused) -> None:
        self._answer(*self._ingress.refusal(refusal, self._upstream.request_id))

    def _sending_kept(self) -> None:
        if self._body.too_much(self.app):
            self._body.pass_on()
        self._hold(False)

    def _join(self, connection: UpstreamConnection) -> None:
        """Join client and machine: bytes pass between them from here on."""
        self.status = 200
        self.first = self._context.now()
        self._tunnel(self._downstream.switch(200, b"", []), connection.release(), b"")

    def _tunnel(self, client: tuple[asyncio.Transport, bytes], machine: asyncio.Transport, first: bytes) -> None:
        transport, early = client
        assert self._upstream.route is not None
        port = self._upstream.route.port
        idle_s = port.idle_timeout_s
        if "http" not in port.handlers:
            idle_s = math.inf
            keep_watch(machine, self._context.settings.gone_s)
        Tunnel(transport, machine, idle_s, self._tunnelled, self._context).start(early, first)

    def _heed(self, head: AnswerHead) -> bool:
        """Look at an answer with fields meant for this proxy. True: the client does not get it."""
        lease, connection = self._upstream.lease, self._connection
        assert lease is not None
        assert connection is not None
        signals = Signals(head, lease)
        if signals.load or signals.elsewhere is not None:
            lease.heard(signals.load)
        how, sent = signals.elsewhere, signals.sent

        def again(body: bytes) -> None:
            assert how is not None
            self._connection = None
            self._upstream.again(how, "its worker could not reach it", sent=sent)

        def follow(body: bytes) -> None:
            self._connection = None
            self._upstream.follow(head.headers, body if signals.handed == "json" else None)

        if how is not None:
            InternalAnswer(head, self, again).begin(connection, read=False)
        elif signals.handed and self._ingress.edge:
            InternalAnswer(head, self, follow).begin(connection, read=signals.handed == "json")
        else:
            return False
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def _headers(self, head: AnswerHead) -> list[Header]:
        upstream = self._upstream
        lease, retry = upstream.lease, upstream.retry
        assert lease is not None
        assert upstream.route is not None
        upgrade = head.upgrade if head.status == 101 else b""
        fields = self._ingress.back(head, upstream.route.port, upstream.request_id, lease, upgrade)
        if retry is not None and retry.timed:
            at = "edge" if self._ingress.edge else "worker"
            fields.append((b"server-timing", retry.timing(at, lease.phases, self.first - self.begun)))
        return fields

    def _answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """An answer of the proxy's own."""
        self.status = status
        self._answered = True
        if self._upstream.request.method == b"HEAD":
            body = b""
        self.bytes = len(body)
        self._downstream.answer(status, b"", headers, len(body))
        if body:
            self._downstream.data(body)
        self._finish()
        self._downstream.end(())

    def _finish(self) -> None:
        self.over = True
        if self._body.upload is not None or self._body.kept:
            self._body.close()
        lease, self._upstream.lease = self._upstream.lease, None
        if lease is not None:
            lease.release()
            self.machine = lease.machine
        self._record()

    def _record(self) -> None:
        """Add the request to the counts and the log."""
        context, begun, first, upstream = self._context, self.begun, self.first, self._upstream
        context.counters.answered(self.status, first - begun if first else -1.0)
        retry = upstream.retry
        traced = context.traces is not None and retry is not None and retry.waited
        if not (traced or context.access):
            return
        record = RequestRecord(
            client=self._ingress.client,
            request=upstream.request,
            request_id=upstream.request_id,
            edge=self._ingress.edge,
            status=self.status,
            sent=self.bytes,
            app=self.app,
            machine=self.machine,
            begun=begun,
            first=first,
            ended=context.now(),
            marks=() if retry is None else retry.marks,
        )
        if traced and context.traces is not None:
            context.traces.add(record)
        if context.access is not None:
            context.access.add(record)

    def _tunnelled(self, sent: int, received: int) -> None:
        self.bytes += sent
        self._finish()

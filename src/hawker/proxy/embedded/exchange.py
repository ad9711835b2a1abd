"""One request and its answer: what comes from the client goes to a machine, what the machine says to the client.

Nothing here knows which version of HTTP the client speaks (`Downstream`).
"""

from __future__ import annotations

import asyncio
import math

from hawker.core.retrying import IDEMPOTENT, may_retry
from hawker.core.tracing import Mark
from hawker.proxy.base import Failure, Header, Lease, Refused
from hawker.proxy.embedded.bodies import chunk, last_chunk
from hawker.proxy.embedded.compression import Gzip, compressed, compressible
from hawker.proxy.embedded.context import PlaneContext, Traces
from hawker.proxy.embedded.downstream import Downstream
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import ABSENT, CHUNKED, AnswerHead, RequestHead
from hawker.proxy.embedded.ingress import Ingress
from hawker.proxy.embedded.internal_answers import InternalAnswer, Signals
from hawker.proxy.embedded.outgoing import Outgoing
from hawker.proxy.embedded.tunnel import Tunnel, keep_watch
from hawker.proxy.embedded.uploads import Upload
from hawker.proxy.embedded.upstream_connection import UpstreamConnection

GONE = 499
"""The status in logs and counts of a request whose client left before its answer was complete, as nginx has it."""


class Exchange(Outgoing):
    """The front calls `start` once, `body` and `body_end` as the body comes (also before `start`), `pause` and `resume`
    when it cannot take more, `gone` when its client has left. The rest is for the machine's connection."""

    __slots__ = ("_answered", "_gzip", "begun", "bytes", "first", "machine", "status")

    def __init__(self, context: PlaneContext, downstream: Downstream, ingress: Ingress, request: RequestHead) -> None:
        self._context = context
        self._ingress = ingress
        self._request = request
        self._route = self._lease = self._task = self._retry = self._replaying = self._upload = None
        self._whole = True
        self.request_id = ingress.request_id(request)
        self._downstream = downstream
        self._connection = None
        self._kept = []
        self._kept_bytes = 0
        self._trailers = ()
        self._answered = False
        self._gzip: Gzip | None = None
        self.sending = request.length > 0 or request.length == CHUNKED
        self.over = False
        self.begun = context.now()
        self.first = 0.0
        self.status = 0
        self.bytes = 0
        self.machine = ""

    # --- for the front -----------------------------------------------------------------------------------------------

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
            self._leave()
            if self._connection is not None:
                self._connection.abandon()
            self._finish()

    @property
    def placed(self) -> bool:
        """Whether a machine has a place for it, and it is not held."""
        return self._lease is not None

    def refuse(self, refusal: Refused) -> None:
        """The rest of the request cannot be read, or does not come."""
        if self._answered:
            self._downstream.cut()
            self.gone()
        elif not self.over:
            self._leave()
            if self._connection is not None:
                self._connection.abandon()
            self._refuse(refusal)

    # --- for the machine's connection --------------------------------------------------------------------------------

    def interim(self, head: AnswerHead) -> None:
        ingress = self._ingress
        if head.status == 100:
            passes = self._request.expects and (ingress.hears or self.sending)
        else:
            passes = ingress.hears
            assert self._route is not None
            self._context.observer.hinted(self._route)
        if passes:
            self._downstream.interim(head.status, self._ingress.interim(head))

    def answer(self, head: AnswerHead) -> None:
        if head.signals and self._heed(head):
            return
        self.first = self._context.now()
        self._answered = True
        self._whole = False
        if self._kept_bytes:
            self._forget_kept()
        self.status = head.status
        route = self._route
        assert route is not None
        lines = None
        if route.port.compress and self._ingress.edge and compressible(self._request, head):
            self._gzip = Gzip()
            self._downstream.answer(head.status, head.reason, compressed(self._headers(head)), CHUNKED)
            return
        if self._retry is None:
            lines = self._ingress.answer_lines(head, route.port, self.request_id)
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
            self._again(how, problem, sent=not connection.unseen, stale=stale)

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if head.status == 101 and not self._request.upgrade:
            connection.close()
            self._again("unhealthy", "it switched protocols unasked", sent=True)
            return
        self.status = head.status
        self.first = self._context.now()
        self._tunnel(self._downstream.switch(head.status, head.reason, self._headers(head)), connection.release(), rest)

    def stalled(self, stalled: bool) -> None:
        self._hold(stalled)

    @property
    def may_go_elsewhere(self) -> bool:
        retry = self._retry
        tries, sent_tries = (1, 1) if retry is None else (retry.tries + 1, retry.sent_tries + 1)
        method, whole = self._request.method, self._whole
        if self._chosen:  # the other proxy makes it elsewhere, if it has it yet: a body it may not have
            return method in IDEMPOTENT and self._request.length in (ABSENT, 0)
        most = self._sent_most
        return may_retry(method, "timeout", sent=True, whole=whole, tries=tries, sent_tries=sent_tries, sent_most=most)

    # --- for uploads -------------------------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        return self._answered

    @property
    def others(self) -> int:
        return 0 if self._lease is None else self._lease.others

    def _watched(self) -> Upload:
        request = self._request
        length = request.length
        held = self._keeps_too_much
        # Who waits to be told to go on is told so by the machine.
        awaited = self._ingress.edge and 0 < length <= self._context.settings.replay_bytes and not request.expects
        upload = self._context.uploads.watch(self, sized=length > 0, awaited=awaited and not held)
        upload.held = held
        return upload

    # --- to the machine ----------------------------------------------------------------------------------------------

    def _send(self, connection: UpstreamConnection | UpstreamStream) -> None:
        lease = self._lease
        route = self._route
        assert lease is not None
        assert route is not None
        request = self._request
        if isinstance(connection, UpstreamStream):
            self._ask(connection, lease, route.port.idle_timeout_s)
            return
        if request.method == b"CONNECT" and not lease.headers:
            self._join(connection)
            return
        passed = request.passed
        if passed is not None and not lease.headers and self._retry is None:
            data = passed[0] + self.request_id + passed[1]
        else:
            data = self._head(lease)
        chunked = request.length == CHUNKED
        if self._kept:
            data += b"".join(map(chunk, self._kept) if chunked else self._kept)
        if chunked and not self.sending:
            data += last_chunk(self._trailers)
        if self._kept:
            self._sending_kept()
        self._connection = connection
        idle_s = route.port.idle_timeout_s
        if lease.headers:  # another proxy may hold it first, and looks at the machine's time itself
            idle_s += self._context.settings.wait_s
        connection.send(self, request.method, data, idle_s, chunked)

    def _ask(self, stream: UpstreamStream, lease: Lease, idle_s: float) -> None:
        """The same over HTTP/2."""
        request = self._request
        kept = self._kept
        if kept:
            self._sending_kept()
        self._connection = stream
        trailers = None if self.sending else self._trailers
        stream.ask(self, request.method, request.target, self._fields(lease), kept, trailers, idle_s)

    def _join(self, connection: UpstreamConnection) -> None:
        """Bytes pass between client and machine from here on."""
        self.status = 200
        self.first = self._context.now()
        self._tunnel(self._downstream.switch(200, b"", []), connection.release(), b"")

    def _tunnel(self, client: tuple[asyncio.Transport, bytes], machine: asyncio.Transport, first: bytes) -> None:
        transport, early = client
        assert self._route is not None
        idle_s = self._route.port.idle_timeout_s
        if "http" not in self._route.port.handlers:
            idle_s = math.inf
            keep_watch(machine, self._context.settings.gone_s)
        Tunnel(transport, machine, idle_s, self._tunnelled, self._context).start(early, first)

    def _heed(self, head: AnswerHead) -> bool:
        """An answer with fields meant for this proxy. True: it is not the client's."""
        lease, connection = self._lease, self._connection
        assert lease is not None
        assert connection is not None
        signals = Signals(head, lease)
        if signals.load or signals.elsewhere is not None:
            lease.heard(signals.load)
        how, sent = signals.elsewhere, signals.sent

        def again(body: bytes) -> None:
            assert how is not None
            self._connection = None
            self._again(how, "its worker could not reach it", sent=sent)

        def follow(body: bytes) -> None:
            self._connection = None
            self._follow(head.headers, body if signals.handed == "json" else None)

        if how is not None:
            InternalAnswer(head, self, again).begin(connection, read=False)
        elif signals.handed and self._ingress.edge:
            InternalAnswer(head, self, follow).begin(connection, read=signals.handed == "json")
        else:
            return False
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def _headers(self, head: AnswerHead) -> list[Header]:
        lease, route, retry = self._lease, self._route, self._retry
        assert lease is not None
        assert route is not None
        fields = self._ingress.back(
            head, route.port, self.request_id, lease, head.upgrade if head.status == 101 else b""
        )
        if retry is not None and retry.timed:
            at = "edge" if self._ingress.edge else "worker"
            fields.append((b"server-timing", retry.timing(at, lease.phases, self.first - self.begun)))
        return fields

    def _redirect(self, host: bytes) -> None:
        location = b"https://" + host + self._request.target
        self._answer(301, [(b"location", location), (b"content-length", b"0")], b"")

    def _refuse(self, refusal: Refused) -> None:
        self._answer(*self._ingress.refusal(refusal, self.request_id))

    def _answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """An answer of the proxy's own."""
        self.status = status
        self._answered = True
        if self._request.method == b"HEAD":
            body = b""
        self.bytes = len(body)
        self._downstream.answer(status, b"", headers, len(body))
        if body:
            self._downstream.data(body)
        self._finish()
        self._downstream.end(())

    def _finish(self) -> None:
        self.over = True
        if self._upload is not None:
            self._context.uploads.drop(self._upload)
        if self._kept_bytes:
            self._forget_kept()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            self.machine = lease.machine
        self._record()

    def _record(self) -> None:
        """For counts and the log."""
        context, begun, first = self._context, self.begun, self.first
        first_s = first - begun if first else -1.0
        context.counters.answered(self.status, first_s)
        if context.traces is not None and self._retry is not None and self._retry.waited:
            self._trace(context.traces, self._retry.marks)
        if context.access is not None:
            total_s = context.now() - begun
            context.access.add(
                self._ingress.client,
                self._request,
                self.request_id,
                self.status,
                self.bytes,
                self.app,
                self.machine,
                first_s,
                total_s,
            )

    def _trace(self, traces: Traces, marks: list[Mark]) -> None:
        now = self._context.now()
        traces.add(
            self._request,
            self.request_id,
            edge=self._ingress.edge,
            begun=self.begun,
            first=self.first,
            ended=self.first if self.status == 101 else now,  # a tunnel may last for days
            marks=marks,
            status=self.status,
            app=self.app,
            machine=self.machine,
        )

    def _tunnelled(self, sent: int, received: int) -> None:
        self.bytes += sent
        self._finish()

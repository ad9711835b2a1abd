"""The way of a request to a machine: its route, a machine that takes it, a connection; other tries, and replays.

    find -> take ----------------> pooled connection -> send
            none: obtain (task) -> connect (task) ----^
              ^
              +--- refused, reset, elsewhere, fly-replay

A request for which a machine and a connection are at hand passes through without a task.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Protocol

from hawker.core.replay import BadReplay, read_json, replay_of
from hawker.core.retrying import IDEMPOTENT, SENT_MOST, may_retry
from hawker.core.tracing import PARENT_LENGTH, parent_of
from hawker.proxy.base import ANY, Failure, Header, Lease, Refused, Route, Waiting
from hawker.proxy.embedded.body_buffer import BodyBuffer
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.h2_pool import H2Pool
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import ABSENT, CHUNKED, RequestHead
from hawker.proxy.embedded.ingress import Ingress
from hawker.proxy.embedded.pool import Pool
from hawker.proxy.embedded.replaying import Replaying, remembered
from hawker.proxy.embedded.retry_state import NOTHING, RetryState
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.fields import ANYWHERE, MACHINE, SENT, TIMING, WAIT
from hawker.telemetry import get_logger

_log = get_logger()


class Carrier(Protocol):
    """The exchange that a request belongs to. Each request ends in one of these."""

    def send(self, connection: UpstreamConnection | UpstreamStream) -> None:
        """Here is a connection to the machine of the request's lease."""
        ...

    def redirect(self, host: bytes) -> None:
        """The client is to come again over TLS, and ask this host."""
        ...

    def deny(self, refusal: Refused) -> None: ...


class UpstreamRequest:
    """One request on its way to a machine, as long as it has no answer. `lease` is what it holds of a machine. `again`
    is for a machine that did not answer, `follow` for one that handed the request on."""

    __slots__ = (
        *("_body", "_carrier", "_context", "_ingress", "_replaying", "_task"),
        *("lease", "request", "request_id", "retry", "route"),
    )

    def __init__(
        self, context: PlaneContext, carrier: Carrier, ingress: Ingress, request: RequestHead, body: BodyBuffer
    ) -> None:
        self._context = context
        self._carrier = carrier
        self._ingress = ingress
        self._body = body
        self.route: Route | None = None
        self._task: asyncio.Task[None] | None = None
        self._replaying: Replaying | None = None
        self.request = request
        self.request_id = ingress.request_id(request)
        self.lease: Lease | None = None
        self.retry: RetryState | None = None

    def start(self) -> None:
        try:
            route = self._ingress.find(self.request)
            if route is None:
                self._seek()
            elif self._enter(route) and (self._body.upload is None or not self._body.awaited):
                self._take(route)
        except Refused as refusal:
            self._carrier.deny(refusal)

    def _enter(self, route: Route) -> bool:
        """The route is known. Returns False when the request is answered already. Raises `Refused`."""
        self.route = route
        request = self.request
        host = self._ingress.redirects(request, route.port)
        if host:
            self._carrier.redirect(host)
            return False
        if request.wishes:
            timed = any(name == TIMING for name, _ in request.headers)
            handed = self._ingress.handed(request)
            if handed is not None:
                self._replay(handed.fields, handed.body, route, handed.machine, self._context.settings.region, timed)
                return True
            self.retry = RetryState(self._deadline(), self._ingress.wishes(request), timed=timed)
        if self._context.remembers and self._ingress.edge:
            if self.retry is None:
                self.retry = RetryState(self._deadline())
            remembered(self._context, request, route, self.retry)
        return True

    def _take(self, route: Route) -> None:
        """Go as far as is possible without waiting."""
        retry = self.retry
        lease = None
        if retry is None:
            lease = route.take()
        elif not retry.app:
            lease = route.take(retry.wishes)
        if lease is not None:
            self.lease = lease
            method = self.request.method
            if method != b"CONNECT":
                pool = self._pool(route, lease) if route.port.h2_backend else self._context.upstreams.http1
                connection = pool.take(lease.address, method in IDEMPOTENT)
                if connection is not None:
                    self._carrier.send(connection)
                    return
        self._seek()

    def body_came(self) -> None:
        """The body that was awaited is there, or too large to wait for: take a machine now. The request is not answered
        within this call."""
        assert self._body.upload is not None
        self._body.upload.awaited = False
        before = self.route
        if self._task is not None or before is None:  # its app is being loaded
            return
        if self._replaying is not None:
            self._seek()
            return
        route = None
        with suppress(Refused):
            route = self._ingress.find(self.request)
        if route is before:
            if self.retry is not None:
                self.retry.deadline = self._deadline()
            self._take(before)
        else:  # much may have changed since its head came
            self.route = self.retry = None
            self._seek()

    def _seek(self) -> None:
        self._task = self._context.spawn(self._sought())

    async def _sought(self) -> None:
        """Load the app, obtain a machine and connect, until a machine has the request."""
        try:
            while True:
                try:
                    connection = await self._found()
                except _NotThere as failure:
                    if not self._tries_again(failure.how, failure.problem, sent=False):
                        assert self.retry is not None
                        raise self.retry.outcome() from None
                else:
                    break
        except Refused as refusal:
            self._task = None
            self._fail(refusal if self.retry is None else self.retry.given_up(refusal))
            return
        except Exception as error:  # a defect must not leave its client waiting
            _log.error("exchange.failed", request=self.request_id.decode("latin-1"), error=repr(error), exc_info=True)
            self._task = None
            self._carrier.deny(Refused(500, "PX01", "this proxy has failed"))
            return
        self._task = None
        if connection is not None:
            self._carrier.send(connection)

    async def _found(self) -> UpstreamConnection | UpstreamStream | None:
        """A connection to a machine that takes the request; None: it is answered already, or its body is awaited.
        Raises `Refused`, `_NotThere`."""
        route = self.route
        now = self._context.now
        begun = now()
        if route is None:
            route = await self._ingress.load(self.request)
            if not self._enter(route) or self._body.awaited:
                return None
        if self.retry is not None and self.retry.app:
            app, self.retry.app = self.retry.app, ""
            route = self.route = await self._context.router.other(route, app)
        retry = self.retry
        if retry is None:
            retry = self.retry = RetryState(self._deadline())
        lease = self.lease
        if lease is None:
            lease = self.lease = route.take(retry.wishes, retry.tried) or await route.obtain(
                retry.wishes, retry.tried, deadline=retry.deadline, request=self._waiting
            )
            self._spent("obtain", now() - begun, lease)
            begun = now()
        pool = self._pool(route, lease)
        if not retry.fresh and self.request.method != b"CONNECT":
            connection = pool.take(lease.address, self._repeatable)
            if connection is not None:
                return connection
        retry.fresh = False
        try:
            connection = await pool.connect(lease.address)
        except TimeoutError:
            raise _NotThere("timeout", "it cannot be connected to in time") from None
        except OSError as error:
            raise _NotThere("refused", f"it cannot be connected to ({error.strerror or error})") from None
        self._spent("connect", now() - begun)
        return connection

    def _pool(self, route: Route, lease: Lease) -> Pool | H2Pool:
        """The connections to take one from. Between proxies there is HTTP/1.1 alone, and so for what leaves HTTP
        altogether."""
        http2 = route.port.h2_backend and not lease.headers and not self.request.upgrade
        upstreams = self._context.upstreams
        return upstreams.h2 if http2 and self.request.method != b"CONNECT" else upstreams.http1

    def _spent(self, phase: str, seconds: float, lease: Lease | None = None) -> None:
        assert self.retry is not None
        self.retry.spent(phase, seconds, self._context.now(), lease.phases if lease is not None else NOTHING)
        counters = self._context.counters
        counters.spent(phase, seconds)
        if lease is not None:
            for name, of_it in lease.phases.items():
                counters.spent(name, of_it)

    @property
    def _waiting(self) -> Waiting:
        trace = ""
        for name, value in self.request.headers:
            if name == b"traceparent" and parent_of(value) is not None:
                trace = value[:PARENT_LENGTH].decode()
        return Waiting(self.request_id.decode("latin-1"), trace)

    @property
    def _repeatable(self) -> bool:
        """Whether the request may be made twice (RFC 9110 9.2.2)."""
        return self.request.method in IDEMPOTENT

    @property
    def _sent_most(self) -> int:
        """To how many machines something may be sent: another proxy that has chosen the machine counts them itself."""
        return 1 if self._chosen else max(SENT_MOST - self._ingress.sent, 1)

    @property
    def _chosen(self) -> bool:
        """Whether another proxy has chosen the machine."""
        return not self._ingress.edge and any(name == MACHINE and value for name, value in self.request.headers)

    @property
    def may_go_elsewhere(self) -> bool:
        """Whether the request, sent as it is, could be made once more at another machine."""
        retry = self.retry
        tries, sent_tries = (1, 1) if retry is None else (retry.tries + 1, retry.sent_tries + 1)
        if self._chosen:  # the other proxy makes it elsewhere, if it has it yet: a body it may not have
            return self._repeatable and self.request.length in (ABSENT, 0)
        return may_retry(
            self.request.method,
            "timeout",
            sent=True,
            whole=self._body.whole,
            tries=tries,
            sent_tries=sent_tries,
            sent_most=self._sent_most,
        )

    def fields(self, lease: Lease) -> list[Header]:
        """The request's fields as they go to the machine."""
        request, retry = self.request, self.retry
        assert self.route is not None
        wishes = ANY if retry is None else retry.wishes
        fields = self._ingress.forward(request, self.request_id, lease, wishes, request.upgrade)
        if not (request.host or request.minor):  # HTTP/1.0 on a port that is one app's; the machine gets HTTP/1.1
            fields.insert(0, (b"host", self.route.app.encode()))
        if retry is not None:
            fields += retry.added
        if lease.headers:
            until = self._ingress.until if retry is None else retry.deadline
            if until < math.inf:
                fields.append((WAIT, b"%d" % max(0, round((until - self._context.now()) * 1000))))
            if retry is not None and retry.sent_tries and ANYWHERE in lease.headers:
                fields.append((SENT, b"%d" % retry.sent_tries))
        return fields

    def head(self, lease: Lease) -> bytes:
        """The request's head as it goes to the machine over HTTP/1.1."""
        request = self.request
        reused = self.retry is None and not lease.headers
        if reused and (passed := request.passed) is not None:
            return passed[0] + self.request_id + passed[1]
        framing = b"\r\ntransfer-encoding: chunked\r\n\r\n" if request.length == CHUNKED else b"\r\n\r\n"
        lines = b"\r\n".join(map(b": ".join, self.fields(lease)))
        data = b"%b %b HTTP/1.1\r\n%b%b" % (request.method, request.target, lines, framing)
        if reused:
            around = data.split(self.request_id)
            if len(around) == 2:  # else the client wrote it, too
                request.passed = around[0], around[1]
        return data

    def _deadline(self) -> float:
        return min(self._context.now() + self._context.settings.wait_s, self._ingress.until)

    def again(self, how: Failure, problem: str, *, sent: int, stale: bool = False) -> None:
        if self._tries_again(how, problem, sent=sent, stale=stale):
            self._seek()
        else:
            assert self.retry is not None
            self._fail(self.retry.outcome(), acted=sent > 0 and not self._repeatable)

    def _tries_again(self, how: Failure, problem: str, *, sent: int, stale: bool = False) -> bool:
        """Note that this machine did not take the request; `sent` machines got something of it. Returns whether another
        one may be tried."""
        retry = self.retry
        if retry is None:
            retry = self.retry = RetryState(self._deadline())
        lease = self.lease
        assert lease is not None
        method = self.request.method
        if stale and (self._repeatable or not sent) and self._body.whole:
            retry.fresh = again = True  # it closed a connection that it had kept long enough: it may be fine
        else:
            self.lease = None
            lease.release() if stale else lease.failed(how)
            retry.tried.add(lease.machine)
            most, most_sent = self._context.settings.attempts, self._sent_most
            whole = self._body.whole
            again = retry.failed(method, how, problem, sent=sent, whole=whole, most=most, sent_most=most_sent)
        self._context.counters.retries += again
        return again

    def _fail(self, refusal: Refused, *, acted: bool = False) -> None:
        """No machine took it. `acted`: one may have done what it asks for, all the same."""
        retry = self.retry
        if retry is not None and self._body.whole and not acted:
            if retry.remembered:
                self._context.replays.forget(retry.remembered)
                self.retry = RetryState(self._deadline(), timed=retry.timed)
                self._seek()
                return
            back = None if self._replaying is None else self._replaying.back(retry)
            if back is not None:
                self.request, self.route, self.retry = back
                self._seek()
                return
        self._carrier.deny(refusal)

    def follow(self, headers: list[Header], body: bytes | None) -> None:
        """A machine hands the request on, by a field or by JSON."""
        lease, route = self.lease, self.route
        assert lease is not None
        assert route is not None
        timed = self.retry is not None and self.retry.timed
        try:
            self._replay(headers, body, route, lease.machine, lease.region, timed)
        except Refused as refusal:
            self._carrier.deny(refusal)
            return
        self.lease = None
        lease.release()
        self._seek()

    def _replay(
        self, headers: list[Header], body: bytes | None, route: Route, machine: str, region: str, timed: bool
    ) -> None:
        """Have the request go where a machine has said. Raises `Refused`."""
        self._context.observer.handed_on(route)
        try:
            replay = replay_of(headers) if body is None else read_json(body)
        except BadReplay as bad:
            raise Refused(502, "PA03", f"the app hands this request on, but {bad}") from None
        assert replay is not None
        if not self._body.whole:
            most = self._context.settings.replay_bytes
            raise Refused(413, "PA01", f"the app hands this request on, and its body is over {most} bytes")
        if self._replaying is None:
            self._replaying = Replaying(self._context)
        self.request, self.retry = self._replaying.follow(replay, self.request, route, machine, region, timed)

    def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


class _NotThere(Exception):
    def __init__(self, how: Failure, problem: str) -> None:
        super().__init__(problem)
        self.how = how
        self.problem = problem

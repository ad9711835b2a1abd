"""The way of a request to a machine: its route, a machine that takes it, a connection; other tries, and replays.

    find -> take ----------------> pooled connection -> send
            none: obtain (task) -> connect (task) ----^
              ^
              +--- refused, reset, elsewhere, fly-replay

A request for which a machine and a connection are at hand passes through without a task.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hawker.core.replay import BadReplay, read_json, replay_of
from hawker.core.retrying import IDEMPOTENT, SENT_MOST
from hawker.core.tracing import PARENT_LENGTH, parent_of
from hawker.proxy.base import Failure, Header, Lease, Refused, Route, ServicePort, Waiting
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.h2_pool import H2Pool
from hawker.proxy.embedded.h2_upstream import UpstreamStream
from hawker.proxy.embedded.heads import RequestHead
from hawker.proxy.embedded.ingress import Ingress
from hawker.proxy.embedded.pool import Pool
from hawker.proxy.embedded.replaying import Replaying, remembered
from hawker.proxy.embedded.retry_state import NOTHING, RetryState
from hawker.proxy.embedded.uploads import Upload
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.fields import MACHINE, TIMING
from hawker.telemetry import get_logger

_log = get_logger()


class Errand:
    """What an exchange is as long as it has no answer. `_lease` is its place at a machine, `_whole` whether all that
    came of its body is kept, to be sent once more, `_upload` what was still to come of it when it began. Ends in
    `_send`, `_redirect` or `_refuse`, the last perhaps after `_again`, which is for a machine that did not answer."""

    __slots__ = (
        "_context",
        "_ingress",
        "_lease",
        "_replaying",
        "_request",
        "_retry",
        "_route",
        "_task",
        "_upload",
        "_whole",
        "request_id",
        "sending",
    )

    _context: PlaneContext
    _ingress: Ingress
    _request: RequestHead
    _route: Route | None
    _lease: Lease | None
    _task: asyncio.Task[None] | None
    _retry: RetryState | None
    _replaying: Replaying | None
    _upload: Upload | None
    _whole: bool
    request_id: bytes
    sending: bool
    """Whether the request's body is not complete yet."""

    def _send(self, connection: UpstreamConnection | UpstreamStream) -> None:
        """Here is a connection to the machine of `_lease`."""
        raise NotImplementedError

    def _redirect(self, host: bytes) -> None:
        """The client is to come again over TLS, and ask this host."""
        raise NotImplementedError

    def _refuse(self, refusal: Refused) -> None:
        raise NotImplementedError

    def _watched(self) -> Upload:
        """What is still to come of the body."""
        raise NotImplementedError

    @property
    def app(self) -> str:
        return "" if self._route is None else self._route.app

    @property
    def port(self) -> ServicePort | None:
        """The service's, once it is known."""
        return None if self._route is None else self._route.port

    def start(self) -> None:
        if self.sending and self._upload is None:
            self._upload = self._watched()
        upload = self._upload
        try:
            route = self._ingress.find(self._request)
            if route is None:
                self._seek()
            elif self._enter(route) and (upload is None or not upload.awaited):
                self._take(route)
        except Refused as refusal:
            self._refuse(refusal)

    def _enter(self, route: Route) -> bool:
        """Where the request belongs is known. False: it is answered already. Raises `Refused`."""
        self._route = route
        request = self._request
        host = self._ingress.redirects(request, route.port)
        if host:
            self._redirect(host)
            return False
        if request.wishes:
            timed = any(name == TIMING for name, _ in request.headers)
            handed = self._ingress.handed(request)
            if handed is not None:
                self._replay(handed.fields, handed.body, route, handed.machine, self._context.settings.region, timed)
                return True
            self._retry = RetryState(self._deadline(), self._ingress.wishes(request), timed=timed)
        if self._context.remembers and self._ingress.edge:
            if self._retry is None:
                self._retry = RetryState(self._deadline())
            remembered(self._context, request, route, self._retry)
        return True

    def _take(self, route: Route) -> None:
        """The way without waiting, as far as there is one."""
        retry = self._retry
        lease = None
        if retry is None:
            lease = route.take()
        elif not retry.app:
            lease = route.take(retry.wishes)
        if lease is not None:
            self._lease = lease
            method = self._request.method
            if method != b"CONNECT":
                pool = self._pool(route, lease) if route.port.h2_backend else self._context.upstreams.http1
                connection = pool.take(lease.address, method in IDEMPOTENT)
                if connection is not None:
                    self._send(connection)
                    return
        self._seek()

    def _all_came(self) -> None:
        """The body that no place was taken for before. It is not answered within this call."""
        assert self._upload is not None
        self._upload.awaited = False
        before = self._route
        if self._task is not None or before is None:  # its app is being loaded
            return
        if self._replaying is not None:
            self._seek()
            return
        route = None
        with suppress(Refused):
            route = self._ingress.find(self._request)
        if route is before:
            if self._retry is not None:
                self._retry.deadline = self._deadline()
            self._take(before)
        else:  # much may have changed since its head came
            self._route = self._retry = None
            self._seek()

    def _seek(self) -> None:
        self._task = self._context.spawn(self._sought())

    async def _sought(self) -> None:
        """The way with waiting: load the app, obtain a machine, connect, until one has the request."""
        try:
            while True:
                try:
                    connection = await self._found()
                except _NotThere as failure:
                    if not self._tries_again(failure.how, failure.problem, sent=False):
                        assert self._retry is not None
                        raise self._retry.outcome() from None
                else:
                    break
        except Refused as refusal:
            self._task = None
            self._fail(refusal if self._retry is None else self._retry.given_up(refusal))
            return
        except Exception as error:  # a defect must not leave its client waiting
            _log.error("exchange.failed", request=self.request_id.decode("latin-1"), error=repr(error), exc_info=True)
            self._task = None
            self._refuse(Refused(500, "PX01", "this proxy has failed"))
            return
        self._task = None
        if connection is not None:
            self._send(connection)

    async def _found(self) -> UpstreamConnection | UpstreamStream | None:
        """A connection to a machine that takes the request; None: it is answered already, or its body is awaited.
        Raises `Refused`, `_NotThere`."""
        route = self._route
        now = self._context.now
        begun = now()
        if route is None:
            route = await self._ingress.load(self._request)
            if not self._enter(route) or (self._upload is not None and self._upload.awaited):
                return None
        if self._retry is not None and self._retry.app:
            app, self._retry.app = self._retry.app, ""
            route = self._route = await self._context.router.other(route, app)
        retry = self._retry
        if retry is None:
            retry = self._retry = RetryState(self._deadline())
        lease = self._lease
        if lease is None:
            lease = self._lease = route.take(retry.wishes, retry.tried) or await route.obtain(
                retry.wishes, retry.tried, deadline=retry.deadline, request=self._waiting
            )
            self._spent("obtain", now() - begun, lease)
            begun = now()
        pool = self._pool(route, lease)
        if not retry.fresh and self._request.method != b"CONNECT":
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
        """Between proxies there is HTTP/1.1 alone, and so for what leaves HTTP altogether."""
        http2 = route.port.h2_backend and not lease.headers and not self._request.upgrade
        upstreams = self._context.upstreams
        return upstreams.h2 if http2 and self._request.method != b"CONNECT" else upstreams.http1

    def _spent(self, phase: str, seconds: float, lease: Lease | None = None) -> None:
        assert self._retry is not None
        self._retry.spent(phase, seconds, self._context.now(), lease.phases if lease is not None else NOTHING)
        counters = self._context.counters
        counters.spent(phase, seconds)
        if lease is not None:
            for name, of_it in lease.phases.items():
                counters.spent(name, of_it)

    @property
    def _waiting(self) -> Waiting:
        trace = ""
        for name, value in self._request.headers:
            if name == b"traceparent" and parent_of(value) is not None:
                trace = value[:PARENT_LENGTH].decode()
        return Waiting(self.request_id.decode("latin-1"), trace)

    @property
    def _repeatable(self) -> bool:
        """Whether the request may be made twice (RFC 9110 9.2.2)."""
        return self._request.method in IDEMPOTENT

    @property
    def _sent_most(self) -> int:
        """How many machines get something of it: another proxy that has chosen the machine counts them itself."""
        return 1 if self._chosen else max(SENT_MOST - self._ingress.sent, 1)

    @property
    def _chosen(self) -> bool:
        """Whether another proxy has chosen the machine."""
        return not self._ingress.edge and any(name == MACHINE and value for name, value in self._request.headers)

    def _deadline(self) -> float:
        return min(self._context.now() + self._context.settings.wait_s, self._ingress.until)

    def _again(self, how: Failure, problem: str, *, sent: int, stale: bool = False) -> None:
        if self._tries_again(how, problem, sent=sent, stale=stale):
            self._seek()
        else:
            assert self._retry is not None
            self._fail(self._retry.outcome(), acted=sent > 0 and not self._repeatable)

    def _tries_again(self, how: Failure, problem: str, *, sent: int, stale: bool = False) -> bool:
        """Note that this machine did not take it; `sent`: how many got something of it. Whether another one may be
        tried."""
        retry = self._retry
        if retry is None:
            retry = self._retry = RetryState(self._deadline())
        lease = self._lease
        assert lease is not None
        method = self._request.method
        if stale and (self._repeatable or not sent) and self._whole:
            retry.fresh = again = True  # it closed a connection that it had kept long enough: it may be fine
        else:
            self._lease = None
            lease.release() if stale else lease.failed(how)
            retry.tried.add(lease.machine)
            most = self._context.settings.attempts
            most_sent = self._sent_most
            again = retry.failed(method, how, problem, sent=sent, whole=self._whole, most=most, sent_most=most_sent)
        self._context.counters.retries += again
        return again

    def _fail(self, refusal: Refused, *, acted: bool = False) -> None:
        """No machine took it. `acted`: one may have done what it asks for, all the same."""
        retry = self._retry
        if retry is not None and self._whole and not acted:
            if retry.remembered:
                self._context.replays.forget(retry.remembered)
                self._retry = RetryState(self._deadline(), timed=retry.timed)
                self._seek()
                return
            back = None if self._replaying is None else self._replaying.back(retry)
            if back is not None:
                self._request, self._route, self._retry = back
                self._seek()
                return
        self._refuse(refusal)

    def _follow(self, headers: list[Header], body: bytes | None) -> None:
        """A machine hands the request on, by a field or by JSON."""
        lease, route = self._lease, self._route
        assert lease is not None
        assert route is not None
        timed = self._retry is not None and self._retry.timed
        try:
            self._replay(headers, body, route, lease.machine, lease.region, timed)
        except Refused as refusal:
            self._refuse(refusal)
            return
        self._lease = None
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
        if not self._whole:
            most = self._context.settings.replay_bytes
            raise Refused(413, "PA01", f"the app hands this request on, and its body is over {most} bytes")
        if self._replaying is None:
            self._replaying = Replaying(self._context)
        self._request, self._retry = self._replaying.follow(replay, self._request, route, machine, region, timed)

    def _leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


class _NotThere(Exception):
    def __init__(self, how: Failure, problem: str) -> None:
        super().__init__(problem)
        self.how = how
        self.problem = problem

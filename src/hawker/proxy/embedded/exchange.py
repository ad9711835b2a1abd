"""One request and its answer: the machine that is to take it, tries, replays, and what the client is told.

    find -> take ----------------> pooled connection -> send -> answer -> data ... -> end
            none: obtain (task) -> connect (task) ----^   |
              ^                                           | refused, reset, elsewhere, fly-replay
              +-------------------------------------------+

Nothing here knows which version of HTTP the client speaks (`Front`), and a request for which a machine and a connection
are at hand passes through without a task. A request that may have to be sent again is kept until its answer comes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hawker.proxy.base import ANY, Failure, Header, Lease, Refused, Route, ServicePort, Wishes
from hawker.proxy.embedded import refusals
from hawker.proxy.embedded.front import Front
from hawker.proxy.embedded.heads import ABSENT, CHUNKED, AnswerHead, RequestHead
from hawker.proxy.embedded.inlets import ELSEWHERE, LOAD, TIMING, Inlet
from hawker.proxy.embedded.machine import MachineConnection
from hawker.proxy.embedded.tunnel import Tunnel

if TYPE_CHECKING:
    from hawker.proxy.embedded.engine import Engine

GONE = 499
"""The status in logs and counts of a request whose client left before its answer was complete, as nginx has it."""


class Search:
    """What is remembered of a request that its first machine did not take at once."""

    __slots__ = ("attempts", "deadline", "fresh", "last", "phases", "problem", "timed", "tried", "wishes")

    def __init__(self, wishes: Wishes, deadline: float) -> None:
        self.wishes = wishes
        self.deadline = deadline
        self.tried: set[str] = set()
        self.attempts = 0
        self.fresh = False
        self.last: Failure = "refused"
        self.problem = ""
        self.phases: dict[str, float] = {}
        self.timed = False

    def spent(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


class Exchange:
    """The front calls `start` once, `body` and `body_end` as the body comes (also before `start`), `pause` and `resume`
    when it cannot take more, `gone` when its client has left. The rest is for the machine's connection."""

    __slots__ = (
        *("_answered", "_connection", "_discard", "_engine", "_front", "_inlet", "_kept", "_kept_bytes", "_lease"),
        *("_phases", "_request", "_route", "_search", "_task", "_whole"),
        *("begun", "bytes", "first", "over", "request_id", "sending", "status"),
    )

    def __init__(self, engine: Engine, front: Front, inlet: Inlet, request: RequestHead) -> None:
        self._engine = engine
        self._front = front
        self._inlet = inlet
        self._request = request
        self._route: Route | None = None
        self._lease: Lease | None = None
        self._connection: MachineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._search: Search | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._whole = True  # what is kept is all of the body that has come
        self._answered = False
        self._discard: Callable[[], None] | None = None
        self.sending = request.length > 0 or request.length == CHUNKED
        self.over = False
        self.begun = engine.now()
        self.first = 0.0
        self.status = 0
        self.bytes = 0
        self.request_id = inlet.request_id(request)

    @property
    def request(self) -> RequestHead:
        return self._request

    @property
    def port(self) -> ServicePort | None:
        """The service's, once it is known."""
        return None if self._route is None else self._route.port

    # --- for the front -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        try:
            route = self._inlet.find(self._request)
            if route is None:
                self._seek()
            elif self._enter(route):
                self._take(route)
        except Refused as refusal:
            self._refuse(refusal)

    def body(self, data: bytes) -> None:
        """More of the request's body."""
        if self._request.length == CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._pass(data)

    def body_end(self, trailers: Sequence[Header]) -> None:
        self.sending = False
        if self._request.length == CHUNKED:
            self._pass(b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in trailers]))

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

    def refuse(self, refusal: Refused) -> None:
        """The rest of the request cannot be read, or does not come."""
        if self._answered:
            self._front.cut()
            self.gone()
        elif not self.over:
            self._leave()
            if self._connection is not None:
                self._connection.abandon()
            self._refuse(refusal)

    # --- for the machine's connection --------------------------------------------------------------------------------

    def interim(self, head: AnswerHead) -> None:
        if head.status != 100 or self._request.expects:
            self._front.interim(head.status, self._inlet.interim(head))

    def answer(self, head: AnswerHead) -> None:
        if head.signals and self._heed(head):
            return
        self.first = self._engine.now()
        self._answered = True
        self._whole = False
        self._kept = []
        self.status = head.status
        route = self._route
        assert route is not None
        lines = None if self._search is not None else self._inlet.answer_lines(head, route.port, self.request_id)
        if lines is None:
            self._front.answer(head.status, head.reason, self._headers(head), head.length)
        else:
            self._front.answer_lines(head.status, head.reason, lines, head.length)

    def data(self, data: bytes) -> None:
        if self._discard is None:
            self.bytes += len(data)
            self._front.data(data)

    def flush(self) -> None:
        if self._answered:
            self._front.flush()

    def ended(self, trailers: list[Header]) -> None:
        self._connection = None
        if self._discard is not None:
            again, self._discard = self._discard, None
            again()
            return
        self._finish()
        self._front.end(trailers)

    def broken(self, how: Failure, problem: str) -> None:
        connection, self._connection = self._connection, None
        if self._discard is not None:
            again, self._discard = self._discard, None
            again()
        elif self._answered:
            self._finish()
            self._front.cut()
        else:
            assert connection is not None
            stale = how == "reset" and connection.served > 0 and not connection.heard
            self._again(how, problem, sent=True, stale=stale)

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if head.status == 101 and not self._request.upgrade:
            connection.close()
            self._again("unhealthy", "it switched protocols unasked", sent=True)
            return
        self.status = head.status
        self.first = self._engine.now()
        self._tunnel(self._front.switch(head.status, head.reason, self._headers(head)), connection.release(), rest)

    def stalled(self, stalled: bool) -> None:
        self._front.hold(stalled)

    # --- the way to a machine ----------------------------------------------------------------------------------------

    def _enter(self, route: Route) -> bool:
        """Where the request belongs is known. False: it is answered already. Raises `Refused`."""
        self._route = route
        if self._inlet.redirects(route.port):
            self._redirect()
            return False
        if self._request.wishes:
            self._search = Search(self._inlet.wishes(self._request), self._deadline())
            self._search.timed = any(name == TIMING for name, _ in self._request.headers)
        return True

    def _take(self, route: Route) -> None:
        """The way without waiting, as far as there is one."""
        lease = route.take() if self._search is None else route.take(self._search.wishes)
        if lease is not None:
            self._lease = lease
            connection = None if self._bare else self._engine.pool.take(lease.address, self._repeatable)
            if connection is not None:
                self._send(connection)
                return
        self._seek()

    def _send(self, connection: MachineConnection) -> None:
        lease = self._lease
        route = self._route
        assert lease is not None
        assert route is not None
        if self._bare:
            self._join(connection)
            return
        request = self._request
        passed = request.passed
        if passed is not None and not lease.headers and self._search is None:
            data = passed[0] + self.request_id + passed[1]
        else:
            data = self._head(lease)
        if self._kept:
            data += b"".join(self._kept)
            self._front.hold(False)
            if self._kept_bytes > self._engine.settings.replay_bytes:
                self._whole = False
                self._kept = []
        self._connection = connection
        connection.send(self, request.method, data, route.port.idle_timeout_s)

    def _head(self, lease: Lease) -> bytes:
        """As it goes to the machine."""
        request = self._request
        wishes = ANY if self._search is None else self._search.wishes
        fields = self._inlet.forward(request, self.request_id, lease, wishes, request.upgrade)
        framing = b"\r\ntransfer-encoding: chunked\r\n\r\n" if request.length == CHUNKED else b"\r\n\r\n"
        lines = b"\r\n".join(map(b": ".join, fields))
        data = b"%b %b HTTP/1.1\r\n%b%b" % (request.method, request.target, lines, framing)
        if self._search is None and not lease.headers:
            around = data.split(self.request_id)
            if len(around) == 2:  # else the client wrote it, too
                request.passed = around[0], around[1]
        return data

    def _join(self, connection: MachineConnection) -> None:
        """Bytes pass between client and machine from here on."""
        self.status = 200
        self.first = self._engine.now()
        self._tunnel(self._front.switch(200, b"", []), connection.release(), b"")

    def _tunnel(self, client: tuple[asyncio.Transport, bytes], machine: asyncio.Transport, first: bytes) -> None:
        transport, early = client
        assert self._route is not None
        idle_s = self._route.port.idle_timeout_s if "http" in self._route.port.handlers else math.inf
        self._engine.counters.tunnels += 1
        Tunnel(transport, machine, idle_s, self._tunnelled, self._engine).start(early, first)

    @property
    def _bare(self) -> bool:
        """Whether a connection was asked for, and it is the machine's own: bytes without HTTP around them."""
        return self._request.method == b"CONNECT" and self._lease is not None and not self._lease.headers

    def _seek(self) -> None:
        self._task = self._engine.spawn(self._sought())

    async def _sought(self) -> None:
        """The way with waiting: load the app, obtain a machine, connect, until one has the request."""
        try:
            while True:
                try:
                    connection = await self._found()
                except _NotThere as failure:
                    if not self._tries_again(failure.how, failure.problem, sent=False):
                        raise self._failed() from None
                else:
                    break
        except Refused as refusal:
            self._task = None
            self._refuse(self._given_up(refusal))
            return
        self._task = None
        if connection is not None:
            self._send(connection)

    async def _found(self) -> MachineConnection | None:
        """A connection to a machine that takes the request; None: answered already. Raises `Refused`, `_NotThere`."""
        route = self._route
        now = self._engine.now
        begun = now()
        if route is None:
            route = await self._inlet.load(self._request)
            if not self._enter(route):
                return None
        search = self._search
        if search is None:
            search = self._search = Search(ANY, self._deadline())
        lease = self._lease
        if lease is None:
            lease = self._lease = route.take(search.wishes, search.tried) or await route.obtain(
                search.wishes, search.tried, deadline=search.deadline, request=self.request_id.decode()
            )
            search.spent("obtain", now() - begun)
            begun = now()
        if not search.fresh and not self._bare:
            connection = self._engine.pool.take(lease.address, self._repeatable)
            if connection is not None:
                return connection
        search.fresh = False
        try:
            connection = await self._engine.pool.connect(lease.address)
        except TimeoutError:
            raise _NotThere("timeout", "it cannot be connected to in time") from None
        except OSError as error:
            raise _NotThere("refused", f"it cannot be connected to ({error.strerror or error})") from None
        search.spent("connect", now() - begun)
        return connection

    @property
    def _repeatable(self) -> bool:
        """Whether the request may be made twice (RFC 9110 9.2.2)."""
        return self._request.method in _IDEMPOTENT

    def _deadline(self) -> float:
        return self._engine.now() + self._engine.settings.wait_s

    # --- trying again ------------------------------------------------------------------------------------------------

    def _again(self, how: Failure, problem: str, *, sent: bool, stale: bool = False) -> None:
        if self._tries_again(how, problem, sent=sent, stale=stale):
            self._seek()
        else:
            self._refuse(self._failed())

    def _tries_again(self, how: Failure, problem: str, *, sent: bool, stale: bool = False) -> bool:
        """Note that this machine did not take it. Whether another one may be tried."""
        search = self._search
        if search is None:
            search = self._search = Search(ANY, self._deadline())
        search.last, search.problem = how, problem
        search.attempts += 1
        lease = self._lease
        assert lease is not None
        if stale:
            search.fresh = True  # the machine closed a connection it had kept long enough: it may be fine
        else:
            self._lease = None
            lease.failed(how)
            search.tried.add(lease.machine)
        again = (not sent or self._repeatable) and self._whole and search.attempts < self._engine.settings.attempts
        if again:
            self._engine.counters.retries += 1
        return again

    def _given_up(self, refusal: Refused) -> Refused:
        """What to say when no other machine takes it: what the last one did says more than that there is none."""
        if refusal.status != 503 or self._search is None or not self._search.attempts:
            return refusal
        failed = self._failed()
        failed.retry_after_s = refusal.retry_after_s
        return failed

    def _failed(self) -> Refused:
        search = self._search
        assert search is not None
        status, code, _ = refusals.OF_FAILURES[search.last]
        return Refused(status, code, f"no answer from a machine of this app: {search.problem}")

    def _heed(self, head: AnswerHead) -> bool:
        """Fields meant for this proxy. True: this is not the client's answer."""
        lease = self._lease
        assert lease is not None
        if lease.headers:
            elsewhere = b""
            for name, value in head.headers:
                if name == LOAD:
                    lease.heard(value)
                elif name == ELSEWHERE:
                    elsewhere = value
            if elsewhere and head.status == 421:
                how = _failure(elsewhere)
                sent = how not in ("elsewhere", "refused")
                self._put_aside(head, lambda: self._again(how, "its worker could not reach it", sent=sent))
                return True
        return False

    def _put_aside(self, head: AnswerHead, then: Callable[[], None]) -> None:
        """Read this answer to its end without passing it on, or close its connection if that may take long."""
        if head.length == ABSENT or 0 <= head.length <= _ASIDE_BYTES:
            self._discard = then
        else:
            assert self._connection is not None
            self._connection.abandon()
            self._connection = None
            then()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _pass(self, data: bytes) -> None:
        connection = self._connection
        if self._whole:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes > self._engine.settings.replay_bytes:
                if connection is None:
                    self._front.hold(True)
                else:
                    self._whole = False
                    self._kept = []
        if connection is not None:
            connection.write(data)

    def _headers(self, head: AnswerHead) -> list[Header]:
        assert self._route is not None
        assert self._lease is not None
        upgrade = head.upgrade if head.status == 101 else b""
        fields = self._inlet.back(head, self._route.port, self.request_id, self._lease, upgrade)
        if self._search is not None and self._search.timed:
            fields.append((b"server-timing", self._timing()))
        return fields

    def _timing(self) -> bytes:
        """Server-Timing (W3C), in milliseconds: what looking up, waiting and connecting took, and all of it."""
        assert self._search is not None
        assert self._lease is not None
        phases = self._search.phases | self._lease.phases | {"first-byte": self.first - self.begun}
        at = "edge" if self._inlet.edge else "worker"
        return ", ".join(f"{at}-{name};dur={seconds * 1000:.3f}" for name, seconds in phases.items()).encode()

    def _redirect(self) -> None:
        location = b"https://" + self._request.host.encode() + self._request.target
        self._answer(301, [(b"location", location), (b"content-length", b"0")], b"")

    def _refuse(self, refusal: Refused) -> None:
        self._answer(*self._inlet.refusal(refusal, self.request_id))

    def _answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """An answer of the proxy's own."""
        self.status = status
        self._answered = True
        if self._request.method == b"HEAD":
            body = b""
        self.bytes = len(body)
        self._front.answer(status, b"", headers, len(body))
        if body:
            self._front.data(body)
        self._finish()
        self._front.end(())

    def _leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _finish(self) -> None:
        self.over = True
        self._kept = []
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        self._engine.done(self)

    def _tunnelled(self, sent: int, received: int) -> None:
        self.bytes += sent
        self._engine.counters.tunnels -= 1
        self._finish()


class _NotThere(Exception):
    def __init__(self, how: Failure, problem: str) -> None:
        super().__init__(problem)
        self.how = how
        self.problem = problem


def _failure(reason: bytes) -> Failure:
    """What `hawker-elsewhere` says."""
    known: dict[bytes, Failure] = {b"refused": "refused", b"reset": "reset", b"timeout": "timeout"}
    return known.get(reason, "elsewhere")


_ASIDE_BYTES = 64 << 10
"""Of an answer that is not passed on: what is read so that its connection can be used again."""
_IDEMPOTENT = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"))

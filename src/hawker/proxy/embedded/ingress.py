"""How requests of a connection come in: from users at a public port, or from another proxy over the backhaul.

An ingress says where a request belongs and what becomes of its fields, both ways. Each connection has one.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from hawker.core.forwarding import (
    REQUEST_ID,
    Edge,
    inner_answer,
    inner_request,
    unavailable,
    wishes_of,
    without_overruled,
)
from hawker.core.preface import Way
from hawker.core.trusted import Told
from hawker.proxy.base import ANY, Header, Lease, Refused, Route, ServicePort, Wishes
from hawker.proxy.embedded import refusals
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.heads import AnswerHead, RequestHead
from hawker.proxy.fields import ANYWHERE, APP, ELSEWHERE, HOPS, LOAD, MACHINE, PORT, SENT, TIMING, TOKEN, WAIT

VERSIONS = (b"1.0", b"1.1", b"2")
"""Versions of HTTP as Via has them, by the `minor` of a head."""


class Handed(msgspec.Struct, frozen=True):
    """A request that `machine` has handed on before it came here, by fields of its answer or by JSON."""

    machine: str
    fields: list[Header]
    body: bytes | None


class Ingress(Protocol):
    """Where requests of one connection come in. What few of them do has a usual way here."""

    __slots__ = ()
    client: bytes
    """The address that the connection comes from."""
    secure: bool
    """The client's connection is encrypted."""
    edge: bool
    """Users' requests come here: answers may be for this proxy (`fly-replay`)."""
    hears: bool
    """Whether the client understands interim answers. One that does not gets only the one that it needs: to go on."""
    until: float
    """How long the request found last may be held, by the loop's clock, as another proxy says."""
    sent: int
    """How many machines have got something of the request before it came here."""

    def request_id(self, request: RequestHead) -> bytes: ...

    def find(self, request: RequestHead) -> Route | None:
        """Does the same as `Router.find`."""
        ...

    async def load(self, request: RequestHead) -> Route: ...

    def redirects(self, request: RequestHead, port: ServicePort) -> bytes:
        """The host that the request is to be made to again over TLS; b"": it is not. Raises `Refused` where HTTP is not
        served at all."""
        return b""

    def wishes(self, request: RequestHead) -> Wishes:
        """The wishes of a request whose head has `wishes`."""
        return wishes_of(request.headers)

    def handed(self, request: RequestHead) -> Handed | None:
        """What a machine said that handed the request on before it came here."""
        return None

    def forward(
        self, request: RequestHead, request_id: bytes, lease: Lease, wishes: Wishes, upgrade: bytes
    ) -> list[Header]:
        """The request's fields as the machine gets them."""
        ...

    def interim(self, head: AnswerHead) -> list[Header]:
        """The fields of a 1xx answer as the client gets them."""
        return inner_answer(head.headers)

    def back(
        self, head: AnswerHead, port: ServicePort, request_id: bytes, lease: Lease, upgrade: bytes
    ) -> list[Header]:
        """The answer's fields as the client gets them."""
        ...

    def answer_lines(self, head: AnswerHead, port: ServicePort, request_id: bytes) -> Sequence[bytes] | None:
        """The same fields as lines of HTTP/1.1, in pieces, where that is quicker."""
        return None

    def refusal(self, refusal: Refused, request_id: bytes) -> tuple[int, list[Header], bytes]:
        """Status, fields and body of an answer of the proxy's own."""
        ...


class _Told(Refused):
    """This proxy itself has the answer."""

    def __init__(self, told: bytes) -> None:
        super().__init__(200, "", "")
        self.told = told


class PublicIngress(Ingress):
    """A user's connection to a public port. `app` is whose certificate the connection was made by, "" for none: a
    request for another app would go past that app's own choice of TLS, and past whoever looks at names on the way."""

    __slots__ = (
        "_app",
        "_context",
        "_edge",
        "_https",
        "_of_old",
        "_peer",
        "_port",
        "_told",
        "client",
        "edge",
        "secure",
    )

    _version = b"1.1"
    hears = True
    until: float = math.inf
    sent: int = 0

    def __init__(self, context: PlaneContext, port: int, client: bytes, secure: bool, app: str = "") -> None:
        self.client = client
        self._app = app
        self.secure = secure
        self._https = secure
        self._peer = client
        self._told: Told | None = None
        self.edge = True
        self._context = context
        self._port = port
        self._edge = self._edge_of(self._version)
        self._of_old: Edge | None = None

    def request_id(self, request: RequestHead) -> bytes:
        return self._context.next_id()

    def find(self, request: RequestHead) -> Route | None:
        if request.method == b"CONNECT":
            raise Refused(405, "PH01", "this proxy makes no tunnels")
        if request.target[:13] == b"/.well-known/" and self._context.challenges is not None and not self.secure:
            answer = self._context.challenges.answer(request.host, request.target)
            if answer is not None:
                raise _Told(answer)
        route = self._context.router.find(self._port, request.host)
        return route if route is None else self._same(route)

    async def load(self, request: RequestHead) -> Route:
        return self._same(await self._context.router.load(self._port, request.host))

    def _same(self, route: Route) -> Route:
        if self._app and route.app != self._app:
            why = "this connection of TLS was made for another app; make one for the name that is asked for"
            raise Refused(421, "PH05", why)  # RFC 9110, 15.5.20: clients do so by themselves
        return route

    def redirects(self, request: RequestHead, port: ServicePort) -> bytes:
        if "http" not in port.handlers:
            raise Refused(404, "PR01", "this port does not speak HTTP for this app")
        if self._https:
            return b""
        if port.force_https:
            return self._host_of(request)
        if "tls" in port.handlers and not self.secure:
            raise Refused(400, "PH04", "this port speaks TLS for this app, and the request came without")
        return b""

    def _host_of(self, request: RequestHead) -> bytes:
        """The host as the user knows it, without a port: https has its own."""
        told = self._told
        if told is not None and told.host:
            return told.host if told.host[-1:] == b"]" else told.host.rpartition(b":")[0] or told.host
        return request.host.encode()

    def _heed(self, request: RequestHead, peer: bytes) -> None:
        """Read who asks, and how, from a request that a trusted proxy brings. Where it says nothing, it is the one who
        asks."""
        told = self._context.trusted.told(peer, request.headers)
        if told != self._told or peer != self._peer:
            self._told, self._peer, self._of_old = told, peer, None
            self.client = told.client
            self._https = told.proto == b"https" if told.proto else self.secure
            self._edge = self._edge_of(self._version)

    def _edge_of(self, version: bytes) -> Edge:
        told = self._told
        scheme = b"https" if self._https else b"http"
        region = self._context.settings.region.encode()
        return Edge(self.client, scheme, self._port, region, version, self._peer, 0 if told is None else told.port)

    def forward(
        self, request: RequestHead, request_id: bytes, lease: Lease, wishes: Wishes, upgrade: bytes
    ) -> list[Header]:
        edge = self._edge if request.minor else self._old()
        fields = edge.request(request.headers, request_id, upgrade=upgrade)
        if wishes is not ANY and ANYWHERE not in lease.headers:
            fields += unavailable(wishes, lease.machine)
        if lease.headers:
            if wishes is not ANY:
                fields = without_overruled(fields, wishes)
            fields += lease.headers
            fields.append((HOPS, b"1"))
            fields += [field for field in request.headers if field[0] == TIMING]
        return fields

    def _old(self) -> Edge:
        """What is added to requests of HTTP/1.0, which are rare."""
        if self._of_old is None:
            self._of_old = self._edge_of(b"1.0")
        return self._of_old

    def back(
        self, head: AnswerHead, port: ServicePort, request_id: bytes, lease: Lease, upgrade: bytes
    ) -> list[Header]:
        version = VERSIONS[head.minor]
        return self._context.answer_of(port).fields(head.headers, request_id, version=version, upgrade=upgrade)

    def answer_lines(self, head: AnswerHead, port: ServicePort, request_id: bytes) -> Sequence[bytes] | None:
        passed = head.passed
        if passed is None or passed[0] is not port:
            rules = self._context.answer_of(port)
            version = VERSIONS[head.minor]
            lines = b"\r\n".join(map(b": ".join, rules.fields(head.headers, request_id, version=version)))
            around = lines.split(request_id)
            if len(around) != 2:
                return (lines,)  # there is no place for the id, or the machine wrote it, too
            passed = head.passed = port, around[0], around[1]
        return passed[1], request_id, passed[2]

    def refusal(self, refusal: Refused, request_id: bytes) -> tuple[int, list[Header], bytes]:
        if isinstance(refusal, _Told):
            length = b"%d" % len(refusal.told)
            return 200, [(b"content-type", b"application/octet-stream"), (b"content-length", length)], refusal.told
        fields, body = refusals.answer(refusal, self._context.settings.name, request_id)
        return refusal.status, fields, body


class ForwardedIngress(PublicIngress):
    """A connection of a trusted proxy, on which requests of many users come, one after another."""

    __slots__ = ()

    def request_id(self, request: RequestHead) -> bytes:
        self._heed(request, self._peer)
        return super().request_id(request)

    def _same(self, route: Route) -> Route:
        """It does not matter whose certificate the trusted proxy has seen."""
        return route


class BackhaulIngress(Ingress):
    """Another proxy's connection. One that does not have the cluster's token is told nothing."""

    __slots__ = (
        *("_app", "_context", "_hops", "_machine", "_port", "_token", "client", "edge", "secure", "sent", "until"),
    )

    hears = True

    def __init__(self, context: PlaneContext, client: bytes) -> None:
        self.client = client
        self.secure = False
        self.edge = False
        self._context = context
        self._token = context.settings.token.encode()
        self._app = self._machine = ""
        self._port = self._hops = self.sent = 0
        self.until = math.inf

    def request_id(self, request: RequestHead) -> bytes:
        """The id that the edge gave it."""
        for name, value in request.headers:
            if name == REQUEST_ID:
                return value
        return self._context.next_id()

    def find(self, request: RequestHead) -> Route | None:
        token = app = port = machine = b""
        hops = b"1"
        sent = b"0"
        wait = None
        for name, value in request.headers:
            if name[:7] == b"hawker-":
                if name == TOKEN:
                    token = value
                elif name == APP:
                    app = value
                elif name == PORT:
                    port = value
                elif name == MACHINE:
                    machine = value
                elif name == HOPS:
                    hops = value
                elif name == WAIT:
                    wait = value
                elif name == SENT:
                    sent = value
        if not self._token or not hmac.compare_digest(token, self._token):
            raise Refused(401, "PB01", "this is for proxies of the cluster")
        try:
            self._hops, self.sent, number = int(hops), int(sent), int(port)
            self.until = math.inf if wait is None else self._context.now() + int(wait) / 1000
        except ValueError:
            raise Refused(400, "PB02", "hawker-port, -hops, -wait and -sent are numbers") from None
        if self._hops > self._context.settings.hops:
            raise Refused(508, "PB03", f"this request went through {self._hops} proxies already")
        self._machine = machine.decode("latin-1")
        return self._context.router.inner(app.decode("latin-1"), number, self._machine)

    async def load(self, request: RequestHead) -> Route:
        raise NotImplementedError  # `inner` always finds a route

    def forward(
        self, request: RequestHead, request_id: bytes, lease: Lease, wishes: Wishes, upgrade: bytes
    ) -> list[Header]:
        fields = inner_request(request.headers, upgrade=upgrade)
        if wishes is not ANY and not self._machine:
            fields += unavailable(wishes, lease.machine)
        if lease.headers:
            fields += lease.headers
            fields.append((HOPS, b"%d" % (self._hops + 1)))
            fields += [field for field in request.headers if field[0] == TIMING]
        return fields

    def back(
        self, head: AnswerHead, port: ServicePort, request_id: bytes, lease: Lease, upgrade: bytes
    ) -> list[Header]:
        fields = inner_answer(head.headers, upgrade=upgrade)
        load = lease.load
        if load:
            fields.append((LOAD, load))
        return fields

    def refusal(self, refusal: Refused, request_id: bytes) -> tuple[int, list[Header], bytes]:
        """The answer says so where another proxy may try elsewhere: `refused` before a byte was sent, `reset` or
        `timeout` when the machine may have acted."""
        fields, body = refusals.answer(refusal, self._context.settings.name, request_id)
        reason = _ELSEWHERE.get(refusal.code)
        if reason is None:
            return refusal.status, fields, body
        fields.append((ELSEWHERE, reason))
        return 421, fields, body


_ELSEWHERE = {
    "elsewhere": b"elsewhere",
    **{code: failure.encode() for failure, (_, code, _) in refusals.OF_FAILURES.items()},
}


def way_of(transport: asyncio.Transport) -> Way:
    """The addresses that a connection comes from, and was made to."""
    ends = (transport.get_extra_info(name) or ("", 0) for name in ("peername", "sockname"))
    (source, source_port), (target, target_port) = (end[:2] for end in ends)
    return Way((source, source_port), (target, target_port))


def client_of(way: Way) -> bytes:
    """The address that a client comes from; an IPv4 address that is mapped into IPv6 as the IPv4 one."""
    return way.source[0].removeprefix("::ffff:").encode()

"""Serves the requests that HAProxy hands to the embedded plane, because they need a decision."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence

from hawker.core.forwarding import REQUEST_ID, inner_request
from hawker.proxy.base import Header, Lease, Refused, Route, ServicePort, Wishes
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.heads import AnswerHead, RequestHead
from hawker.proxy.embedded.ingress import Handed, PublicIngress
from hawker.proxy.fields import HANDED, HOPS

CLIENT = b"hawker-client"
"""HAProxy says in this field where the user comes from, and takes off what users say there. Over TLS the version of
HTTP that the user speaks and the server name of TLS come after it."""

Answered = Callable[[int, str, bytes, Route], None]
"""A machine has answered a user: public port, host, method, route."""


class ActivatorIngress(PublicIngress):
    """A connection of HAProxy's, on which requests of many users come.

    Most requests are as their users wrote them, but for `hawker-client`. Those without that field were on their way to
    a machine, with all that an edge adds, when it refused the connection, or was full. Those with `hawker-handed`,
    which HAProxy takes off what users say, were at a machine that handed them on.

    When HAProxy reads an interim answer and the next answer at once, it takes the next one for one without a body: it
    loses what comes later of it, and tells the end as if nothing were missing (haproxy#2587, haproxy#3209; 2.6 to 3.3).
    """

    hears = False
    __slots__ = ("_answered", "_host", "_method", "_name", "_passed", "_route", "_trusting", "_version")

    def __init__(self, context: PlaneContext, port: int, answered: Answered, *, secure: bool = False) -> None:
        self._version = b"1.1"
        super().__init__(context, port, b"", secure)
        self._name = ""
        self._answered = answered
        self._host = ""
        self._method = b""
        self._route: Route | None = None
        self._passed = False
        self._trusting = bool(context.trusted)

    def request_id(self, request: RequestHead) -> bytes:
        client = request_id = b""
        for name, value in request.headers:
            if name == CLIENT:
                client = value
            elif name == REQUEST_ID:
                request_id = value
            elif name == b"fly-client-ip" and not client:
                client = value
        client, _, more = client.removeprefix(b"::ffff:").partition(b" ")
        version, _, name = more.partition(b" ")
        self._name = name.decode("latin-1")
        version = version or b"1.1"
        self._passed = not any(name == CLIENT for name, _ in request.headers)
        self._host, self._method, self._route = request.host, request.method, None
        if self._trusting and not self._passed and client in self._context.trusted:
            if version != self._version:
                self._version, self._told = version, None
            self._heed(request, client)
        elif client != self.client or self._told is not None or version != self._version:
            self.client = self._peer = client
            self._told = self._of_old = None
            self._https = self.secure
            self._version = version
            self._edge = self._edge_of(self._version)
        return request_id if self._passed and request_id else self._context.next_id()

    def find(self, request: RequestHead) -> Route | None:
        self._app = ""
        self._route = super().find(request)
        if self._name not in ("", request.host):
            self._route = None  # it must be known, too, whose the other name is
        return self._route

    async def load(self, request: RequestHead) -> Route:
        if self._name not in ("", request.host):
            self._app = await self._app_of(self._name)
        self._route = await super().load(request)
        return self._route

    async def _app_of(self, name: str) -> str:
        router = self._context.router
        try:
            return (router.find(self._port, name) or await router.load(self._port, name)).app
        except Refused:
            return "-"

    def handed(self, request: RequestHead) -> Handed | None:
        said = next((value for name, value in request.headers if name == HANDED), None)
        if said is None or self._passed:
            return None
        machine, _, rest = said.decode("latin-1").partition(" ")
        kind, _, coded = rest.partition(" ")
        try:
            text = base64.b64decode(coded, validate=True)
        except binascii.Error:
            return None
        if kind == "json":
            return Handed(machine, [], text)
        lines = (line.partition(b":") for line in text.split(b"\n") if line)
        fields = [(name, value.strip()) for name, _, value in lines]
        return Handed(machine, fields, None) if any(name == b"fly-replay" for name, _ in fields) else None

    def forward(
        self, request: RequestHead, request_id: bytes, lease: Lease, all_hosts: Wishes, upgrade: bytes
    ) -> list[Header]:
        if not self._passed:
            return super().forward(request, request_id, lease, all_hosts, upgrade)
        fields = inner_request(request.headers, upgrade=upgrade)
        if lease.headers:
            fields += lease.headers
            fields.append((HOPS, b"1"))
        return fields

    def back(
        self, head: AnswerHead, port: ServicePort, request_id: bytes, lease: Lease, upgrade: bytes
    ) -> list[Header]:
        self._tell()
        return super().back(head, port, request_id, lease, upgrade)

    def answer_lines(self, head: AnswerHead, port: ServicePort, request_id: bytes) -> Sequence[bytes] | None:
        self._tell()
        return super().answer_lines(head, port, request_id)

    def _tell(self) -> None:
        if self._route is not None:
            self._answered(self._port, self._host, self._method, self._route)

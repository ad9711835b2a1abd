"""Serves plain TCP services: a client's connection whose bytes go to a machine as they come.

It is an exchange like any other, as if the client had asked for a connection by CONNECT. So it waits for a machine that
wakes, is tried elsewhere, and passes over the backhaul, where it is a CONNECT.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import cast

from hawker.core.preface import Way, write_preface
from hawker.proxy.base import Header, Lease, Refused, Route, ServicePort, Wishes
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.heads import AnswerHead, RequestHead
from hawker.proxy.embedded.ingress import Ingress, client_of, way_of
from hawker.proxy.embedded.tunnel import keep_watch
from hawker.proxy.fields import HOPS


class TcpConnection(asyncio.Protocol):
    """A client at the public port `port`. `host` is the name by which TLS told its app, "" where the port is one app's;
    `early` is what was read of it already. `way` is what a load balancer has told of it.

    What the client sends before a machine is there is kept, as much as there is room for: only by reading does the
    proxy see that the client has left, and then it holds nothing and starts no machine for it."""

    def __init__(
        self, context: PlaneContext, port: int, host: str = "", early: bytes = b"", way: Way | None = None
    ) -> None:
        self._context = context
        self._port = port
        self._host = host
        self._early = early
        self._told = way
        self._way: Way
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._deadline = Deadline(context.loop, self.abort)

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    def drain(self, *, patiently: bool = False) -> None:
        """Nothing: it waits for a machine, and may go on."""

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        keep_watch(transport, self._context.settings.gone_s)
        self._context.came(self, transport)
        self._way = self._told or way_of(transport)
        target = b"service:%d" % self._port
        request = RequestHead(b"CONNECT", target, 1, [(b"host", target)])
        ingress = TcpIngress(self._context, self._port, client_of(self._way), self._host)
        self._exchange = Exchange(self._context, self, ingress, request)
        self._exchange.start()

    def data_received(self, data: bytes) -> None:
        self._early += data
        if len(self._early) > self._context.settings.head_bytes:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """A client that has said nothing while it is held has left. Another one may still listen, as with HTTP, for as
        long."""
        exchange = self._exchange
        listens = self._early or (exchange is not None and exchange.placed)
        if not (listens and self._transport.can_write_eof()):
            return False
        self._transport.pause_reading()  # the tunnel sees it when it reads on
        self._deadline.within(self._context.settings.half_closed_s)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._context.left(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone()

    # --- the exchange's front ----------------------------------------------------------------------------------------

    def interim(self, status: int, headers: Sequence[Header]) -> None:
        pass

    def answer(self, status: int, reason: bytes, headers: list[Header], length: int) -> None:
        pass

    def answer_lines(self, status: int, reason: bytes, lines: Sequence[bytes], length: int) -> None:
        pass

    def data(self, data: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def end(self, trailers: Sequence[Header]) -> None:
        self.cut()

    def cut(self) -> None:
        """Nobody takes the connection, and an unknown protocol has no way to say so."""
        self._exchange = None
        self._transport.abort()

    def switch(self, status: int, reason: bytes, headers: list[Header]) -> tuple[asyncio.Transport, bytes]:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        assert exchange.port is not None
        self._deadline.close()
        self._context.left(self)
        version = exchange.port.proxy_protocol
        return self._transport, (write_preface(version, self._way) if version else b"") + self._early

    def hold(self, held: bool) -> None:
        pass


class TcpIngress(Ingress):
    """The ingress of plain TCP at a public port: of clients that asked for the name `host`, if they ask for names."""

    __slots__ = ("_context", "_host", "_port", "client", "edge", "secure")
    hears = False
    until: float = math.inf
    sent: int = 0

    def __init__(self, context: PlaneContext, port: int, client: bytes, host: str = "") -> None:
        self.client = client
        self.secure = False
        self.edge = False
        self._context = context
        self._port = port
        self._host = host

    def request_id(self, request: RequestHead) -> bytes:
        return self._context.next_id()

    def find(self, request: RequestHead) -> Route | None:
        return self._context.router.find(self._port, self._host)

    async def load(self, request: RequestHead) -> Route:
        return await self._context.router.load(self._port, self._host)

    def forward(
        self, request: RequestHead, request_id: bytes, lease: Lease, wishes: Wishes, upgrade: bytes
    ) -> list[Header]:
        return [*request.headers, *lease.headers, (HOPS, b"1"), (b"fly-request-id", request_id)]

    def back(
        self, head: AnswerHead, port: ServicePort, request_id: bytes, lease: Lease, upgrade: bytes
    ) -> list[Header]:
        return []

    def refusal(self, refusal: Refused, request_id: bytes) -> tuple[int, list[Header], bytes]:
        return refusal.status, [], b""

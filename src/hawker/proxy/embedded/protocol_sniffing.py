"""Sees by a new connection's first bytes what it speaks, and decides who carries it from then on.

    TLS hello ----> the app by its server name --> handshake --> HTTP/2 or HTTP/1.1 by ALPN, or bytes
    PRI * HTTP/2.0 ------------------------------------------> HTTP/2
    SSLRequest ---> "S" --> TLS hello ...                       (PostgreSQL)
    anything else -------------------------------------------> HTTP/1.1

On a port that one app has to itself, its service says before the first byte whether there is anything to look for: in
many protocols the server speaks first.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Coroutine
from typing import Any, cast

from hawker.core.client_hello import HANDSHAKE, BadHello, ClientHello, read_hello
from hawker.core.preface import BadPreface, Way, read_preface
from hawker.proxy.base import Refused, Route, ServicePort
from hawker.proxy.certificates import Certificate
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.context import PlaneContext, peer_of
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.h2_client import H2Connection
from hawker.proxy.embedded.ingress import ForwardedIngress, PublicIngress, client_of
from hawker.proxy.embedded.tcp import TcpConnection

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
UNRECOGNIZED_NAME, PROTOCOL_VERSION, DECODE_ERROR, ACCESS_DENIED = 112, 70, 50, 49
"""Descriptions of alerts."""
NUMBERS = {"TLSv1.2": 0x303, "TLSv1.3": 0x304}
_SPOKEN = ("h2", "http/1.1", "http/1.0")

_PG_TLS, _PG_GSS = b"\x00\x00\x00\x08\x04\xd2\x16\x2f", b"\x00\x00\x00\x08\x04\xd2\x16\x30"
_OF_NOBODY = ServicePort(handlers=("tls", "http"))


class ProtocolSniffer(asyncio.Protocol):
    """A connection at the public port `port`, until it is known whose it is. `own`: the port is one app's alone.
    `behind`: it comes from a program of this host, which first tells where it comes from."""

    def __init__(self, context: PlaneContext, port: int, *, own: bool = False, behind: bool = False) -> None:
        self._context = context
        self._port = port
        self._own = own
        self._transport: asyncio.Transport
        self._deadline = Deadline(context.loop, self.abort)
        self._held = b""
        self._postgres = False
        self._behind = behind
        self._preface = behind  # a load balancer tells first where the connection comes from
        self._way: Way | None = None
        self._task: asyncio.Task[None] | None = None
        self._landing: _Landing | None = None

    @property
    def busy(self) -> bool:
        return False

    def drain(self, *, patiently: bool = False) -> None:
        """It has asked for nothing yet."""
        if not patiently:
            self.abort()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        self._context.came(self, transport)
        self._deadline.within(self._context.settings.head_timeout_s)
        if self._port in self._context.settings.proxy_protocol and not self._behind:
            self._preface = peer_of(transport) in self._context.trusted
        if self._own and not self._preface:
            self._begin(self._whose())

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._preface:
            self._read_preface()
        elif self._task is None:
            self._look()
        else:  # a loop may read once although it was told not to when the connection was made
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._context.left(self)
        if self._task is not None and self._landing is None:
            self._task.cancel()

    # --- what it is --------------------------------------------------------------------------------------------------

    def _read_preface(self) -> None:
        try:
            found = read_preface(self._held)
        except BadPreface:
            self.abort()  # nobody knows whom it is for, nor can say so to the client
            return
        if found is None:
            return
        self._preface = False
        self._way, size = found
        self._held = self._held[size:]
        if self._own:
            self._begin(self._whose())
        elif self._held:
            self._look()

    def _look(self) -> None:
        held = self._held
        if held[0] == HANDSHAKE:
            try:
                hello = read_hello(held)
            except BadHello:
                self._alert(DECODE_ERROR)
                return
            if hello is not None:
                self._begin(self._secured(hello))
        elif held[0] == 0 and _PG_TLS.startswith(held[:7]):
            if len(held) >= 8:
                self._asked_by_postgres()
        elif held[0] == 0x50 and H2_PREFACE.startswith(held[:24]):
            if len(held) >= 24:
                carrier = H2Connection(self._context, self._port, secure=False, way=self._way)
                self._become(carrier, self._transport, held)
        else:
            self._become(self._http1(secure=False), self._transport, held)

    def _asked_by_postgres(self) -> None:
        """PostgreSQL 17, 54.2.10 and 54.2.11: the server answers with a byte, and TLS begins."""
        held, self._held = self._held, b""
        if self._postgres or len(held) > 8 or held not in (_PG_TLS, _PG_GSS):
            self.abort()  # bytes before TLS, which would be taken for what came through it (CVE-2021-23222)
        elif held == _PG_GSS:
            self._transport.write(b"N")
        else:
            self._postgres = True
            self._transport.write(b"S")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._transport.pause_reading()
        self._task = self._context.spawn(work)

    async def _whose(self) -> None:
        """Ask what the service of the app speaks that has this port to itself."""
        route = await self._route("")
        self._task = None
        if route is None:
            self.abort()
        elif _carries_bytes(route.port):
            carrier = TcpConnection(self._context, self._port, early=self._held, way=self._way)
            self._become(carrier, self._transport, b"")
        else:
            self._transport.resume_reading()
            if self._held:
                self._look()

    async def _secured(self, hello: ClientHello) -> None:
        """Find whose certificate TLS is to be opened with, or that this proxy is not to open it."""
        context = self._context
        host = "" if self._own else hello.name
        route = await self._route(host)
        port = _OF_NOBODY if route is None else route.port
        if route is not None and _carries_bytes(port):
            self._become(TcpConnection(context, self._port, host, self._held, self._way), self._transport, b"")
            return
        if self._postgres and "pg_tls" not in port.handlers:
            self._alert(ACCESS_DENIED)
            return
        certificate = None
        if not self._own or await self._is_of(hello.name, route):
            certificate = await self._certificate(hello.name, route)
        if certificate is None:
            context.counters.handshakes_failed += 1
            self._alert(UNRECOGNIZED_NAME)
            return
        if all(hello.newest < number for number in map(NUMBERS.__getitem__, port.tls_versions)):
            context.counters.handshakes_failed += 1
            self._alert(PROTOCOL_VERSION)  # asyncio's own such answers reach nobody
            return
        transport = await self._handshake(certificate, port)
        landing = self._landing
        if transport is None or landing is None or landing.lost:
            return
        carrier: asyncio.Protocol
        if "http" not in port.handlers:
            carrier = TcpConnection(context, self._port, host, landing.data, self._way)
            landing.data = b""
        elif transport.get_extra_info("ssl_object").selected_alpn_protocol() == "h2":
            app = "" if route is None else route.app
            carrier = H2Connection(context, self._port, secure=True, app=app, way=self._way)
        else:
            carrier = self._http1(secure=True, app="" if route is None else route.app)
        self._become(carrier, transport, landing.data)
        if route is not None and isinstance(carrier, ClientConnection | H2Connection):
            context.observer.secured(carrier, self._port, host, route)

    async def _is_of(self, name: str, route: Route | None) -> bool:
        """Whether a client may name this server at a port that one app has to itself. With another app's certificate
        the app would be that one to its users, and get their cookies; and certificates would be ordered for whatever
        name anybody makes up."""
        if not name or route is None:
            return True
        named = await self._route(name)
        return named is not None and named.app == route.app

    async def _certificate(self, name: str, route: Route | None) -> Certificate | None:
        """The certificate. It may be ordered while the client waits, for an app that speaks TLS here."""
        context = self._context
        wanted = route is not None and not {"tls", "pg_tls"}.isdisjoint(route.port.handlers)
        found = None
        if context.certificates is not None:
            if wanted and context.challenges is not None and not context.certificates.covers(name):
                await context.challenges.want(name)
            found = context.certificates.find(name)
        if found is None and wanted and route is not None and route.port.self_signed:
            found = context.self_signed.find(name)
        return found

    async def _handshake(self, certificate: Certificate, port: ServicePort) -> asyncio.Transport | None:
        loop, settings = self._context.loop, self._context.settings
        alpn = [name for name in port.alpn if name in _SPOKEN] if "http" in port.handlers else port.alpn
        context = certificate.context(() if "pg_tls" in port.handlers else alpn, port.tls_versions)
        hello, self._held = self._held, b""
        self._landing = landing = _Landing(self)
        shaken: asyncio.Future[None] = loop.create_future()
        tls = _Tls(
            loop,
            landing,
            context,
            shaken,
            server_side=True,
            ssl_handshake_timeout=settings.handshake_timeout_s,
            ssl_shutdown_timeout=settings.idle_timeout_s,  # for what the client has not taken yet, too
        )
        self._transport.set_protocol(tls)
        tls.connection_made(self._transport)
        self._transport.resume_reading()
        tls.feed(hello)
        try:
            await shaken
        except OSError:  # of ssl, too
            self._context.counters.handshakes_failed += 1
            self._over()
            return None
        except asyncio.CancelledError:
            self._over()
            raise
        self._context.counters.handshakes += 1
        return landing.transport

    async def _route(self, host: str) -> Route | None:
        """The route of this name; None: nobody serves it here. Over HTTP the client is told more."""
        router = self._context.router
        try:
            return router.find(self._port, host) or await router.load(self._port, host)
        except Refused:
            return None

    # --- and then ----------------------------------------------------------------------------------------------------

    def _http1(self, *, secure: bool, app: str = "") -> ClientConnection:
        """A connection of HTTP/1. Over TLS it was made for `app`."""
        context, port, way = self._context, self._port, self._way

        def ingress(transport: asyncio.Transport) -> PublicIngress:
            client = peer_of(transport) if way is None else client_of(way)
            kind = ForwardedIngress if client in context.trusted else PublicIngress
            return kind(context, port, client, secure, app)

        return ClientConnection(context, ingress)

    def _become(self, carrier: asyncio.Protocol, transport: asyncio.Transport, data: bytes) -> None:
        """Hand the connection over: everything from here on is the carrier's."""
        self._over()
        if transport.is_closing():
            return
        transport.set_protocol(carrier)
        transport.resume_reading()
        carrier.connection_made(transport)
        if data:
            carrier.data_received(data)

    def _alert(self, description: int) -> None:
        """End it as TLS says it, before the handshake (RFC 8446, 6)."""
        self._transport.write(b"\x15\x03\x03\x00\x02\x02%c" % description)
        self._transport.close()

    def _over(self) -> None:
        self._deadline.close()
        self._context.left(self)


class _Tls(SSLProtocol):
    """TLS as `loop.start_tls` makes it, but for a client whose hello was read already, and that may be idle for long:
    else the buffer for what comes is 256 KiB, all of it in memory."""

    max_size = 32 << 10

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        landing: _Landing,
        context: ssl.SSLContext,
        shaken: asyncio.Future[None],
        **more: Any,
    ) -> None:
        super().__init__(loop, landing, context, shaken, **more)
        self._shaken = shaken

    def feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            buffer = memoryview(self.get_buffer(len(rest)))
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            self.buffer_updated(count)
            rest = rest[count:]

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self._shaken.done():
            self._shaken.set_exception(ConnectionResetError("the client went away"))


class _Landing(asyncio.Protocol):
    """Takes what a new connection of TLS brings in the moment before it is known who carries it."""

    transport: asyncio.Transport

    def __init__(self, sniffer: ProtocolSniffer) -> None:
        self._sniffer = sniffer
        self.data = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._sniffer._over()


def _carries_bytes(port: ServicePort) -> bool:
    """Whether this proxy reads nothing of it: a shared port then passes on even what TLS hides."""
    return not {"http", "tls", "pg_tls"}.intersection(port.handlers)

"""Serving an application: uvicorn's HTTP protocol on a server of the running event loop.

uvicorn's own server brings signals, lifespans and a polling loop that an agent does not need; what it does with a
connection is in its protocol class, which is all we use. So live and in the simulation the same bytes take the same
path, only the loop's `create_server` differs. uvicorn waits for the head of a request for ever and takes any amount of
it, from anybody: nobody has shown a token until then. Here both have an end, as have the bodies that nobody reads, and
the number of connections.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from hawker.core.connection_limits import ConnectionLimits, shares
from hawker.host import Host
from hawker.listening import LOT, close_gently, let_wait

BACKLOG = 1024
DRAIN_S = 3.0
"""Requests that still run at shutdown, such as long waits, are cut off after this."""
KEEP_ALIVE_S = 75
HEAD_S = 60.0
"""The server closes a connection whose request head takes longer than this."""
HEAD_BYTES_MAX = 256 << 10
"""A head that has not ended may have so many bytes, since a query of the catalog may stand in its path. A head that
came whole came within one read, which has fewer."""
BODY_S = 60.0
BODY_LEAST = 16 << 10
"""So many bytes of a request's body have to come within `BODY_S`, unless it ends before. The proxy asks for the same
rate."""
LINGER_S = 2.0
"""After an answer to a request whose body is still on its way, the server drops for so long what comes, so that the
answer arrives. Then it ends the connection, which a client without a token could otherwise keep for ever by sending a
byte now and then."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LOOK_S = 0.02
_LOOKED_AFTER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""A client that follows the log of a quiet machine may vanish without a word, as a laptop does that is closed. The
server notices that after two minutes; by the system's own settings it would take two hours."""


class Server:
    """One listening address. Open with `serve`."""

    def __init__(self, app: ASGIApp, host: Host, limits: ConnectionLimits | None = None) -> None:
        self._host = host
        self._config = Config(
            app,
            interface="asgi3",
            http="httptools",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = _State(host)
        # uvicorn keeps its connections and tasks in sets. They are closed in the order in which they came instead.
        self._state.connections = _Ordered()  # type: ignore[assignment]
        self._state.tasks = _Ordered()  # type: ignore[assignment]
        self.limits = limits or api_limits()
        self._server: asyncio.Server | None = None

    async def open(self, at: socket.socket | tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(at, tuple):
                self._server = await loop.create_server(self.protocol, *at, backlog=LOT)
            else:
                self._server = await loop.create_server(self.protocol, sock=at, backlog=LOT)
            let_wait(self._server, BACKLOG)
            self._host.listening.keep(self._server)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Take no more connections, let requests end, cut off those that take longer than `DRAIN_S`. May be called
        again."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await close_gently([server])
        state = self._state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(DRAIN_S):
                while state.connections or state.tasks:  # noqa: ASYNC110  # uvicorn gives nothing to wait for
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            for task in list(state.tasks):
                task.cancel()
            for connection in list(state.connections):
                connection.transport.abort()

    def answer(self, app: ASGIApp) -> None:
        """From the next request on, of any connection, `app` answers."""
        self._config.loaded_app = app

    def protocol(self) -> HttpToolsProtocol:
        """What serves one connection. A test may give it a transport of its own."""
        return _Protocol(self._config, self._state, self.limits)


class _State(ServerState):
    """What the connections of a server share. The Date header is made when an answer needs one, once a second at most:
    an agent that nobody asks does not wake for it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._second = -1
        self._headers = list[tuple[bytes, bytes]]()
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        second = self._host.now_ms() // 1000
        if second != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """uvicorn sets its default, an empty list, which is not kept."""


class _Protocol(HttpToolsProtocol):
    _head_bytes = 0
    _heads = 0  # begun
    _in_head = True  # also before the first one
    _ends: asyncio.TimerHandle | None = None
    """When the head that is awaited, or some more of the body, has to be there."""
    _body_bytes = 0  # since `_ends` was set
    _lingers = False
    _counted = ""
    _problem = ""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answer = _Answer(transport, self.loop)
        address = self.client[0] if self.client else "?"
        if not self._limits.enter(address):
            transport.abort()
            return
        self._counted = address
        if (sock := transport.get_extra_info("socket")) is not None:  # None: of a simulated network
            for level, option, value in _LOOKED_AFTER:
                sock.setsockopt(level, option, value)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted:
            self._limits.leave(self._counted)
        self._awaited()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        heads = self._heads
        super().data_received(data)
        if self._lingers or self.transport.is_closing():
            return
        if not self._in_head:
            if self._ends is None and self.cycle.more_body:
                self._await_body()
            return
        # What ends the request before it may have come with this; it is not counted.
        self._head_bytes += len(data) if self._heads <= max(heads, 1) else 0
        if self._head_bytes > HEAD_BYTES_MAX:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._ends is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._heads += 1
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        if sum(name == b"host" for name, _ in self.headers) > 1:
            self._problem = "The request has two Host fields."
            raise ValueError(self._problem)  # answered by `send_400_response` (RFC 9112, section 3.2)
        self._in_head = False
        self._awaited()
        self.app = self.config.loaded_app
        super().on_headers_complete()
        self.cycle.transport = self._answer  # type: ignore[assignment]  # all that a cycle asks of a transport

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaited()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answer.flush()
        super().on_response_complete()
        # Requests that wait in the pipeline came after the whole body of this one.
        if not self.pipeline and self.cycle.response_complete and self.cycle.more_body:
            self._linger()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that does not parse with an error in the API's form."""
        body = b'{"error":"%s","status":"invalid_argument"}' % (self._problem or msg).encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _linger(self) -> None:
        if self.transport.is_closing():
            return
        self._lingers = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._within(LINGER_S, self.transport.abort)

    def _await_head(self) -> None:
        self._within(HEAD_S, self.transport.abort)

    def _await_body(self) -> None:
        self._body_bytes = 0
        self._within(BODY_S, self._body_is_slow)

    def _body_is_slow(self) -> None:
        if self._body_bytes >= BODY_LEAST or self.flow.read_paused:  # paused: it waits for us
            self._await_body()
        else:
            self.transport.abort()

    def _within(self, seconds: float, then: Callable[[], None]) -> None:
        self._awaited()
        self._ends = self.loop.call_later(seconds, then)

    def _awaited(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None


class _Answer:
    """A transport on which what is written in one turn of the loop leaves in one piece. uvicorn writes the head and the
    body of an answer each by itself: two system calls, and whoever reads is woken twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Ordered(dict[Any, None]):
    """What uvicorn does with a set, in the order of adding."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def api_limits() -> ConnectionLimits:
    """The connections that the API may have, given how many descriptors this process may open."""
    most, _ = shares(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return ConnectionLimits(most)


async def serve(app: ASGIApp, at: socket.socket | tuple[str, int], host: Host) -> Server:
    """Serve on a bound socket, or on (host, port) where the loop's network is a simulation. Close the result."""
    server = Server(app, host)
    await server.open(at)
    return server

"""Serving an application: uvicorn's HTTP protocol on a server of the running event loop.

uvicorn's own server brings signals, lifespans and a polling loop that an agent does not need; what it does with a
connection is in its protocol class, which is all we use. So live and in the simulation the same bytes take the same
path, only the loop's `create_server` differs. uvicorn waits for the head of a request for ever and takes any amount of
it, from anybody: nobody has shown a token until then. Here both have an end.
"""

from __future__ import annotations

import asyncio
import socket
from email.utils import formatdate
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from hawker.host import Host
from hawker.listening import LOT, close_gently, let_wait

BACKLOG = 1024
DRAIN_S = 3.0
"""Requests that still run at shutdown, such as long waits, are cut off after this."""
KEEP_ALIVE_S = 75
HEAD_S = 60.0
"""So long a request's head may be on its way."""
HEAD_BYTES_MAX = 256 << 10
"""Of a head that has not ended yet: a query of the catalog may be in its path. A whole one counts as what came with it,
which is less than that."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LOOK_S = 0.02
_LOOKED_AFTER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Who follows the log of a machine that says nothing, and goes without a word, as a laptop does that is closed, is
noticed after two minutes. The system's own are two hours, and only for those that ask for it."""


class Server:
    """One listening address. Open with `serve`."""

    def __init__(self, app: ASGIApp, host: Host) -> None:
        self._host = host
        self._config = Config(
            app,
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
        self._state = ServerState()
        # uvicorn keeps its connections and tasks in sets. They are closed in the order in which they came instead.
        self._state.connections = _Ordered()  # type: ignore[assignment]
        self._state.tasks = _Ordered()  # type: ignore[assignment]
        self._server: asyncio.Server | None = None
        self._dating: asyncio.TimerHandle | None = None

    async def open(self, at: socket.socket | tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        self._set_date()
        try:
            if isinstance(at, tuple):
                self._server = await loop.create_server(self._protocol, *at, backlog=LOT)
            else:
                self._server = await loop.create_server(self._protocol, sock=at, backlog=LOT)
            let_wait(self._server, BACKLOG)
            self._host.listening.keep(self._server)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Take no more connections, let requests end, cut off those that take longer than `DRAIN_S`. May be called
        again."""
        if self._dating:
            self._dating.cancel()
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

    def _protocol(self) -> HttpToolsProtocol:
        return _Protocol(self._config, self._state, {}, asyncio.get_running_loop())

    def _set_date(self) -> None:
        """The Date header that answers carry, once a second."""
        now_s = self._host.now_ms() / 1000
        self._state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]
        self._dating = asyncio.get_running_loop().call_later(1.0, self._set_date)


class _Protocol(HttpToolsProtocol):
    _head_bytes = 0
    _heads = 0  # begun
    _in_head = True  # also before the first one
    _head_ends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None:  # None: of a simulated network
            for level, option, value in _LOOKED_AFTER:
                sock.setsockopt(level, option, value)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaited()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads = self._heads
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # What ends the request before it may have come with this; it is not counted.
        self._head_bytes += len(data) if self._heads <= max(heads, 1) else 0
        if self._head_bytes > HEAD_BYTES_MAX:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._head_ends is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._heads += 1
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._awaited()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_ends = self.loop.call_later(HEAD_S, self.transport.abort)

    def _awaited(self) -> None:
        if self._head_ends is not None:
            self._head_ends.cancel()
            self._head_ends = None


class _Ordered(dict[Any, None]):
    """What uvicorn does with a set, in the order of adding."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


async def serve(app: ASGIApp, at: socket.socket | tuple[str, int], host: Host) -> Server:
    """Serve on a bound socket, or on (host, port) where the loop's network is a simulation. Close the result."""
    server = Server(app, host)
    await server.open(at)
    return server

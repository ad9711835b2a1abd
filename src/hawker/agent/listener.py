"""One address where an agent serves. Requests that come before its role is open wait; members of the catalog are
answered at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from hawker.errors import HawkerError
from hawker.host import Host
from hawker.http.server import BACKLOG, Server, serve
from hawker.model.values import host_port
from hawker.services import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

Bound = socket.socket | tuple[str, int]
Bind = Callable[[str], Bound]


class Listener(Service):
    """`bind` gives the socket of an address, or an address of a simulated network."""

    def __init__(self, address: str, bind: Bind, host: Host) -> None:
        self._address = address
        self._bind = bind
        self._host = host
        self._opened = asyncio.Event()
        self._early: ASGIApp | None = None
        self._app: ASGIApp | None = None
        self._socket: socket.socket | None = None
        self._server: Server | None = None

    async def open(self) -> None:
        bound = self._bind(self._address)
        if isinstance(bound, socket.socket):
            self._socket = bound
        try:
            self._server = await serve(self._before, bound, self._host)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Answer what was asked, and take nothing more. May be called again."""
        if self._server:
            await self._server.close()
        if self._socket:
            self._socket.close()

    def answer_early(self, app: ASGIApp) -> None:
        """Have `app` answer members of the catalog while the role comes up."""
        self._early = app

    def answer(self, app: ASGIApp) -> None:
        """The role is open: `app` answers everything, what has waited first."""
        self._app = app
        self._opened.set()
        if self._server:
            self._server.answer(app)

    async def _before(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application until the role is open."""
        if self._early and scope.get("path", "").startswith("/v1/catalog/"):
            await self._early(scope, receive, send)
            return
        try:
            await self._opened.wait()
        except asyncio.CancelledError:  # it does not come up, and says why itself
            from starlette.responses import PlainTextResponse

            await PlainTextResponse("this agent does not start\n", status_code=503)(scope, receive, send)
            return
        assert self._app is not None  # set before the event
        await self._app(scope, receive, send)


def listen(address: str) -> socket.socket:
    """A listening socket for `host:port`. Raises `HawkerError` when the port is taken."""
    name, port = host_port("listen", address)
    # The protocol must be named: asyncio switches Nagle's delay off only for sockets that say they are TCP, and with it
    # every answer waits 40 ms for an acknowledgement.
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((name, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise HawkerError(f"cannot listen on {address}: {error.strerror}", hint="is another agent running?") from error
    return sock

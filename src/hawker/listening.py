"""Listening sockets that outlive the program: those that were handed to this process, and those that it may hand on.

Clients that wait in the queue of a listening socket notice only a pause while the program behind it is exchanged. The
sockets come from the program that this process ran before (`hawker.agent.restart`), or from a service manager. The
address that a socket is bound to tells what it is for.
"""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.trsock import TransportSocket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ALL = frozenset(("0.0.0.0", "::"))
LOT = 64
"""Connections that are accepted in one turn of the event loop. asyncio would accept as many as may wait; thousands that
come at once are then all read before the first one is answered, which took three times the processor's time."""


ACCEPT_FAILED = "socket.accept() out of system resource"
"""asyncio's message for a connection that it had no descriptor for. It tries again `LOT` times in the same turn and
logs a traceback each time: 4 MB of log a second."""


def tell_of_accepts_once(loop: asyncio.AbstractEventLoop, tell: Callable[[str, int], None]) -> None:
    """Report the loop's failed accepts at most once a second, as `tell(error, how many)`. The loop handles other errors
    as before."""
    failed, silent = 0, False

    def heard() -> None:
        nonlocal failed, silent
        silent = False
        if failed:
            told("and again")

    def told(error: str) -> None:
        nonlocal failed, silent
        count, failed, silent = failed, 0, True
        loop.call_later(1.0, heard)
        tell(error, count)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal failed
        if context.get("message") != ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        failed += 1
        if not silent:
            told(str(context.get("exception")))

    loop.set_exception_handler(handle)


class Listening:
    """The listening sockets of a process, as part of its `Host`. `dropped` is called with the inode of a handed-over
    socket that is closed because it is in the way; others may still have it."""

    def __init__(
        self, handed: Iterable[socket.socket] = (), dropped: Callable[[int], None] = lambda inode: None
    ) -> None:
        self._handed = list(handed)
        self._servers: dict[asyncio.AbstractServer, None] = {}
        self._dropped = dropped

    async def serve(
        self, made: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, backlog: int
    ) -> list[asyncio.Server]:
        """Servers at an address, on what was handed over for it or else on new sockets. More than one where `host` is
        a name with several addresses. Raises `OSError` when it is taken."""
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(made, sock=sock, backlog=LOT) for sock in self.take(host, port)]
        if not servers:
            servers = [await loop.create_server(made, host, port, backlog=LOT, reuse_address=True)]
        for server in servers:
            let_wait(server, backlog)
            self.keep(server)
        return servers

    def take(self, host: str, port: int) -> list[socket.socket]:
        """The handed-over sockets that listen at this address; the caller owns them from now on. If there are none,
        those that would be in the way of a new socket are closed."""
        if not self._handed or not port:
            return []
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError:
            return []  # whoever opens a socket there gets a better error
        hosts = {str(each[4][0]) for each in found}
        there = [(sock, sock.getsockname()[0]) for sock in self._handed if sock.getsockname()[1] == port]
        taken = [sock for sock, bound in there if bound in hosts or ("0.0.0.0" in hosts and _both(sock))]
        self._handed = [sock for sock in self._handed if sock not in taken]
        if not taken:
            for sock, bound in there:
                if bound in ALL or not hosts.isdisjoint(ALL):
                    self._handed.remove(sock)
                    self._drop(sock)
        return taken

    def leave(self, host: str, port: int) -> None:
        """Close the sockets handed over for this address, because another program is to listen there."""
        for sock in self.take(host, port):
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        inode = os.fstat(sock.fileno()).st_ino
        sock.close()
        self._dropped(inode)

    def keep(self, server: asyncio.AbstractServer) -> None:
        """Let the server's sockets outlive this program if they are open when it ends."""
        self._servers = {each: None for each in self._servers if _open(each)}
        self._servers[server] = None

    def close_rest(self) -> list[int]:
        """Close the handed-over sockets that nobody has taken. Returns their inodes."""
        handed, self._handed = self._handed, []
        inodes = [os.fstat(sock.fileno()).st_ino for sock in handed]
        for sock in handed:
            sock.close()
        return inodes

    def numbers(self) -> list[int]:
        """The file descriptors of all sockets that are to outlive this program. Any thread may call this."""
        return [sock.fileno() for server in list(self._servers) for sock in _open(server)]


def _both(sock: socket.socket) -> bool:
    """Whether the socket accepts connections to any address of both families, as systemd opens `ListenStream=80`."""
    if sock.family != socket.AF_INET6 or sock.getsockname()[0] != "::":
        return False
    return not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def _open(server: asyncio.AbstractServer) -> Sequence[TransportSocket]:
    """The server's open sockets; a simulated network's server has none."""
    sockets = getattr(server, "sockets", ())
    return [sock for sock in sockets if hasattr(sock, "fileno") and sock.fileno() >= 0]


def let_wait(server: asyncio.AbstractServer, backlog: int) -> None:
    """Let `backlog` connections wait for a server that was made to accept `LOT` at a time."""
    for sock in _open(server):
        with socket.socket(fileno=os.dup(sock.fileno())) as same:
            same.listen(backlog)


async def close_gently(servers: Sequence[asyncio.AbstractServer]) -> None:
    """Close servers and lose nobody. asyncio takes connections from a listening socket one turn of the loop before it
    makes anything of them, and drops those whose server was closed in between (CPython issue 109564)."""
    loop = asyncio.get_running_loop()
    for server in servers:
        for sock in _open(server):
            loop.remove_reader(sock.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    for server in servers:
        server.close()

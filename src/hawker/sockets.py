"""System calls on sockets that asyncio does not offer: `Sockets`, a part of `hawker.host.Host`.

They try whether somebody takes connections, look whether bytes lie in a socket, and set how long its peer may be
silent. A simulation has its own."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from contextlib import suppress

Address = tuple[str, int]
LAST_BYTES = 1 << 18


class Sockets:
    """The sockets of this host."""

    async def connected(self, address: Address, within_s: float) -> socket.socket | None:
        """A connection, or None if nobody takes it. For an address of this host the answer is known within the call,
        without a switch to another task."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        if not _numeric(family, address[0]):  # a name has to be resolved first
            return await self._name_connected(address, within_s)
        sock, code = _asked(family, address)
        if code == errno.EALREADY and _on_this_host(address[0]):
            with sock:  # so that the second one gets another port
                sock, code = _asked(family, address)
        try:
            if code == errno.EALREADY:
                async with asyncio.timeout(within_s):
                    await asyncio.get_running_loop().sock_connect(sock, address)
                code = 0
            if code in (0, errno.EISCONN):
                return sock
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError | TimeoutError):
                return None
            raise
        sock.close()
        return None

    async def _name_connected(self, name: Address, within_s: float) -> socket.socket | None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                for *_, found in await asyncio.get_running_loop().getaddrinfo(*name, type=socket.SOCK_STREAM):
                    if sock := await self.connected((str(found[0]), name[1]), within_s):
                        return sock
        return None

    def has_come(self, transport: asyncio.BaseTransport) -> bool:
        """Whether its socket has something that the event loop has not read: bytes, or the end of the stream."""
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def last_words(self, transport: asyncio.BaseTransport) -> bytes:
        """The unread bytes in the socket of a transport that a failed write has ended."""
        try:
            return os.read(transport.get_extra_info("socket").fileno(), LAST_BYTES)
        except OSError:
            return b""

    def guard(self, transport: asyncio.BaseTransport, seconds: float) -> None:
        """Have the system end the connection if the peer's host acknowledges neither bytes nor a probe for so long; 0
        stops that."""
        sock = transport.get_extra_info("socket")
        with suppress(OSError):  # it is closed already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, bool(seconds))
            if seconds:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(int(seconds), 1))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def _asked(family: int, address: Address) -> tuple[socket.socket, int]:
    """A socket that connects, and what became of that: EALREADY where it is not known yet.

    On this host that is an earlier connection from the same port, whose end the machine still remembers (TIME-WAIT).
    While nobody listens, the kernel answers for that one, and repeats ours only after 8 ms. Another port has its answer
    at once."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP)
    try:
        code = sock.connect_ex(address)
        return sock, sock.connect_ex(address) if code == errno.EINPROGRESS else code
    except BaseException:
        sock.close()
        raise


def _on_this_host(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _numeric(family: int, host: str) -> bool:
    try:
        socket.inet_pton(family, host.partition("%")[0])
    except OSError:
        return False
    return True

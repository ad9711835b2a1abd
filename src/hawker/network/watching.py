"""Being told when somebody else changes the host's filters: `nft flush ruleset` takes ours away, too.

The kernel announces every generation of rules and the thread that made it. A change of another's is looked at as soon
as it is seen, and no more often than `PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

from hawker.network.base import NetworkError

NETLINK_NETFILTER = 12
SOL_NETLINK, ADD_MEMBERSHIP = 270, 1
GROUP_NFTABLES = 7
NEWGEN = 10 << 8 | 15
GEN_PROC_PID = 2
PAUSE_S = 0.2
_HEADER = struct.Struct("=IHHII")


class Watch:
    """`look` is called after changes that were not made by the thread `own`. It belongs to the network namespace that
    `open` is called in."""

    def __init__(self, look: Callable[[], Awaitable[object]], own: int) -> None:
        self._look = look
        self._own = own
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen = asyncio.Event()

    def open(self) -> None:
        """Raises `OSError`."""
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, NETLINK_NETFILTER)
        try:
            made.bind((0, 0))
            made.setsockopt(SOL_NETLINK, ADD_MEMBERSHIP, GROUP_NFTABLES)
        except OSError:
            made.close()
            raise
        self._socket = made
        asyncio.get_running_loop().add_reader(made, self._read)
        self._task = asyncio.create_task(self._go_on())

    async def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _read(self) -> None:
        assert self._socket is not None
        try:
            while True:
                if changed_by_others(self._socket.recv(1 << 16), self._own):
                    self._seen.set()
        except BlockingIOError:
            pass
        except OSError:  # more was told than the socket holds
            self._seen.set()

    async def _go_on(self) -> None:
        while True:
            await self._seen.wait()
            self._seen.clear()
            with suppress(NetworkError):  # it is tried again with the next change
                await self._look()
            await asyncio.sleep(PAUSE_S)


def changed_by_others(data: bytes, own: int) -> bool:
    """Whether announcements tell of a generation that another thread made."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return True
        if kind == NEWGEN and _maker(data[at + _HEADER.size + 4 : at + length]) != own:
            return True
        at += length + 3 & ~3
    return False


def _maker(attributes: bytes) -> int:
    at = 0
    while at + 4 <= len(attributes):
        size, kind = struct.unpack_from("=HH", attributes, at)
        if size < 4:
            break
        if kind & 0x3FFF == GEN_PROC_PID and size >= 8:
            return int(struct.unpack_from(">I", attributes, at + 4)[0])
        at += size + 3 & ~3
    return 0

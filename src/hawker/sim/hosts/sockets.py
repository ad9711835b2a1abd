"""What the simulated network answers where an agent asks the system about a socket (`hawker.sockets`).

A simulation has no sockets: the end of a connection stands for one.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import cast

from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.net import LOOPBACK, Net
from hawker.sim.platform.processes import current_process
from hawker.sim.platform.streams import StreamEnd
from hawker.sockets import Address, Sockets

LOOK_S = 30e-6
"""The measured time of a connection attempt to a port of the own host."""


class SimSockets(Sockets):
    """The sockets of the host that the present process runs on."""

    async def connected(self, address: Address, within_s: float) -> socket.socket | None:
        """A connection, which the caller either closes or hands to the loop."""
        host, port = address
        station, net = current_process().station, _net()
        assert station is not None  # proxies run on hosts
        if host == LOOPBACK or net.listener(station, host, port) is not None:
            await asyncio.sleep(LOOK_S)
            return cast(socket.socket | None, net.dial_here(host, port))
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                return cast(socket.socket, await net.dial(host, port))
        await asyncio.sleep(LOOK_S)
        return None

    def has_come(self, transport: asyncio.BaseTransport) -> bool:
        return _stream(transport).has_come

    def last_words(self, transport: asyncio.BaseTransport) -> bytes:
        """Nothing, because a reset drops what was not read."""
        return b""

    def guard(self, transport: asyncio.BaseTransport, seconds: float) -> None:
        _stream(transport).guard(seconds)


def _net() -> Net:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    assert isinstance(loop.net, Net)
    return loop.net


def _stream(transport: asyncio.BaseTransport) -> StreamEnd:
    assert isinstance(transport, StreamEnd)
    return transport

"""Finds out when a machine takes connections: looks again and again, quickly at first.

A program that was just started listens after a millisecond or after a minute. Every look is a connection. The one that
is taken goes to the request that waits for it. With many machines on their way at a time, each is looked at less often.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from hawker.proxy.base import NO_UPSTREAMS, Address
from hawker.sockets import Sockets

FIRST_LOOK_S = 0.0006
"""No program listens earlier."""
AT_FIRST_S = 0.0002
"""The pause between looks at a machine that comes up alone, for the first `ALONE_S`. The event loop, whose timers go by
whole milliseconds, stands still meanwhile: a program that listens within a millisecond should not wait for another one.
A loop that looked without a pause took the processor that the program needs, and that took twice as long. With several
machines the loop goes on: 500 that wake at once kept all requests of the agent waiting for 0.36 s."""
ALONE_S = 0.0015
FIRST_S = 0.001
"""The pause between looks after that. A connection that is refused on this host costs a thirtieth of it."""
QUICK_S = 0.05
"""For this long the pause stays at that."""
LATER = 1.2
"""How much longer each pause is than the one before."""
MOST_S = 0.1
TRY_S = 0.25
"""How long one try may take: a packet that was lost while a machine's network came up is repeated only after a
second."""
AT_ONCE = 4
"""Up to this many machines are looked at as often as that; with twice as many, half as often."""


class ListenProbe:
    """Looks at the machines of one proxy that are on their way up."""

    def __init__(self, sockets: Sockets, offer: Callable[[Address, socket.socket], None] = NO_UPSTREAMS.offer) -> None:
        """`offer` takes the connection to a machine that has begun to listen."""
        self._sockets = sockets
        self._offer = offer
        self.machines = 0

    async def until_listening(
        self, addresses: Sequence[Address], starting: asyncio.Future[Any] | None = None
    ) -> Address:
        """Wait until one of the addresses takes a connection, and return it. The caller ends this by a time-out. Raises
        what `starting` raises meanwhile: then nothing will listen."""
        loop = asyncio.get_running_loop()
        began, pause, past = loop.time(), 0.0, 0.0
        self.machines += 1
        try:
            while True:
                for address in addresses:
                    if sock := await self._sockets.connected(address, TRY_S):
                        self._offer(address, sock)
                        return address
                if starting is not None and starting.done():
                    starting.result()
                if self.machines > 1:
                    pause = pause or FIRST_S
                elif not pause:
                    time.sleep(FIRST_LOOK_S if past == 0.0 else AT_FIRST_S)  # noqa: ASYNC251 - see there
                await asyncio.sleep(pause * max(1.0, self.machines / AT_ONCE))
                past = loop.time() - began
                if past > QUICK_S:
                    pause = min(pause * LATER, MOST_S)
                elif past > ALONE_S:
                    pause = FIRST_S
        finally:
            self.machines -= 1

    async def connects(self, address: Address, within_s: float) -> bool:
        """Whether somebody takes a connection there now."""
        if sock := await self._sockets.connected(address, within_s):
            sock.close()
        return sock is not None

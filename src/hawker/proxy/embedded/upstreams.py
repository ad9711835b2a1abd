"""Keeps the connections to machines and to other proxies, of both versions of HTTP."""

from __future__ import annotations

import asyncio
import socket

from hawker.proxy.base import Address
from hawker.proxy.embedded.h2_pool import H2Pool
from hawker.proxy.embedded.pool import Pool
from hawker.proxy.embedded.settings import Settings
from hawker.sockets import Sockets


class UpstreamPools:
    """The `hawker.proxy.base.Upstreams` of this process, made on the running loop. `close` ends it."""

    def __init__(self, settings: Settings, sockets: Sockets) -> None:
        loop = asyncio.get_running_loop()
        self.http1 = Pool(settings, loop, sockets)
        self.h2 = H2Pool(settings, loop)

    def offer(self, address: Address, sock: socket.socket) -> None:
        self.http1.offer(address, sock)

    def let_go(self, address: Address, asleep: bool) -> None:
        self.http1.let_go(address, asleep)
        self.h2.let_go(address)

    def unanswered(self) -> dict[Address, float]:
        found = self.http1.unanswered()
        for address, seconds in self.h2.unanswered().items():
            found[address] = max(seconds, found.get(address, 0.0))
        return found

    def give_up(self, address: Address, problem: str, *, waited_s: float = 0.0, every: bool = False) -> None:
        self.http1.give_up(address, problem, waited_s, every)
        self.h2.give_up(address, problem, waited_s, every)

    def close(self) -> None:
        self.http1.close()
        self.h2.close()

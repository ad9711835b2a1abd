"""Keeps connections to machines that wait for their next request, by address."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from hawker.proxy.base import Address
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.sockets import Sockets

OFFERED_S = 0.05
"""For this long a connection waits for its first request: a program that serves one at a time is busy with it."""


class Attempts:
    """The attempts to connect that are under way. Nobody answers at the address of a machine that is put to rest, and
    the kernel goes on trying."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = settings.connect_timeout_s
        self._loop = loop
        self._under_way: dict[Address, dict[asyncio.Timeout, None]] = {}

    @asynccontextmanager
    async def one(self, address: Address) -> AsyncIterator[None]:
        """One attempt. Raises `TimeoutError`."""
        async with asyncio.timeout(self._seconds) as attempt:
            attempts = self._under_way.setdefault(address, {})
            attempts[attempt] = None
            try:
                yield
            finally:
                attempts.pop(attempt, None)
                if not attempts and self._under_way.get(address) is attempts:
                    del self._under_way[address]

    def end(self, address: Address) -> None:
        """End the attempts at this address as if their time were over."""
        for attempt in self._under_way.pop(address, ()):
            if not attempt.expired():
                attempt.reschedule(self._loop.time())


class Pool:
    """Idle connections by address. The one used last is taken first, so that a burst's connections end by
    themselves."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop, sockets: Sockets) -> None:
        self._sockets = sockets
        self._settings = settings
        self._loop = loop
        self._attempts = Attempts(settings, loop)
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        self._offered: dict[Address, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self._every: weakref.WeakKeyDictionary[UpstreamConnection, None] = weakref.WeakKeyDictionary()
        self._closed = False
        self.opened = 0

    def take(self, address: Address, repeatable: bool) -> UpstreamConnection | None:
        """A connection that waits, or None: `connect` then. For a request that must not be made twice the socket is
        looked at once more: then only what the machine closes in this very moment can go wrong."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            connection.waiting = False
            if connection.usable and (repeatable or connection.quiet()):
                return connection
        return None

    async def connect(self, address: Address) -> UpstreamConnection:
        """Make a new connection. Raises `OSError`, `TimeoutError` when it takes too long."""
        sock = self._taken(address)
        made = partial(UpstreamConnection, address, self._settings, self, self._loop, self._sockets)
        async with self._attempts.one(address):
            if sock is None:
                _, connection = await self._loop.create_connection(made, *address)
            else:
                _, connection = await self._loop.create_connection(made, sock=sock)
        self.opened += 1
        self._every[connection] = None
        return connection

    def offer(self, address: Address, sock: socket.socket) -> None:
        """Take a connection that was made to see whether the machine listens: the request that waits for the machine
        gets it."""
        self._withdraw(address)
        if self._closed:
            sock.close()
        else:
            self._offered[address] = sock, self._loop.call_later(OFFERED_S, self._withdraw, address)

    def _taken(self, address: Address) -> socket.socket | None:
        sock, timer = self._offered.pop(address, (None, None))
        if timer is not None:
            timer.cancel()
        return sock

    def _withdraw(self, address: Address) -> None:
        if sock := self._taken(address):
            sock.close()

    def put(self, connection: UpstreamConnection) -> None:
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = []
        if len(idle) >= self._settings.pool_size or self._closed:
            connection.close()
        else:
            connection.waiting = True
            connection.deadline.within(self._settings.pool_idle_s)
            idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """This connection is closed."""
        idle = self._idle.get(connection.address)
        if idle is not None:
            if connection.waiting and connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def let_go(self, address: Address, asleep: bool) -> None:
        """The machine there is put to rest. Idle connections are closed while it can still hear of it: a virtual
        machine would not know of that when it goes on, nor would its next run. `asleep`: it rests already, and what
        waits for the first byte of an answer waits for nothing."""
        self._attempts.end(address)
        self._withdraw(address)
        for connection in self._idle.pop(address, ()):
            connection.close()
        if asleep:
            for connection in [each for each in self._every if each.address == address]:
                connection.asleep()

    def unanswered(self) -> dict[Address, float]:
        """Where the first byte of an answer is awaited, and for how many seconds the longest."""
        now, found = self._loop.time(), dict[Address, float]()
        for connection in list(self._every):
            if seconds := connection.unanswered_s(now):
                found[connection.address] = max(seconds, found.get(connection.address, 0.0))
        return found

    def give_up(self, address: Address, problem: str, waited_s: float, every: bool) -> None:
        """Nobody there answers: what has waited so long, and may be asked elsewhere, is asked there; `every`: the rest
        gets an error."""
        now = self._loop.time()
        for connection in [each for each in self._every if each.address == address]:
            if every or connection.unanswered_s(now) >= waited_s:
                connection.give_up(problem, every)

    def close(self) -> None:
        self._closed = True
        for address in list(self._offered):
            self._withdraw(address)
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.close()

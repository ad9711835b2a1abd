"""The embedded data plane as a whole: its listeners, and how it ends.

engine = Engine(router, Settings(region="ams", token="..."))
await engine.listen("0.0.0.0", 8080, public=80)
await engine.listen_backhaul("0.0.0.0", 4290)
...
await engine.close()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, cast

from hawker.host import Host
from hawker.listening import close_gently
from hawker.proxy.base import Address, Router
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.common import Common, Connection, peer_of
from hawker.proxy.embedded.greeting import Greeter
from hawker.proxy.embedded.inlets import Backhaul, Inlet
from hawker.proxy.embedded.plain import PlainConnection
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.tunnel import Tunnel

PATIENCE_S = 1.0
"""How long a connection may be silent that is to end, so that what its client sends in this moment is answered."""
BACKLOG = 4096
"""Connections that wait to be accepted, bounded by net.core.somaxconn: a sleeping app gets a thousand at once."""


class Engine(Common):
    """Made on the running loop. Its connections know of it what they have in common."""

    def __init__(
        self, router: Router, settings: Settings, host: Host, certificates: Certificates | None = None
    ) -> None:
        super().__init__(router, settings, host, certificates)
        self._servers: list[asyncio.AbstractServer] = []
        self._at: dict[Address, list[asyncio.Server]] = {}
        self._leaving: dict[Connection | Tunnel, None] = {}
        self._one_left = asyncio.Event()

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        """Serve users at this address as the public port `public`, which apps share. `port` 0: any. Returns the
        address. What a connection speaks is seen by what it says."""
        return await self._listen(lambda: Greeter(self, public), host, port)

    async def listen_own(self, host: str, port: int, *, public: int) -> Address:
        """The same for a public port that one app has to itself."""
        return await self._listen(lambda: Greeter(self, public, own=True), host, port)

    async def listen_plain(self, host: str, port: int, *, public: int) -> Address:
        """Pass bytes between whoever connects here and the machines that serve the public port `public`."""
        return await self._listen(lambda: PlainConnection(self, public), host, port)

    async def listen_backhaul(self, host: str, port: int) -> Address:
        """Serve other proxies of the cluster at this address."""

        def inlet(transport: asyncio.Transport) -> Inlet:
            return Backhaul(self, peer_of(transport))

        return await self._listen(lambda: ClientConnection(self, inlet), host, port, edge=False)

    async def _listen(
        self, made: Callable[[], asyncio.Protocol], host: str, port: int, *, edge: bool = True
    ) -> Address:
        servers = await self._host.listening.serve(lambda: _Entry(self, made, edge), host, port, backlog=BACKLOG)
        self._servers += servers
        address = _address(servers[0])
        self._at[address] = servers
        return address

    def stop(self, address: Address) -> None:
        """Take no more connections at this address. Those that are open stay."""
        for server in self._at.pop(address, []):
            server.close()
            self._servers.remove(server)

    async def retire(self) -> None:
        """Before `close`, when another one takes the listening sockets over: end the connections that there are within
        the settings' `drain_s`. New ones are served meanwhile, each for one request: nobody waits for those that take
        long."""
        self.retiring = True
        self._leaving = dict.fromkeys((*self.connections, *self.tunnels))
        try:
            for connection in list(self.connections):
                connection.drain(patiently=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(PATIENCE_S, self.settings.drain_s)):
                    await self._all_left(self._leaving)
            for left in list(self._leaving):
                if not isinstance(left, Tunnel):
                    left.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_s - PATIENCE_S):
                    await self._all_left(self._leaving)
        except asyncio.CancelledError:
            self.retiring = False  # there is no other one
            raise

    async def close(self) -> None:
        """Take no more connections, finish what is in flight within the settings' `drain_s`, then cut the rest. After
        `retire` it is a matter of `pause_s`, in which new connections wait, and tunnels have had their time."""
        await close_gently(self._servers)
        if self.retiring:
            for connection in list(self.connections):
                connection.drain(patiently=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(PATIENCE_S, self.settings.pause_s)):
                    await self._all_left(self.connections)
        for connection in list(self.connections):
            connection.drain()
        self.pool.close()
        self.h2_pool.close()
        with suppress(TimeoutError):
            if self.retiring:
                async with asyncio.timeout(self.settings.pause_s):
                    await self._all_left(self.connections)
            else:
                async with asyncio.timeout(self.settings.drain_s):
                    await self._all_left(self.connections, self.tunnels)
        for connection in list(self.connections):
            connection.abort()
        for tunnel in list(self.tunnels):
            tunnel.abort()
        await self._all_left(self.connections, self.tunnels)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.access is not None:
            self.access.close()
            self.access = None

    async def _all_left(self, *those: Collection[Any]) -> None:
        while any(those):
            self._one_left.clear()
            await self._one_left.wait()

    def left(self, which: Connection | Tunnel) -> None:
        super().left(which)
        self._leaving.pop(which, None)
        self._one_left.set()

    # --- connections to machines and proxies -------------------------------------------------------------------------

    def let_go(self, address: Address, asleep: bool) -> None:
        """The machine at this address is put to rest: keep no connection to it. `asleep`: it answers nothing more."""
        self.pool.let_go(address, asleep)
        self.h2_pool.let_go(address)

    def unanswered(self) -> dict[Address, float]:
        """Where requests wait for the first byte of an answer, and for how many seconds the longest."""
        found = self.pool.unanswered()
        for address, seconds in self.h2_pool.unanswered().items():
            found[address] = max(seconds, found.get(address, 0.0))
        return found

    def give_up(self, address: Address, problem: str, *, waited_s: float = 0.0, every: bool = False) -> None:
        """Who is at this address answers nothing: requests that wait there so long, and may be made elsewhere, are;
        `every`: the others get an error."""
        self.pool.give_up(address, problem, waited_s, every)
        self.h2_pool.give_up(address, problem, waited_s, every)


class _Entry(asyncio.Protocol):
    """Lets a connection in. One over the limits is closed at once: each takes a descriptor that a request under way
    needs."""

    def __init__(self, common: Common, made: Callable[[], asyncio.Protocol], edge: bool) -> None:
        self._common = common
        self._made = made
        self._edge = edge

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if not self._common.limits.has_room(self._common.address_of(transport) if self._edge else b""):
            transport.abort()
            return
        protocol = self._made()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _address(server: asyncio.Server) -> Address:
    address: Address = server.sockets[0].getsockname()[:2]
    return address

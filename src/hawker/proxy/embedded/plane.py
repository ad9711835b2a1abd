"""The embedded data plane as a whole: its listeners, and how it ends.

plane = EmbeddedPlane(PlaneParts(router=router, settings=settings, host=host, upstreams=upstreams))
await plane.listen("0.0.0.0", 8080, public=80)
await plane.listen_backhaul("0.0.0.0", 4290)
...
await plane.close()
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from hawker.core.metrics import Collector
from hawker.listening import LOT, close_gently, let_wait
from hawker.proxy.base import Address
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.context import UNOBSERVED, Connection, Observer, PlaneContext, PlaneParts, peer_of
from hawker.proxy.embedded.ingress import BackhaulIngress, Ingress
from hawker.proxy.embedded.protocol_sniffing import ProtocolSniffer
from hawker.proxy.embedded.tunnel import Tunnel

PATIENCE_S = 1.0
"""How long a connection that is to end may be silent, so that what its client sends in this moment is answered."""
BACKLOG = 4096
"""How many connections may wait to be accepted, bounded by net.core.somaxconn: a sleeping app gets a thousand at
once."""


class EmbeddedPlane:
    """A `hawker.proxy.data_plane.DataPlane`, made on the running loop. Its connections share `context`."""

    def __init__(self, parts: PlaneParts, observer: Observer = UNOBSERVED) -> None:
        self.context = PlaneContext(parts, observer)
        self.counters = self.context.counters
        self._settings = parts.settings
        self._listening = parts.host.listening
        self._servers: list[asyncio.AbstractServer] = []
        self._at: dict[Address, list[asyncio.Server]] = {}

    def collectors(self) -> tuple[Collector, ...]:
        return (self.counters,)

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        """Serve users at this address as the public port `public`, which apps share. `port` 0: any. Returns the
        address. What a connection speaks is seen by what it says."""
        return await self._listen(lambda: ProtocolSniffer(self.context, public), host, port)

    async def listen_own(self, host: str, port: int, *, public: int) -> Address:
        """Serve users as a public port that one app has to itself."""
        return await self._listen(lambda: ProtocolSniffer(self.context, public, own=True), host, port)

    async def listen_backhaul(self, host: str, port: int) -> Address:
        """Serve other proxies of the cluster at this address."""

        def ingress(transport: asyncio.Transport) -> Ingress:
            return BackhaulIngress(self.context, peer_of(transport))

        return await self._listen(lambda: ClientConnection(self.context, ingress), host, port, edge=False)

    async def _listen(
        self, made: Callable[[], asyncio.Protocol], host: str, port: int, *, edge: bool = True
    ) -> Address:
        servers = await self._listening.serve(lambda: _Entry(self.context, made, edge), host, port, backlog=BACKLOG)
        self._servers += servers
        address = _address(servers[0])
        self._at[address] = servers
        return address

    async def listen_unix(self, made: Callable[[], asyncio.Protocol], sock: socket.socket) -> None:
        """Serve programs of this host, such as a proxy before this one, at a bound socket of the file system."""
        server = await self.context.loop.create_unix_server(made, sock=sock, backlog=LOT)
        let_wait(server, BACKLOG)
        self._servers.append(server)

    def stop(self, address: Address) -> None:
        """Take no more connections at this address. Those that are open stay."""
        for server in self._at.pop(address, []):
            server.close()
            self._servers.remove(server)

    async def retire(self) -> None:
        """Another process takes the listening sockets over: end the connections that there are within the settings'
        `drain_s`. New ones are served meanwhile, each for one request: nobody waits for those that take long. `close`
        comes after it."""
        context, settings = self.context, self._settings
        context.retiring = True
        leaving: list[Connection | Tunnel] = [*context.connections, *context.tunnels]

        def of_those() -> object:
            while leaving and leaving[-1] not in context.connections and leaving[-1] not in context.tunnels:
                leaving.pop()
            return leaving

        try:
            for connection in list(context.connections):
                connection.drain(patiently=True)
            await self._left_within(min(PATIENCE_S, settings.drain_s), of_those)
            for connection in [each for each in leaving if not isinstance(each, Tunnel)]:
                if connection in context.connections:
                    connection.drain()
            await self._left_within(settings.drain_s - PATIENCE_S, of_those)
        except asyncio.CancelledError:
            context.retiring = False  # there is no other one
            raise

    async def close(self) -> None:
        """Take no more connections, finish what is in flight within the settings' `drain_s`, then cut the rest. After
        `retire` there are only `pause_s`, in which new connections wait; tunnels have had their time."""
        context, settings = self.context, self._settings
        await close_gently(self._servers)
        if context.retiring:
            for connection in list(context.connections):
                connection.drain(patiently=True)
            await self._left_within(min(PATIENCE_S, settings.pause_s), lambda: context.connections)
        for connection in list(context.connections):
            connection.drain()
        context.upstreams.close()
        if context.retiring:
            await self._left_within(settings.pause_s, lambda: context.connections)
        else:
            await self._left_within(settings.drain_s, lambda: context.connections or context.tunnels)
        for connection in list(context.connections):
            connection.abort()
        for tunnel in list(context.tunnels):
            tunnel.abort()
        await context.close()

    async def _left_within(self, seconds: float, remaining: Callable[[], object]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.context.left_by(remaining)


class _Entry(asyncio.Protocol):
    """Lets a connection in. One over the limits is closed at once: each takes a descriptor that a request under way
    needs."""

    def __init__(self, context: PlaneContext, made: Callable[[], asyncio.Protocol], edge: bool) -> None:
        self._context = context
        self._made = made
        self._edge = edge

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if not self._context.limits.has_room(self._context.address_of(transport) if self._edge else b""):
            transport.abort()
            return
        protocol = self._made()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _address(server: asyncio.Server) -> Address:
    address: Address = server.sockets[0].getsockname()[:2]
    return address

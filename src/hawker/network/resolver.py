"""The resolver of a worker's machines: private names from the catalog, all others from the host's own resolvers.

It listens on the worker's own address, which the filters let only its own machines reach; whose question
it is shows its source address, which the filters let nobody forge. What is malformed, comes from elsewhere, or is more
than a machine may ask is dropped without a word.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

from hawker.network import addresses
from hawker.network.names import Network

if TYPE_CHECKING:
    from hawker.network.forward import Forwarder
    from hawker.network.messages import Query, Way

IPV6_FREEBIND = 78
"""The address is on the host from when the first machine is attached; it may be bound before."""
RATE, BURST = 200.0, 400.0
"""Questions that one machine may ask, a second and at once."""
ASKERS = 4096
FORWARDED_EACH = 32
"""Questions of one machine that may be with others at a time: a name whose servers are silent takes a place that
everybody shares for seconds."""
CONNECTIONS, CONNECTIONS_EACH = 256, 8
IDLE_S = 10.0


class Rate:
    """A token bucket for each asker: `RATE` tokens a second, up to `BURST`."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, asker: str, now_s: float) -> bool:
        left, at_s = self._buckets.pop(asker, (BURST, now_s))
        left = min(BURST, left + (now_s - at_s) * RATE)
        self._buckets[asker] = (left - 1 if left >= 1 else left), now_s
        if len(self._buckets) > ASKERS:
            self._buckets.popitem(last=False)
        return left >= 1


class Resolver:
    """Answers at `address`, a worker's own. `network` gives a network by its number; `forwarder` is made with the first
    name that is not private. Both sockets belong to the network namespace that `open` is called in."""

    def __init__(
        self,
        address: str,
        network: Callable[[int], Network],
        forwarder: Callable[[], Forwarder],
        rng: random.Random,
        *,
        port: int = addresses.RESOLVER_PORT,
    ) -> None:
        self._at = (address, port)
        self._network = network
        self._make_forwarder = forwarder
        self._forwarder: Forwarder | None = None
        self._rng = rng
        self._rate = Rate()
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], str] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._forwarding: Counter[str] = Counter()

    async def open(self) -> None:
        """Raises `OSError` when the address cannot be had."""
        loop = asyncio.get_running_loop()
        udp, tcp = _socket(socket.SOCK_DGRAM), _socket(socket.SOCK_STREAM)
        try:
            udp.bind(self._at)
            tcp.bind(self._at)
            self._udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(self._received), sock=udp)
            self._tcp = await asyncio.start_server(self._connected, sock=tcp)
        except BaseException:
            udp.close()
            tcp.close()
            await self.close()
            raise

    async def close(self) -> None:
        if self._udp is not None:
            self._udp.close()
            self._udp = None
        if self._tcp is not None:
            self._tcp.close()
        tasks = [*self._connections, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tcp is not None:
            await self._tcp.wait_closed()
            self._tcp = None
        if self._forwarder is not None:
            await self._forwarder.close()

    async def answer(self, wire: bytes, asker: str, by: Way) -> bytes | None:
        """The answer to a message from a machine's address, or None for none."""
        import dns.rcode

        from hawker.network import messages

        query = messages.parse(wire)
        if query is None:
            return None
        refused = messages.refusal(query)
        if refused is not None:
            return messages.fitted(messages.response(query, refused), query, by)
        if messages.private(query.question[0].name):
            found = messages.answered(query, self._network(addresses.number(asker)), asker, self._rng)
            return messages.fitted(found, query, by)
        forwarded = await self._forward(query, asker)
        return messages.fitted(forwarded or messages.response(query, dns.rcode.SERVFAIL), query, by)

    async def _forward(self, query: Query, asker: str) -> Query | None:
        if self._forwarding[asker] >= FORWARDED_EACH:
            return None
        self._forwarding[asker] += 1
        try:
            if self._forwarder is None:
                self._forwarder = self._make_forwarder()
            return await self._forwarder.ask(query)
        finally:
            self._forwarding[asker] -= 1
            if not self._forwarding[asker]:
                del self._forwarding[asker]

    def _received(self, wire: bytes, source: tuple[str, int]) -> None:
        asker = self._asker(source[0])
        if asker is None:
            return
        task = asyncio.create_task(self._reply(wire, asker, source))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _reply(self, wire: bytes, asker: str, source: tuple[str, int]) -> None:
        found = await self.answer(wire, asker, "udp")
        if found is not None and self._udp is not None:
            self._udp.sendto(found, source)

    def _asker(self, source: str) -> str | None:
        """The address of a machine that may ask now."""
        address = IPv6Address(source.partition("%")[0])
        if address not in addresses.SPACE6 or addresses.number(str(address)) == 0:
            return None
        return str(address) if self._rate.allows(str(address), asyncio.get_running_loop().time()) else None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = str(writer.get_extra_info("peername")[0])
        each = sum(1 for its in self._connections.values() if its == source)
        if len(self._connections) >= CONNECTIONS or each >= CONNECTIONS_EACH:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer, source))
        self._connections[task] = source
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str) -> None:
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                await self._converse(reader, writer, source)
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str) -> None:
        """Answer the questions of one connection one after the other (RFC 7766)."""
        while True:
            async with asyncio.timeout(IDLE_S):
                length = int.from_bytes(await reader.readexactly(2), "big")
                wire = await reader.readexactly(length)
            asker = self._asker(source)
            found = await self.answer(wire, asker, "tcp") if asker else None
            if found is None:
                return
            writer.write(len(found).to_bytes(2, "big") + found)
            async with asyncio.timeout(IDLE_S):
                await writer.drain()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._received(data, addr)


def _socket(kind: socket.SocketKind) -> socket.socket:
    made = socket.socket(socket.AF_INET6, kind)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    if kind == socket.SOCK_STREAM:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made

"""The simulated network: hosts with addresses in regions, and links between them that delay, lose, double and break.

A `Station` is a host on the network; `Net.link(a, b)` is the way from one to the other, which faults act on, each
direction by itself. Datagrams are delayed, lost, doubled and reordered. Streams behave as TCP does: bytes arrive in
order or not at all, a lost segment comes later, over a broken link nothing arrives until it heals and after a minute
the sender gives up. A killed program's connections are closed by its system, as a real one does; those of a host that
lost power answer nothing any more, until the host is back and resets them. The ends are in `sim.streams`. A host
reaches itself at `LOOPBACK`, and its machines at addresses that nobody else knows.

Every delivery is noted in the record. What the network itself does belongs to no process, so a paused program's
connections are still accepted and its data are buffered.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hawker.sim.loop import PROCESS, Process, SimLoop, current_process
from hawker.sim.streams import CONNECT, Listener, Pipe, StreamEnd

if TYPE_CHECKING:
    from hawker.sim.record import Record

DELAY_S = {0: (0.0002, 0.0006), 1: (0.015, 0.035), 2: (0.040, 0.080)}
"""One-way delay, least and most of a link, by how far its regions are apart in the list of regions (2: or more)."""
JITTER = 0.2  # of a link's delay
LOOPBACK = "127.0.0.1"
LOOPBACK_S = 20e-6
REORDERED_S = 0.05  # how much later a datagram comes that is overtaken
SYN_RETRY_S = (1.0, 2.0, 4.0, 8.0)
FIRST_FREE_PORT = 40_000
DATAGRAM_BYTES_MAX = 65_507
DATAGRAMS_HELD_MAX = 1000  # of a receiver that does not read: the rest is dropped


class Station:
    """A host on the network. `up` False: it has no power, nothing answers."""

    def __init__(self, net: Net, name: str, region: str, address: str) -> None:
        self.net = net
        self.name = name
        self.region = region
        self.address = address
        self.up = True
        self.listeners: dict[At, Listener] = {}
        self.datagrams: dict[int, Datagrams] = {}
        self.ends: dict[StreamEnd, None] = {}
        self._next_port = FIRST_FREE_PORT

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def listener(self, host: str, port: int) -> Listener | None:
        """The program of this host that takes connections at its loopback address, or at a machine's on it."""
        found = self.listeners.get(port if host == LOOPBACK else (host, port))
        return found if found is not None and not found.process.dead else None

    def close_all(self, process: Process, *, silently: bool) -> None:
        """What the system does with a dead program's sockets; `silently` when the whole host is gone."""
        for port, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[port]
        for port, endpoint in list(self.datagrams.items()):
            if endpoint.process is process:
                del self.datagrams[port]
        for end in list(self.ends):
            if end.process is process:
                end.orphan(silently=silently)


At = int | tuple[str, int]
"""A port of all addresses of a host, or one of an address inside it."""


class Link:
    """The way from one host to another: `base_s` of delay, and what is wrong with it.

    `loss` and `duplicates` are shares of packets, `reordered` the share of datagrams that others overtake.
    """

    def __init__(self, rng: random.Random, base_s: float) -> None:
        self.rng = rng
        self.base_s = base_s
        self.cuts = 0  # faults that cut it now
        self.loss = 0.0
        self.duplicates = 0.0
        self.reordered = 0.0
        self.slow_s = 0.0

    @property
    def cut(self) -> bool:
        return self.cuts > 0

    def delay_s(self) -> float:
        return self.base_s * (1 + JITTER * self.rng.random()) + self.slow_s

    def loses(self) -> bool:
        return self.cut or (self.loss > 0 and self.rng.random() < self.loss)

    def heal(self) -> None:
        self.cuts = 0
        self.loss = self.duplicates = self.reordered = self.slow_s = 0.0


class Loop(Link):
    """From a host to itself: nothing goes wrong with it."""

    def delay_s(self) -> float:
        return self.base_s

    def loses(self) -> bool:
        return False


class Net:
    """`regions` in an order in which neighbours are near. Each link has a random number generator of its own, made of
    `seed` and both names. `on_stream` hears of bytes just before they reach a host; True resets their connection.
    """

    def __init__(self, loop: SimLoop, record: Record, seed: str, regions: list[str]) -> None:
        self.loop = loop
        self.record = record
        self.stations: dict[str, Station] = {}
        self._addresses: dict[str, Station] = {}
        self._links: dict[tuple[Station, Station], Link] = {}
        self._seed = seed
        self._regions = regions
        self.on_stream: Callable[[Station, Station, bytes], bool] = lambda source, to, data: False
        self.nobody = contextvars.copy_context()
        self.nobody.run(PROCESS.set, None)
        loop.net = self

    def station(self, name: str, region: str) -> Station:
        """A new host in a region."""
        number = len(self.stations) + 1
        address = f"10.{self._regions.index(region) + 1}.{number >> 8}.{number & 255}"
        station = self.stations[name] = self._addresses[address] = Station(self, name, region, address)
        return station

    def link(self, source: Station, to: Station) -> Link:
        link = self._links.get((source, to))
        if link is None and source is to:
            link = self._links[source, to] = Loop(random.Random(0), LOOPBACK_S)
        elif link is None:
            rng = random.Random(f"{self._seed}/link/{source.name}/{to.name}")
            apart = abs(self._regions.index(source.region) - self._regions.index(to.region))
            link = self._links[source, to] = Link(rng, rng.uniform(*DELAY_S[min(apart, 2)]))
        return link

    def links(self) -> list[Link]:
        """Every link between two hosts of this network, in the order of their names' making."""
        return [self.link(a, b) for a in self.stations.values() for b in self.stations.values() if a is not b]

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, call, *args, context=self.nobody)

    def soon(self, call: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self.loop.call_soon(call, *args, context=self.nobody)

    def find(self, host: str) -> Station:
        """The station at an address or of a name. Raises `OSError`."""
        station = self._addresses.get(host) or self.stations.get(host)
        if station is None:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return station

    # --- streams -----------------------------------------------------------------------------------------------------

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[StreamEnd, asyncio.BaseProtocol]:
        """Raises `ConnectionRefusedError`, or `TimeoutError` when nothing answers at all."""
        end = await self.dial(host, port)
        protocol = factory()
        end.begin(protocol)
        return end, protocol

    def dial_here(self, host: str, port: int) -> StreamEnd | None:
        """A connection without a protocol yet, to a program of the own host, if one takes it at once."""
        process = current_process()
        station = process.station
        assert station is not None
        listener = station.listener(host, port)
        if listener is None:
            return None
        there, back = Pipe(self, station, station), Pipe(self, station, station)
        client, server = (host, station.free_port()), (host, port)
        there.send(CONNECT, lambda: listener.accept(there, back, server, client))
        return StreamEnd(self, process, station, out=there, into=back, here=client, there=server)

    async def dial(self, host: str, port: int) -> StreamEnd:
        """A connection without a protocol yet. Raises as `connect` does."""
        process = current_process()
        assert process.station is not None  # programs run on hosts
        source = process.station
        inside = (host, int(port)) in source.listeners
        target = source if inside or host == LOOPBACK else self.find(host)
        answer: asyncio.Future[tuple[Pipe, Pipe]] = self.loop.create_future()
        client = (source.address, source.free_port())
        server = (target.address, int(port))
        attempts = iter(SYN_RETRY_S)

        def fail(error: OSError) -> None:
            if not answer.done():
                answer.set_exception(error)

        def attempt() -> None:
            if answer.done() or process.dead:
                return
            wait_s = next(attempts, None)
            if wait_s is None:
                fail(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
                return
            self.later(wait_s, attempt)
            self._travel(source, target, syn)

        def syn() -> None:
            listener = target.listeners.get((host, server[1]) if inside else server[1])
            if listener is None or listener.process.dead:
                refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                self._travel(target, source, fail, refused)
            else:
                self._travel(target, source, established, listener)

        def established(listener: Listener) -> None:
            if answer.done() or process.dead:
                return
            there, back = Pipe(self, source, target), Pipe(self, target, source)
            there.send(CONNECT, lambda: listener.accept(there, back, server, client))
            answer.set_result((there, back))

        self.soon(attempt)
        there, back = await answer
        return StreamEnd(self, process, source, out=there, into=back, here=client, there=server)

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], port: int, inside: str = "") -> Server:
        """`inside`: only at this address of a machine on the host."""
        process = current_process()
        assert process.station is not None
        station = process.station
        port = port or station.free_port()
        at = (inside, port) if inside else port
        if at in station.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = station.listeners[at] = Listener(self, process, station, factory)
        return Server(station, at, listener)

    def _travel(self, source: Station, to: Station, call: Callable[..., object], *args: Any) -> None:
        """One packet: `call` where it arrives, if it does."""
        link = self.link(source, to)
        if not source.up or link.loses():
            return

        def arrive() -> None:
            if to.up and not link.cut:
                call(*args)

        self.later(link.delay_s(), arrive)

    # --- datagrams ---------------------------------------------------------------------------------------------------

    def bind(
        self,
        factory: Callable[[], asyncio.DatagramProtocol],
        local: tuple[str, int] | None,
        remote: tuple[str, int] | None,
    ) -> tuple[Datagrams, asyncio.DatagramProtocol]:
        process = current_process()
        assert process.station is not None
        station = process.station
        port = (local[1] if local else 0) or station.free_port()
        if port in station.datagrams:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        protocol = factory()
        endpoint = station.datagrams[port] = Datagrams(self, process, station, port, protocol, remote)
        protocol.connection_made(endpoint)
        return endpoint, protocol

    def send(self, source: Station, port: int, to: tuple[str, int], data: bytes) -> None:
        try:
            target = self.find(to[0])
        except OSError:
            return
        link = self.link(source, target)
        for _ in range(2 if link.duplicates and link.rng.random() < link.duplicates else 1):
            if link.loses() or not source.up:
                self.record.note("lost", target.name, f"{source.name} {len(data)}")
                continue
            late_s = link.rng.random() * REORDERED_S if link.reordered and link.rng.random() < link.reordered else 0.0
            self.later(link.delay_s() + late_s, self._datagram, link, source, port, target, to[1], data)

    def _datagram(self, link: Link, source: Station, port: int, to: Station, to_port: int, data: bytes) -> None:
        endpoint = to.datagrams.get(to_port)
        if endpoint is None or not to.up or link.cut:
            return
        self.record.note("packet", to.name, source.name.encode() + b" " + data)
        endpoint.arrived(data, (source.address, port))


class Server(asyncio.AbstractServer):
    """A listening port."""

    def __init__(self, station: Station, at: At, listener: Listener) -> None:
        self._station = station
        self._at = at
        self._listener = listener
        self.sockets = (_Socket((station.address, at) if isinstance(at, int) else at),)

    def close(self) -> None:
        if self._station.listeners.get(self._at) is self._listener:
            del self._station.listeners[self._at]

    async def wait_closed(self) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._station.net.loop

    def is_serving(self) -> bool:
        return self._station.listeners.get(self._at) is self._listener

    async def start_serving(self) -> None: ...

    async def serve_forever(self) -> None:
        await self.get_loop().create_future()


class _Socket:
    """What programs ask a listening socket: its own address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address


class Datagrams(asyncio.DatagramTransport):
    """A port for datagrams."""

    def __init__(
        self,
        net: Net,
        process: Process,
        station: Station,
        port: int,
        protocol: asyncio.DatagramProtocol,
        remote: tuple[str, int] | None,
    ) -> None:
        super().__init__({"sockname": (station.address, port), "peername": remote})
        self.process = process
        self._net = net
        self._station = station
        self._port = port
        self._protocol = protocol
        self._remote = remote
        self._context = contextvars.copy_context()
        self._held = 0
        self._closing = False

    def sendto(self, data: Any, addr: Any = None) -> None:
        to = addr or self._remote
        if to is None:
            raise ValueError("a datagram needs an address")
        if self._closing or self.process.dead:
            return
        if len(data) > DATAGRAM_BYTES_MAX:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        self._net.send(self._station, self._port, (to[0], int(to[1])), bytes(data))

    def arrived(self, data: bytes, source: tuple[str, int]) -> None:
        if self._held < DATAGRAMS_HELD_MAX:
            self._held += 1
            self._net.loop.call_soon(self._read, data, source, context=self._context)

    def _read(self, data: bytes, source: tuple[str, int]) -> None:
        self._held -= 1
        if not self._closing:
            self._protocol.datagram_received(data, source)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._station.datagrams.get(self._port) is self:
            del self._station.datagrams[self._port]
        self._net.loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

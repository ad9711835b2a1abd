"""The simulated network: hosts with addresses in regions, and links between them that delay, lose, double and break.

A `Station` is a host on the network; `Net.link(a, b)` is the way from one to the other, which faults act on, each
direction by itself. Datagrams are delayed, lost, doubled and reordered. Streams behave as TCP does: bytes arrive in
order or not at all, a lost segment comes later, over a broken link nothing arrives until it heals and after a minute
the sender gives up. A killed program's connections are closed by its system, as a real one does; those of a host that
lost power answer nothing any more, until the host is back and resets them. The ends are in `streams`. A host reaches
itself at `LOOPBACK`, and its machines at addresses that nobody else knows.

Every delivery is noted in the record. What the network itself does belongs to no process, so a paused program's
connections are still accepted and its data are buffered.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hawker.sim.platform.links import Link, Links
from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.processes import Process, Station, current_process
from hawker.sim.platform.record import Record
from hawker.sim.platform.streams import CONNECT, Listener, Pipe, StreamEnd

LOOPBACK = "127.0.0.1"
REORDERED_S = 0.05  # how much later a datagram comes that is overtaken
SYN_RETRY_S = (1.0, 2.0, 4.0, 8.0)
DATAGRAM_BYTES_MAX = 65_507
DATAGRAMS_HELD_MAX = 1000  # a receiver that does not read holds so many; the rest is dropped


At = int | tuple[str, int]
"""A port of all addresses of a host, or one of an address inside it."""


class Net(Links):
    """The links, and what programs have open on their hosts."""

    def __init__(self, loop: SimLoop, record: Record, seed: str, regions: list[str]) -> None:
        super().__init__(loop, record, seed, regions)
        self._listeners: defaultdict[Station, dict[At, Listener]] = defaultdict(dict)
        self._datagrams: defaultdict[Station, dict[int, Datagrams]] = defaultdict(dict)
        loop.net = self

    def listener(self, station: Station, host: str, port: int) -> Listener | None:
        """The program of a host that takes connections at its loopback address, or at a machine's on it."""
        found = self._listeners[station].get(port if host == LOOPBACK else (host, port))
        return found if found is not None and not found.process.dead else None

    def close_all(self, process: Process, *, silently: bool) -> None:
        """Close a dead program's sockets as the system does; `silently` if the whole host is gone."""
        station = process.station
        assert station is not None  # programs run on hosts
        for port, listener in list(self._listeners[station].items()):
            if listener.process is process:
                del self._listeners[station][port]
        for number, endpoint in list(self._datagrams[station].items()):
            if endpoint.process is process:
                del self._datagrams[station][number]
        for end in list(station.ends):
            if end.process is process:
                end.orphan(silently=silently)

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
        listener = self.listener(station, host, port)
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
        inside = (host, int(port)) in self._listeners[source]
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
            self.travel(source, target, syn)

        def syn() -> None:
            listener = self._listeners[target].get((host, server[1]) if inside else server[1])
            if listener is None or listener.process.dead:
                refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                self.travel(target, source, fail, refused)
            else:
                self.travel(target, source, established, listener)

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
        """Listen on a port; with `inside` only at this address of a machine on the host."""
        process = current_process()
        assert process.station is not None
        station = process.station
        port = port or station.free_port()
        at = (inside, port) if inside else port
        if at in self._listeners[station]:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = self._listeners[station][at] = Listener(self, process, station, factory)
        return Server(self, station, at, listener)

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
        if port in self._datagrams[station]:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        protocol = factory()
        endpoint = self._datagrams[station][port] = Datagrams(self, process, station, port, protocol, remote)
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
        endpoint = self._datagrams[to].get(to_port)
        if endpoint is None or not to.up or link.cut:
            return
        self.record.note("packet", to.name, source.name.encode() + b" " + data)
        endpoint.arrived(data, (source.address, port))


class Server(asyncio.AbstractServer):
    """A listening port."""

    def __init__(self, net: Net, station: Station, at: At, listener: Listener) -> None:
        self._net = net
        self._station = station
        self._at = at
        self._listener = listener
        self.sockets = (_Socket((station.address, at) if isinstance(at, int) else at),)

    def close(self) -> None:
        if self.is_serving():
            del self._net._listeners[self._station][self._at]

    async def wait_closed(self) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._net.loop

    def is_serving(self) -> bool:
        return self._net._listeners[self._station].get(self._at) is self._listener

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
        mine = self._net._datagrams[self._station]
        if mine.get(self._port) is self:
            del mine[self._port]
        self._net.loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

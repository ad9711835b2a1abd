"""Measures how far other regions are (`hawker.core.distances`): now and then a connection to a proxy in each."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from hawker.core.distances import Distances
from hawker.proxy.background.loop import BackgroundLoop
from hawker.proxy.base import Address
from hawker.proxy.catalog_view.index import CatalogIndex

EVERY_S = 30.0
"""How often each region is measured. With what `Distances` remembers, a region that is farther away now is known for
that after four minutes."""
FIRST_S = 1.0
"""When the first measurement is made: by then the catalog has told of workers."""
CONNECT_S = 2.0
_RTT_AT = 68
"""The offset of `tcpi_rtt`, in microseconds, in `struct tcp_info` (linux/tcp.h)."""


class Measuring(BackgroundLoop):
    def __init__(self, index: CatalogIndex, region: str, distances: Distances, random: Callable[[], float]) -> None:
        super().__init__("measuring", EVERY_S, random, first_s=FIRST_S)
        self._directory = index
        self._region = region
        self._distances = distances

    async def look(self) -> None:
        """Measure each other region once, by way of any of its proxies."""
        proxies: dict[str, list[Address]] = {}
        for _, worker in sorted(self._directory.workers.items()):
            if worker.region != self._region and worker.proxy_port:
                proxies.setdefault(worker.region, []).append((worker.host, worker.proxy_port))
        chosen = {region: found[int(self._random() * len(found))] for region, found in proxies.items()}
        for region, seconds in zip(chosen, await asyncio.gather(*map(round_trip, chosen.values())), strict=True):
            if seconds is not None:
                self._distances.told(region, seconds)


async def round_trip(address: Address) -> float | None:
    """The round trip in seconds, as the kernel has measured it with the first packets; None when no connection is
    taken."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(CONNECT_S):
            transport, _ = await loop.create_connection(asyncio.Protocol, *address)
    except (OSError, TimeoutError):
        return None
    took = loop.time() - began
    try:
        return _of_kernel(transport.get_extra_info("socket")) or took
    finally:
        transport.abort()


def _of_kernel(sock: socket.socket | None) -> float:
    """The kernel's round trip time, 0 where it tells none. A time that this process measures has the process's own
    delays in it."""
    try:
        raw = b"" if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except (OSError, AttributeError):
        return 0.0
    if len(raw) < _RTT_AT + 4:
        return 0.0
    microseconds: int = struct.unpack_from("=I", raw, _RTT_AT)[0]
    return microseconds / 1e6

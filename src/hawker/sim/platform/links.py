"""Links between simulated hosts: they delay packets, lose them and double them, and break."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from collections.abc import Callable
from typing import Any

from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.processes import PROCESS, Station
from hawker.sim.platform.record import Record

DELAY_S = {0: (0.0002, 0.0006), 1: (0.015, 0.035), 2: (0.040, 0.080)}
"""One-way delay, least and most of a link, by how far its regions are apart in the list of regions (2: or more)."""
JITTER = 0.2  # the most that a link adds at random, as a part of its delay
LOOPBACK_S = 20e-6


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
    """A link from a host to itself: nothing goes wrong with it."""

    def delay_s(self) -> float:
        return self.base_s

    def loses(self) -> bool:
        return False


class Links:
    """The links of all hosts. `regions` are in an order in which neighbours are near. Each link has a random number
    generator of its own, made of `seed` and both names. `on_stream` hears of bytes just before they reach a host; True
    resets their connection.
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

    def station(self, name: str, region: str) -> Station:
        """A new host in a region."""
        number = len(self.stations) + 1
        address = f"10.{self._regions.index(region) + 1}.{number >> 8}.{number & 255}"
        station = self.stations[name] = self._addresses[address] = Station(name, region, address)
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

    def travel(self, source: Station, to: Station, call: Callable[..., object], *args: Any) -> None:
        """Send one packet, and `call` if and when it arrives."""
        link = self.link(source, to)
        if not source.up or link.loses():
            return

        def arrive() -> None:
            if to.up and not link.cut:
                call(*args)

        self.later(link.delay_s(), arrive)

"""Finds workers' proxies and programs that hang: they take connections and requests, and say nothing.

What waits for an answer may well wait: programs are slow. So where answers have been awaited for a while, the proxy
that should bring them is asked something itself that it answers at once (`hawker.proxy.machines.far`). A program can
only be asked what its service names for that, which is its checks: where they fail meanwhile, and another machine takes
requests, it gets those of its that may be made twice.
"""

from __future__ import annotations

import asyncio

from hawker.core.routing import Take
from hawker.proxy.base import Address, Upstreams
from hawker.proxy.groups.places import Place
from hawker.proxy.machines.door import RUNNING
from hawker.proxy.rounds.running import Rounds
from hawker.proxy.sites import Sites

PART = 0.2
"""Of `hung_s`: how long answers are awaited before it is asked, and how often it is looked."""


class Pulse(Rounds):
    """`upstreams` tell where answers are awaited, and for how long."""

    def __init__(self, sites: Sites, upstreams: Upstreams) -> None:
        self._every_s = sites.settings.hung_s * PART
        super().__init__("pulse", self._every_s)
        self._sites = sites
        self._upstreams = upstreams

    async def look(self) -> None:
        late = [address for address, seconds in self._upstreams.unanswered().items() if seconds >= self._every_s]
        if late:
            workers = self._sites.directory.workers.values()
            proxies = {(worker.host, worker.proxy_port): worker.name for worker in workers if worker.proxy_port}
            for address in late:
                worker = proxies.get(address, "")
                if worker and worker != self._sites.worker:
                    self._sites.far(worker).look(address)
            self._move(set(late))

    def _move(self, late: set[Address]) -> None:
        """Away from programs that are this proxy's to ask."""
        running = [door for door in self._sites.doors.values() if door.state == RUNNING]
        for place in [place for door in running for place in door.places.values() if place.address in late]:
            if not place.seat.row.healthy and _another_takes(place):
                problem = "it says nothing, and its checks fail"
                self._upstreams.give_up(place.address, problem, waited_s=self._every_s)


def _another_takes(place: Place) -> bool:
    found = place.pool.decide(asyncio.get_running_loop().time(), tried=(place.machine,))
    return isinstance(found, Take)

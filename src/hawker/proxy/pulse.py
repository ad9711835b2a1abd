"""Finds workers' proxies that hang: they take connections and requests, and say nothing.

What waits for an answer may well wait: programs are slow. So where answers have been awaited for a while, the proxy
that should bring them is asked something itself that it answers at once (`hawker.proxy.far`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hawker.proxy.base import Address
from hawker.proxy.rounds import Rounds
from hawker.proxy.sites import Sites

PART = 0.2
"""Of `hung_s`: how long answers are awaited before it is asked, and how often it is looked."""


class Pulse(Rounds):
    """`unanswered` tells where answers are awaited, and for how many seconds the longest."""

    def __init__(self, sites: Sites, unanswered: Callable[[], Mapping[Address, float]]) -> None:
        self._every_s = sites.settings.hung_s * PART
        super().__init__("pulse", self._every_s)
        self._sites = sites
        self._unanswered = unanswered

    async def look(self) -> None:
        late = [address for address, seconds in self._unanswered().items() if seconds >= self._every_s]
        if late:
            workers = self._sites.directory.workers.values()
            proxies = {(worker.host, worker.proxy_port): worker.name for worker in workers if worker.proxy_port}
            for address in late:
                worker = proxies.get(address, "")
                if worker and worker != self._sites.worker:
                    self._sites.far(worker).look(address)

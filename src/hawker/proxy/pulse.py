"""Finds workers' proxies that hang: they take connections and requests, and say nothing.

What waits for an answer may well wait: programs are slow. So where answers have been awaited for a while, the proxy
that should bring them is asked something itself that it answers at once (`hawker.proxy.far`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from hawker.proxy.base import Address
from hawker.proxy.sites import Sites
from hawker.telemetry import get_logger

PART = 0.2
"""Of `hung_s`: how long answers are awaited before it is asked, and how often it is looked."""


class Pulse:
    """`begin`, then `close`. `unanswered` tells where answers are awaited, and for how many seconds the longest."""

    def __init__(self, sites: Sites, unanswered: Callable[[], Mapping[Address, float]]) -> None:
        self._sites = sites
        self._unanswered = unanswered
        self._every_s = sites.settings.hung_s * PART
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="pulse")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.look()
            except Exception:  # the loop goes on
                _logger.exception("pulse.fault", cause="a fault of ours")

    def look(self) -> None:
        """Once."""
        late = [address for address, seconds in self._unanswered().items() if seconds >= self._every_s]
        if late:
            workers = self._sites.directory.workers.values()
            proxies = {(worker.host, worker.proxy_port): worker.name for worker in workers if worker.proxy_port}
            for address in late:
                worker = proxies.get(address, "")
                if worker and worker != self._sites.worker:
                    self._sites.far(worker).look(address)


_logger = get_logger()

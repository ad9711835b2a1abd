"""Finds workers' proxies and programs that hang: they take connections and requests, and say nothing.

A slow answer alone means nothing, since programs are slow. So when requests have waited for a remote proxy for a while,
this one asks it something that it answers at once (`hawker.proxy.machines.remote_proxy`). A program can be asked only
what its service names for that, which is its health checks: when they fail meanwhile, and another machine takes
requests, that machine gets those that may be made twice."""

from __future__ import annotations

import asyncio

from hawker.core.routing import Take
from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.background.loop import BackgroundLoop
from hawker.proxy.base import Address, Upstreams
from hawker.proxy.machines.door import RUNNING

PART = 0.2
"""The part of `hung_s` after which an unanswered proxy is asked, and the pause between two looks."""


class Liveness(BackgroundLoop):
    """`upstreams` tell where answers are awaited, and for how long."""

    def __init__(self, app_table: AppTable, upstreams: Upstreams) -> None:
        self._every_s = app_table.settings.hung_s * PART
        super().__init__("liveness", self._every_s)
        self._app_table = app_table
        self._upstreams = upstreams

    async def look(self) -> None:
        late = [address for address, seconds in self._upstreams.unanswered().items() if seconds >= self._every_s]
        if late:
            workers = self._app_table.index.workers.values()
            proxies = {(worker.host, worker.proxy_port): worker.name for worker in workers if worker.proxy_port}
            for address in late:
                worker = proxies.get(address, "")
                if worker and worker != self._app_table.worker:
                    self._app_table.remote_proxy(worker).look(address)
            self._move(set(late))

    def _move(self, late: set[Address]) -> None:
        """Move requests away from programs of this proxy's own worker that say nothing."""
        running = [door for door in self._app_table.doors.values() if door.state == RUNNING]
        for endpoint in [
            endpoint for door in running for endpoint in door.endpoints.values() if endpoint.address in late
        ]:
            if not endpoint.entry.row.healthy and _another_takes(endpoint):
                problem = "it says nothing, and its checks fail"
                self._upstreams.give_up(endpoint.address, problem, waited_s=self._every_s)


def _another_takes(endpoint: Endpoint) -> bool:
    found = endpoint.pool.decide(asyncio.get_running_loop().time(), tried=(endpoint.machine,))
    return isinstance(found, Take)

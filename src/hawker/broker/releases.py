"""Giving up orders: a worker is told again and again to release one, until it acknowledges that."""

from __future__ import annotations

import asyncio

from hawker.broker.fleet import Fleet, WorkerLink
from hawker.core.auction import Release
from hawker.errors import HawkerError
from hawker.model.market import LEASE_S, ReleaseOrder
from hawker.telemetry import get_logger

RETRY_S = 0.5
_CAUSE = "the broker gave the order up"


class Releases:
    """The orders of a broker that are being released. `len` says how many they are."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that closing has one, too

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, link: WorkerLink, release: Release) -> None:
        task = asyncio.get_running_loop().create_task(self._release(link, release), name=f"release {release.order}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self, link: WorkerLink, release: Release) -> None:
        """Bounded by twice the lease: an unconfirmed reservation is gone by then, acknowledged or not. A worker that
        has moved meanwhile is asked where it is now."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * LEASE_S
        request = ReleaseOrder(key=release.order, cause=_CAUSE, undo=release.undo)
        while loop.time() < deadline:
            try:
                there = self._fleet.links.get(link.name, link)
                await there.send(request)
            except HawkerError:
                await asyncio.sleep(RETRY_S)
            else:
                return
        _logger.error("release.unacknowledged", worker=link.name, order=release.order, cause=_CAUSE)


_logger = get_logger()

"""Machines behind another proxy: what this one knows of them is what that one tells with its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.proxy.base import Failure
from hawker.proxy.places import Place
from hawker.proxy.settings import RouterSettings

TROUBLE_MOST_S = 30.0


class Far:
    """A worker's proxy, as the keeper of places there. `heard_at` is when it last answered, of the loop's clock."""

    def __init__(
        self, worker: str, settings: RouterSettings, lost: Callable[[str], None] = lambda worker: None
    ) -> None:
        """`lost` is told each time that it did not take a connection or did not answer."""
        self.worker = worker
        self.heard_at = asyncio.get_running_loop().time()
        self._settings = settings
        self._lost = lost
        self._troubles = 0

    @property
    def closing(self) -> bool:
        return False  # its own proxy sees to that

    def failed(self, place: Place, how: Failure) -> None:
        now = asyncio.get_running_loop().time()
        if how == "elsewhere":
            self.heard_at = now
            place.pool.rest(place.seat, now + self._settings.stale_s)
            return
        seconds = min(self._settings.trouble_s * 2**self._troubles, TROUBLE_MOST_S)
        self._troubles = min(self._troubles + 1, 10)
        place.pool.rest(place.seat, now + seconds)
        if how != "unhealthy":
            self._lost(self.worker)

    def answered(self, place: Place) -> None:
        self._troubles = 0
        self.heard_at = asyncio.get_running_loop().time()

    def heard(self, place: Place, load: bytes) -> None:
        """b"3/20/25": in flight, and the limits, which the row has."""
        count = load.partition(b"/")[0]
        if count.isdigit() and len(count) < 10:
            place.pool.told(place.seat, int(count), asyncio.get_running_loop().time())

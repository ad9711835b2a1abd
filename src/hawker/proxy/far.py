"""Machines behind another proxy: what this one knows of them is what that one tells with its answers."""

from __future__ import annotations

import asyncio

from hawker.proxy.base import Failure
from hawker.proxy.places import Place
from hawker.proxy.settings import RouterSettings

TROUBLE_MOST_S = 30.0


class Far:
    """A worker's proxy, as the keeper of places there."""

    def __init__(self, worker: str, settings: RouterSettings) -> None:
        self.worker = worker
        self._settings = settings
        self._troubles = 0

    @property
    def closing(self) -> bool:
        return False  # its own proxy sees to that

    def failed(self, place: Place, how: Failure) -> None:
        """A row that is wrong is not believed for a while; a silent proxy is left alone, for longer each time."""
        now = asyncio.get_running_loop().time()
        if how == "elsewhere":
            place.pool.rest(place.seat, now + self._settings.stale_s)
            return
        seconds = min(self._settings.trouble_s * 2**self._troubles, TROUBLE_MOST_S)
        self._troubles = min(self._troubles + 1, 10)
        place.pool.rest(place.seat, now + seconds)

    def answered(self, place: Place) -> None:
        self._troubles = 0

    def heard(self, place: Place, load: bytes) -> None:
        """b"3/20/25": in flight, and the limits, which the row has."""
        count = load.partition(b"/")[0]
        if count.isdigit() and len(count) < 10:
            place.pool.told(place.seat, int(count), asyncio.get_running_loop().time())

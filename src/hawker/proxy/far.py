"""Machines behind another proxy: what this one knows of them is what that one tells with its answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hawker.proxy.base import Address, Failure
from hawker.proxy.places import Place
from hawker.proxy.settings import RouterSettings
from hawker.proxy.trouble import Trouble
from hawker.proxy.waking import Looking, connects

LOOK_MOST_S = 120.0
"""Later it is found by the requests themselves."""


class Far:
    """A worker's proxy, as the keeper of places there. One where nobody listens is looked at until somebody does."""

    def __init__(self, worker: str, settings: RouterSettings, looking: Looking) -> None:
        self.worker = worker
        self._settings = settings
        self._looking = looking
        self._look: asyncio.Task[None] | None = None
        self._away: dict[Place, None] = {}
        self._trouble = Trouble(settings.trouble_s)

    @property
    def closing(self) -> bool:
        return False  # its own proxy sees to that

    def failed(self, place: Place, how: Failure) -> None:
        """A row that is wrong is not believed for a while; a silent proxy is left alone, for longer each time."""
        now = asyncio.get_running_loop().time()
        if how == "elsewhere":
            place.pool.rest(place.seat, now + self._settings.stale_s)
            return
        place.pool.rest(place.seat, self._trouble.failed(now), spare=how != "refused")
        if how == "refused":
            self._away[place] = None
            if self._look is None:
                self._look = asyncio.get_running_loop().create_task(
                    self._until_back(place.address), name=f"look at {self.worker}"
                )

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _until_back(self, address: Address) -> None:
        """What it keeps is not left alone any longer than it is away. If it is there, who refused was a machine."""
        try:
            if not await connects(address):
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_MOST_S):
                        await self._looking.until_listening((address,))
                        self._trouble.over()
                        for place in self._away:
                            place.pool.rest(place.seat, 0.0)
                            place.room.all()
        finally:
            self._away = {}
            self._look = None

    def answered(self, place: Place) -> None:
        self._trouble.over()

    def heard(self, place: Place, load: bytes) -> None:
        """b"3/20/25": in flight, and the limits, which the row has."""
        count = load.partition(b"/")[0]
        if count.isdigit() and len(count) < 10:
            place.pool.told(place.seat, int(count), asyncio.get_running_loop().time())

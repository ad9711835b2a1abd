"""Machines behind another proxy: what this one knows of them is what that one tells with its answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hawker.proxy.base import Address, Failure
from hawker.proxy.places import Place
from hawker.proxy.settings import RouterSettings
from hawker.proxy.trouble import Trouble
from hawker.proxy.waking import Looking

LOOK_MOST_S = 120.0
"""Then requests try it again, whatever looks have found."""
LOOK_S = 0.25
ANSWER_S = 2.0
"""A proxy that is only busy answers within that."""


class Far:
    """A worker's proxy, as the keeper of places there. One that refuses connections, or takes them and says nothing, is
    looked at until it answers; it is `away` so long."""

    def __init__(self, worker: str, settings: RouterSettings, looking: Looking) -> None:
        self.worker = worker
        self._settings = settings
        self._looking = looking
        self._look: asyncio.Task[None] | None = None
        self._failed: dict[Place, None] = {}  # since it is looked at
        self.away = False
        self._trouble = Trouble(settings.trouble_s)

    @property
    def closing(self) -> bool:
        return False  # its own proxy sees to that

    def failed(self, place: Place, how: Failure) -> None:
        """A row that is wrong is not believed for a while. What broke or was silent is left alone, for longer each
        time; if it is the proxy that is silent, until it answers again."""
        now = asyncio.get_running_loop().time()
        if how == "elsewhere":
            place.pool.rest(place.seat, now + self._settings.stale_s)
            return
        until = self._trouble.failed(now)
        if how in ("refused", "timeout"):
            self._failed[place] = None
            if self._look is None:
                self._look = asyncio.get_running_loop().create_task(
                    self._until_back(place.address), name=f"look at {self.worker}"
                )
            elif self.away:
                until = now + LOOK_MOST_S
        place.pool.rest(place.seat, until)

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _until_back(self, address: Address) -> None:
        """If it is there, what failed was a machine. If not, no user's request should be what finds out."""
        try:
            if await answers(address):
                return
            self.away = True
            now = asyncio.get_running_loop().time()
            for place in self._failed:
                place.pool.rest(place.seat, now + LOOK_MOST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_MOST_S):
                    await self._looking.until_listening((address,))
                    while not await answers(address):  # noqa: ASYNC110  # it is not in this process
                        await asyncio.sleep(LOOK_S)
            self._trouble.over()
            for place in self._failed:
                place.pool.rest(place.seat, 0.0)
                place.room.all()
        finally:
            self.away, self._failed, self._look = False, {}, None

    def answered(self, place: Place) -> None:
        self._trouble.over()

    def heard(self, place: Place, load: bytes) -> None:
        """b"3/20/25": in flight, and the limits, which the row has."""
        count = load.partition(b"/")[0]
        if count.isdigit() and len(count) < 10:
            place.pool.told(place.seat, int(count), asyncio.get_running_loop().time())


async def answers(address: Address) -> bool:
    """Whether a proxy says anything on its backhaul, if only that the caller is a stranger."""
    with suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"GET / HTTP/1.1\r\nhost: backhaul\r\nconnection: close\r\n\r\n")
                return bool(await reader.read(1))
            finally:
                writer.close()
    return False

"""What all routes of a proxy have in common: what it knows of its own region and of others, and how machines start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.core.routing import Seat
from hawker.errors import HawkerError, StoreError
from hawker.model import door as words
from hawker.proxy.base import Refused, Waiting
from hawker.proxy.groups.group import Site
from hawker.proxy.groups.places import Place
from hawker.proxy.machines.door import Door
from hawker.proxy.routing.abroad import Abroad
from hawker.proxy.settings import RouterSettings
from hawker.proxy.sites import Sites
from hawker.telemetry import get_logger

FORGET_S = 1.0
"""How long a machine that was asked to start is taken for one on its way after that was answered: its row comes."""


class NotYet(Refused):
    """Nothing is known of it here, and that says nothing: who lost its catalog has to catch up first."""


class Common:
    """Made on the running loop."""

    def __init__(
        self,
        sites: Sites,
        settings: RouterSettings,
        random: Callable[[], float],
        complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """`complete`: whether what the catalog does not show is not there (`hawker.catalog.gossip.readiness`)."""
        self.sites = sites
        self._complete = complete
        self.settings = settings
        self.abroad = Abroad(sites, settings, random)
        self.now = asyncio.get_running_loop().time
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def close(self) -> None:
        sites = self.sites
        tasks = [*self._tasks, *(door.open() for door in sites.doors.values() if door.opening)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(far.close() for far in sites.fars.values()), return_exceptions=True)

    def find(self, app: str) -> Site | None:
        """An app's that was asked for before. Raises `Refused`."""
        try:
            return self.sites.find(app)
        except StoreError as error:
            raise _unreadable(error) from error

    def load(self, app: str) -> Site | None:
        """An app's; None when there is no such app. Raises `Refused`."""
        try:
            return self.sites.load(app)
        except StoreError as error:
            raise _unreadable(error) from error

    def site(self, app: str) -> Site:
        """The same for a user who asks for it. Raises `Refused`."""
        site = self.load(app)
        if site is None:
            raise self.not_there(f"no app is called {app}")
        return site

    def not_there(self, message: str, code: str = "PR01", status: int = 404) -> Refused:
        """The answer where nothing is known of what was asked for; 503 while that says nothing."""
        if self.complete():
            return Refused(status, code, message)
        return NotYet(503, code, f"{message} so far: this proxy has yet to catch up with its region", retry_after_s=1)

    def complete(self) -> bool:
        try:
            return self._complete()
        except StoreError:
            return False

    def is_here(self, site: Site, machine: str) -> bool:
        known = site.app.machines.get(machine)
        return known is not None and known.worker == self.sites.worker

    def must_be_here(self, site: Site, machine: str) -> None:
        """Raises `Refused`."""
        if not self.is_here(site, machine):
            raise Refused(421, "elsewhere", f"machine {machine} is not on worker {self.sites.worker}")

    def start_beside(self, seat: Seat, app: str, request: Waiting) -> None:
        """Have a machine started for requests to come."""
        place: Place = seat.data
        if isinstance(place.keeper, Door):
            place.keeper.open(request)
            return
        if not seat.waking:
            place.pool.waking(seat, True)
            task = asyncio.get_running_loop().create_task(
                self._wake_far(place, app, request), name=f"wake {seat.machine}"
            )
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _wake_far(self, place: Place, app: str, request: Waiting) -> None:
        directory = self.sites.directory
        machine = directory.find(app)
        known = machine.machines.get(place.machine) if machine else None
        worker = directory.workers.get(known.worker) if known else None
        loop = asyncio.get_running_loop()
        try:
            if worker is not None:
                wish = words.Wake(app=app, machine=place.machine, request=request.id, trace=request.trace)
                await self.sites.workers.of(worker).wake(wish)
        except HawkerError as error:
            _logger.info("router.not_woken", machine=place.machine, error=error.message, cause=words.AUTOSTART)
            place.pool.rest(place.seat, loop.time() + self.settings.start_again_s)
        finally:
            loop.call_later(FORGET_S, place.pool.waking, place.seat, False)


def _unreadable(error: StoreError) -> Refused:
    return Refused(503, "PR01", f"the catalog cannot be read: {error.message}", retry_after_s=1)


_logger = get_logger()

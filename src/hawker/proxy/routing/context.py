"""What all routes of a proxy share: what it knows of its own region and of others, and how machines start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.core.routing import PoolEntry
from hawker.errors import HawkerError, StoreError
from hawker.model import door as words
from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.apps.routed_app import RoutedApp
from hawker.proxy.base import Refused, Waiting
from hawker.proxy.machines.door import Door
from hawker.proxy.routing.other_regions import OtherRegions
from hawker.proxy.settings import RouterSettings
from hawker.telemetry import get_logger

FORGET_S = 1.0
"""For this long after the answer a machine that was asked to start counts as on its way: its row comes meanwhile."""


class NotYet(Refused):
    """Nothing is known of the app here, and that says nothing: a proxy that lost its catalog has to catch up first."""


class RoutingContext:
    """Made on the running loop."""

    def __init__(
        self,
        app_table: AppTable,
        settings: RouterSettings,
        random: Callable[[], float],
        complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """`complete`: whether what the catalog does not show is not there (`hawker.catalog.gossip.readiness`)."""
        self.app_table = app_table
        self._complete = complete
        self.settings = settings
        self.other_regions = OtherRegions(app_table, settings, random)
        self.now = asyncio.get_running_loop().time
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def close(self) -> None:
        app_table = self.app_table
        tasks = [*self._tasks, *(door.open() for door in app_table.doors.values() if door.opening)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(
            *tasks,
            *(remote_proxy.close() for remote_proxy in app_table.remote_proxies.values()),
            return_exceptions=True,
        )

    def find(self, app: str) -> RoutedApp | None:
        """The app, if it was asked for before. Raises `Refused`."""
        try:
            return self.app_table.find(app)
        except StoreError as error:
            raise _unreadable(error) from error

    def load(self, app: str) -> RoutedApp | None:
        """The app; None when there is no such app. Raises `Refused`."""
        try:
            return self.app_table.load(app)
        except StoreError as error:
            raise _unreadable(error) from error

    def routed(self, app: str) -> RoutedApp:
        """The app, for a user who asks for it. Raises `Refused`."""
        routed = self.load(app)
        if routed is None:
            raise self.not_there(f"no app is called {app}")
        return routed

    def not_there(self, message: str, code: str = "PR01", status: int = 404) -> Refused:
        """The answer where nothing is known of what was asked for; 503 while this proxy has yet to catch up."""
        if self.complete():
            return Refused(status, code, message)
        return NotYet(503, code, f"{message} so far: this proxy has yet to catch up with its region", retry_after_s=1)

    def complete(self) -> bool:
        try:
            return self._complete()
        except StoreError:
            return False

    def is_here(self, routed: RoutedApp, machine: str) -> bool:
        known = routed.app.machines.get(machine)
        return known is not None and known.worker == self.app_table.worker

    def must_be_here(self, routed: RoutedApp, machine: str) -> None:
        """Raises `Refused`."""
        if not self.is_here(routed, machine):
            raise Refused(421, "elsewhere", f"machine {machine} is not on worker {self.app_table.worker}")

    def start_beside(self, entry: PoolEntry, app: str, request: Waiting) -> None:
        """Have a machine started for requests that will come."""
        endpoint: Endpoint = entry.data
        if isinstance(endpoint.owner, Door):
            endpoint.owner.open(request)
            return
        if not entry.waking:
            endpoint.pool.waking(entry, True)
            task = asyncio.get_running_loop().create_task(
                self._wake_far(endpoint, app, request), name=f"wake {entry.machine}"
            )
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _wake_far(self, endpoint: Endpoint, app: str, request: Waiting) -> None:
        index = self.app_table.index
        machine = index.find(app)
        known = machine.machines.get(endpoint.machine) if machine else None
        worker = index.workers.get(known.worker) if known else None
        loop = asyncio.get_running_loop()
        try:
            if worker is not None:
                wish = words.Wake(app=app, machine=endpoint.machine, request=request.id, trace=request.trace)
                await self.app_table.workers.of(worker).wake(wish)
        except HawkerError as error:
            _logger.info("router.not_woken", machine=endpoint.machine, error=error.message, cause=words.AUTOSTART)
            endpoint.pool.rest(endpoint.entry, loop.time() + self.settings.start_again_s)
        finally:
            loop.call_later(FORGET_S, endpoint.pool.waking, endpoint.entry, False)


def _unreadable(error: StoreError) -> Refused:
    return Refused(503, "PR01", f"the catalog cannot be read: {error.message}", retry_after_s=1)


_logger = get_logger()

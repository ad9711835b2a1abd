"""Puts a worker's idle machines to rest. `hawker.core.idling` decides what to stop; `hawker.proxy.machines.door` stops
it so that no request meets the stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.catalog.view import RowView
from hawker.core.idling import Close, Idler, Pace, Reopen, Running, Stop, Use
from hawker.core.pool_entries import COMING
from hawker.errors import StoreError
from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.routed_app import RoutedApp
from hawker.proxy.background.loop import BackgroundLoop
from hawker.proxy.machines.door import RUNNING, Door
from hawker.telemetry import get_logger

_APPS = "select distinct app from services where worker = ? and autostop not in ('', 'off') order by app"


class Idling(BackgroundLoop):
    def __init__(self, app_table: AppTable, view: RowView, random: Callable[[], float]) -> None:
        settings = app_table.settings
        super().__init__("autostop", settings.idle_look_s, random)
        self._app_table = app_table
        self._view = view
        self._pace = Pace(idle_s=settings.idle_s, drain_s=settings.drain_s, headroom=settings.headroom)
        self._idlers: dict[str, Idler] = {}
        self._failing: set[str] = set()  # apps

    async def look(self) -> None:
        """Look once at all apps that have machines here which may be stopped. Raises `StoreError`."""
        apps = [app for (app,) in self._view.rows(_APPS, (self._app_table.worker,))]
        for gone in sorted(self._idlers.keys() - set(apps)):
            self._reopen(self._idlers.pop(gone).closed)
        self._failing.intersection_update(apps)
        for app in apps:
            try:
                routed = self._app_table.load(app)
                if routed is not None:
                    await self._look_at(routed)
            except StoreError as error:
                _logger.warning("autostop.not_read", app=app, error=error.message, cause="local rule: autostop")
            except Exception:  # what goes wrong with one app is its own
                if app not in self._failing:
                    _logger.exception("autostop.fault", app=app, cause="a fault of ours")
                self._failing.add(app)
            else:
                self._failing.discard(app)
            await asyncio.sleep(0)  # with many apps, requests are served between two of them

    async def _look_at(self, routed: RoutedApp) -> None:
        name = routed.app.name
        idler = self._idlers.setdefault(name, Idler(name, self._pace))
        running, coming = self._seen(routed)
        closed = idler.closed
        wish = idler.look(asyncio.get_running_loop().time(), running, coming)
        if closed != idler.closed:  # it may take no requests now, and will be as good as any other
            self._reopen(closed)
        match wish:
            case Stop(machine=machine, how=how) if door := self._app_table.doors.get(machine):
                await door.rest(how)
            case Close(machine=machine) if door := self._app_table.doors.get(machine):
                door.keep_closed(True)
            case Reopen(machine=machine):
                self._reopen(machine)

    def _reopen(self, machine: str) -> None:
        door = self._app_table.doors.get(machine)
        if door is not None and not door.closing:
            door.keep_closed(False)

    def _seen(self, routed: RoutedApp) -> tuple[list[Running], bool]:
        """Which machines run, and whether one is on its way up. A machine of a worker that may be gone counts as
        neither: nobody can use it, and it would be on its way for ever."""
        running: list[Running] = []
        coming = False
        doubted = self._app_table.index.doubted - {self._app_table.worker}
        for machine in routed.app.machines.values():
            if machine.worker in doubted:
                continue
            door = self._door(machine.id, machine.worker)
            state = door.state if door else machine.state
            if (door and door.opening) or state in COMING:
                coming = True
            elif state == RUNNING and not machine.cordoned and machine.services:
                uses = []
                for service in machine.services:
                    endpoint = routed.endpoints.get((machine.id, service.internal_port))
                    uses.append(
                        Use(
                            in_flight=endpoint.entry.in_flight if endpoint else 0,
                            soft=service.concurrency.soft_limit,
                            autostop=service.autostop,
                            minimum=service.min_machines_running,
                        )
                    )
                used_at = door.used_at if door else 0.0
                running.append(Running.of(machine.id, uses, used_at, mine=door is not None))
        return running, coming

    def _door(self, machine: str, worker: str) -> Door | None:
        """Stop only machines of this proxy's own worker: nobody else knows all that is in flight there."""
        return self._app_table.doors.get(machine) if worker == self._app_table.worker else None


_logger = get_logger()

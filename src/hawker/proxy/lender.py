"""The machines whose doors this proxy has, lent to a program that carries requests past it."""

from __future__ import annotations

import asyncio

from hawker.core.routing import lendable
from hawker.core.seats import Seat
from hawker.errors import StoreError
from hawker.proxy.groups.group import Group
from hawker.proxy.groups.places import Place
from hawker.proxy.known.directory import App, Machine
from hawker.proxy.lending import Borrower, Lent, Offer
from hawker.proxy.machines.door import RUNNING, Door
from hawker.proxy.sites import Sites


class SiteLender:
    """`hawker.proxy.lending.Lender`."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        sites.directory.on_machine.append(self._machine)
        sites.directory.on_app.append(self._app)
        sites.on_door.append(self._door)

    def lend_to(self, borrower: Borrower | None) -> None:
        self._sites.lend_to(borrower)

    def offer(self, app: str, port: int) -> Offer | None:
        try:
            site = self._sites.load(app)
        except StoreError:
            return None
        found = site.at(port) if site else None
        if found is None:
            return None
        group, service = found
        machines: dict[str, Lent] = {}
        if not group.room.before(""):  # they were there before those to come
            for machine, seat in group.pool.seats.items():
                place: Place = seat.data
                places = _places(seat)
                if places <= 0 or group.room.before(machine):
                    continue
                if isinstance(place.keeper, Door) and not place.keeper.closing:
                    machines[machine] = Lent(place.address, places)
        return Offer(service, machines)

    def filled(self, app: str, port: int, machine: str, places: int, now: int, moved: bool) -> None:
        group = self._group(app, port)
        seat = group.pool.seats.get(machine) if group else None
        if group is None or seat is None:
            return
        before = seat.others
        if (places, now) != (seat.lent, before):
            group.pool.lend(seat, places, now)
            for _ in range(before - now):
                group.room.one(machine)
        if (moved or now) and isinstance(seat.data.keeper, Door):
            seat.data.keeper.used_at = asyncio.get_running_loop().time()

    def refused(self, app: str, port: int, machine: str) -> None:
        group = self._group(app, port)
        seat = group.pool.seats.get(machine) if group else None
        if seat is not None:
            seat.data.keeper.failed(seat.data, "refused")

    def _group(self, app: str, port: int) -> Group | None:
        try:
            site = self._sites.find(app)
        except StoreError:
            return None
        found = site.at(port) if site else None
        return found[0] if found else None

    def _machine(self, app: App, before: Machine | None, now: Machine | None) -> None:
        self._changed(app.name)

    def _app(self, app: App) -> None:
        self._changed(app.name)

    def _door(self, door: Door) -> None:
        self._changed(door.machine.app)

    def _changed(self, app: str) -> None:
        if self._sites.borrower is not None:
            self._sites.borrower.changed(app)


def _places(seat: Seat) -> int:
    """That may be lent of a machine, beside those that requests from here have."""
    row = seat.row
    if seat.home is None or row.state != RUNNING or not row.healthy:
        return 0
    if row.cordoned or seat.closing or seat.waking or seat.rests_until:
        return 0
    most = lendable(row.soft, row.hard)
    return most if seat.lent == most or not row.hard else min(most, row.hard - seat.own)

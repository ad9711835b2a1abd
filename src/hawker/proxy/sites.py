"""The apps that this proxy serves: which of their machines serve which public ports, and who keeps each machine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

from hawker.core.routing import Candidate, Pool
from hawker.proxy import fields
from hawker.proxy.base import NO_UPSTREAMS, Address, Header, Upstreams
from hawker.proxy.groups.group import Group, Site, joined, shape_of
from hawker.proxy.groups.places import Place
from hawker.proxy.known.directory import App, Directory, Machine, Worker
from hawker.proxy.known.published import Served
from hawker.proxy.lending import Borrower
from hawker.proxy.machines.calls import Workers
from hawker.proxy.machines.door import Door
from hawker.proxy.machines.far import Far
from hawker.proxy.machines.waking import Looking
from hawker.proxy.settings import RouterSettings
from hawker.sockets import Sockets

LOOKED_AT_MOST = 64
"""Apps, whether they may be dropped, for each one that is loaded."""


class Sites:
    """All of them. `worker` is the one whose doors this proxy has, "" for none; `region` is this proxy's."""

    def __init__(
        self,
        directory: Directory,
        workers: Workers,
        settings: RouterSettings,
        *,
        worker: str,
        region: str,
        token: str,
        random: Callable[[], float],
        sockets: Sockets | None = None,
        upstreams: Upstreams = NO_UPSTREAMS,
    ) -> None:
        self.directory = directory
        self.workers = workers
        self.settings = settings
        self.worker = worker
        self.region = region
        self.doors: dict[str, Door] = {}  # by machine
        self.fars: dict[str, Far] = {}  # by worker
        self.upstreams = upstreams
        self.looking = Looking(sockets or Sockets(), self.upstreams.offer)
        self.borrower: Borrower | None = None
        self.on_door: list[Callable[[Door], None]] = []
        self.on_let_go: list[Callable[[Address, bool], None]] = [self.upstreams.let_go]
        """Told of addresses of machines that are put to rest, or are there no more, and whether they rest already."""
        self._token = (fields.TOKEN, token.encode())
        self._random = random
        self._sites: OrderedDict[str, Site] = OrderedDict()
        directory.on_machine.append(self._machine)
        directory.on_app.append(self._app)
        directory.on_worker.append(self._worker)
        directory.on_doubt.append(self._doubt)

    def find(self, app: str) -> Site | None:
        """An app's that was loaded before. Raises `StoreError`."""
        known = self.directory.find(app)
        return self._site(known) if known is not None else None

    def load(self, app: str) -> Site | None:
        """An app's; None when there is no such app. Raises `StoreError`."""
        known = self.directory.load(app)
        return self._site(known) if known is not None else None

    def _site(self, app: App) -> Site:
        site = self._sites.get(app.name)
        if site is None or site.app is not app:
            site = self._sites[app.name] = Site(app)
            self._regroup(site)
            if len(self._sites) > self.settings.apps:
                self._drop_some(site)
        site.used = True
        return site

    def far(self, worker: str) -> Far:
        """Of another worker's proxy."""
        found = self.fars.get(worker)
        if found is None:
            found = Far(worker, self.settings, self.looking, lambda: self.places_at(worker), self.upstreams)
            self.fars[worker] = found
        return found

    def lend_to(self, borrower: Borrower | None) -> None:
        """Machines that run are lent to this one from now on, which is to give them back before they are stopped."""
        self.borrower = borrower

    def rests(self, machine: str, state: str) -> None:
        """Its worker says so, before the catalog does. Called inside the worker's commit: looked at after it."""
        if door := self.doors.get(machine):
            asyncio.get_running_loop().call_soon(door.rests, state)

    # --- what is not needed ------------------------------------------------------------------------------------------

    def _drop_some(self, new: Site) -> None:
        """Apps that nobody has asked for in a while, for what it costs to look at a few. Those that stay are looked at
        again after all others (the second chance of a page: Corbató 1968)."""
        for _ in range(min(LOOKED_AT_MOST, len(self._sites) - 1)):
            if len(self._sites) <= self.settings.apps:
                return
            name, site = next(iter(self._sites.items()))
            if site is not new and not site.used and not site.busy and not self._is_door_of(site):
                self._drop(name, site)
            else:
                site.used = site is new
                self._sites.move_to_end(name)

    def _is_door_of(self, site: Site) -> bool:
        """When a machine was last used, and how it does, only its door knows."""
        if any(machine.worker == self.worker for machine in site.app.machines.values()):
            return True
        doors = [place.keeper for place in site.places.values() if isinstance(place.keeper, Door)]
        return any(door.opening or door.closing for door in doors)

    def _drop(self, name: str, site: Site) -> None:
        del self._sites[name]
        self.directory.forget(name)
        site.dropped = True
        site.groups = {}
        site.services_changed()
        places, site.places = site.places, {}
        self._unseat(site, places)

    # --- what changes ------------------------------------------------------------------------------------------------

    def _machine(self, app: App, before: Machine | None, now: Machine | None) -> None:
        site = self._sites.get(app.name)
        if site is None or site.app is not app:
            return
        services_before = before.services if before else ()
        services_now = now.services if now else ()
        moved = before is not None and now is not None and before.worker != now.worker
        if services_before != services_now or moved:
            site.services_changed()
            machine = now or before
            assert machine is not None  # something has changed
            if moved or shape_of(app.machines.values()) == site.shape:
                self._reseat(site, machine.id, now)
            else:
                self._regroup(site)
        elif now is not None:
            self._reseat(site, now.id, now)
        elif before is not None:
            self._reseat(site, before.id, None)
        for group in {id(group): group for group in site.groups.values()}.values():
            group.room.all()

    def _app(self, app: App) -> None:
        if app.gone:
            site = self._sites.pop(app.name, None)
            if site:
                site.services_changed()
                for group in site.groups.values():
                    group.room.all()

    def _worker(self, before: Worker | None, now: Worker | None) -> None:
        """Its machines are reached elsewhere, or in another way."""
        name = (now or before).name  # type: ignore[union-attr]
        addresses = {(worker.host, worker.proxy_port) if worker else None for worker in (before, now)}
        if name in self.fars and len(addresses) > 1:
            self.fars[name].moved()
        for site in self._sites.values():
            for machine in [machine for machine in site.app.machines.values() if machine.worker == name]:
                self._reseat(site, machine.id, machine)

    def _doubt(self, worker: str) -> None:
        """Whether it is there is in doubt now, or no more."""
        on = self._doubted(worker)
        for place in self.places_at(worker):
            place.pool.doubt(place.seat, on)
            if not on:
                place.room.all()

    def _doubted(self, worker: str) -> bool:
        return worker in self.directory.doubted and worker != self.worker  # what its own door knows is no hearsay

    def places_at(self, worker: str) -> Iterator[Place]:
        """Of all machines that are known to be on this worker."""
        for site in self._sites.values():
            for (machine, _), place in site.places.items():
                known = site.app.machines.get(machine)
                if known is not None and known.worker == worker:
                    yield place

    # --- groups and places -------------------------------------------------------------------------------------------

    def _regroup(self, site: Site) -> None:
        """Make the groups anew. Places stay, and what is in flight at them."""
        machines = site.app.machines.values()
        site.shape = shape_of(machines)
        before = {id(group): group for group in site.groups.values()}
        site.groups = {}
        for ports in joined(site.shape):
            group = Group(site.app.name, self._pool(site.app))
            site.groups.update(dict.fromkeys(ports, group))
        old, site.places = site.places, {}
        for machine in machines:
            self._seat(site, machine, old)
        self._unseat(site, old)
        for group in before.values():
            group.room.all()

    def _pool(self, app: App) -> Pool:
        return Pool(app.name, self.region, self.settings.regions, random=self._random)

    def _reseat(self, site: Site, machine: str, now: Machine | None) -> None:
        old = {key: site.places.pop(key) for key in [key for key in site.places if key[0] == machine]}
        if now is not None:
            self._seat(site, now, old)
        self._unseat(site, old)

    def _seat(self, site: Site, machine: Machine, old: dict[tuple[str, int], Place]) -> None:
        """Give a machine its places; those that it keeps are taken out of `old`."""
        reached = self._reached(machine)
        if reached is None:
            return
        door, far, worker = reached
        taken: set[int] = set()
        if door is not None:
            door.row(machine)
        for service in machine.services:
            group = site.groups.get(service.internal_port)
            if group is None or id(group) in taken:
                continue
            taken.add(id(group))
            key = machine.id, service.internal_port
            row = _candidate(machine, service)
            seat = group.pool.put(door.candidate(row) if door else row)
            place = old.pop(key, None) or site.parted.pop(key, None)
            if place is None and seat.data is not None and seat.data.pool is group.pool:
                place = seat.data  # of another port inside, or of a machine that was gone meanwhile
                for its in [its for its, other in old.items() if other is place]:
                    del old[its]
            keeper = door or far
            assert keeper is not None  # one of them
            addresses = self._addresses(machine, service, worker) if door else ((worker.host, worker.proxy_port),)
            headers = () if door else self.backhaul(site.app.name, machine.id)
            if place is None:
                place = Place(group.pool, seat, group.room, keeper, addresses, headers)
            else:  # what is in flight there stays counted, by the same place
                if place.pool is not group.pool:
                    for _ in range(place.seat.own):
                        group.pool.enter(seat)
                    place.pool, place.room = group.pool, group.room
                before = place.keeper
                place.reach(keeper, addresses, headers)
                if isinstance(before, Door):
                    self._take_from(before, place)
            if door is not None:
                self.doors[machine.id] = door
                door.places[service.internal_port] = place
            seat.data = place
            place.seat = seat
            site.places[key] = place
            group.pool.doubt(seat, self._doubted(machine.worker))
            if door is not None:  # it may be a seat that knows nothing of a start or a stop under way
                group.pool.waking(seat, door.opening)
                group.pool.closing(seat, seat.closing or door.closing)
            elif seat.waking and machine.state == "started":
                group.pool.waking(seat, False)
            if far is not None:
                far.seated(place)

    def _unseat(self, site: Site, places: dict[tuple[str, int], Place]) -> None:
        for place in places.values():
            place.pool.remove(place.machine)
            door = self.doors.get(place.machine)
            if door is not None and place.keeper is door:
                self._hang_up(place, False)
                self._take_from(door, place)
        site.parted = {key: place for key, place in (site.parted | places).items() if place.seat.own}

    def _take_from(self, door: Door, place: Place) -> None:
        """A door goes with its last place."""
        for port in [port for port, its in door.places.items() if its is place]:
            del door.places[port]
        if not door.places and not door.opening and not door.closing and self.doors.get(place.machine) is door:
            del self.doors[place.machine]

    def _reached(self, machine: Machine) -> tuple[Door | None, Far | None, Worker] | None:
        worker = self.directory.workers.get(machine.worker)
        if worker is None:
            return None
        if machine.worker != self.worker and worker.proxy_port:
            return None, self.far(worker.name), worker
        door = self.doors.get(machine.id)
        calls = self.workers.of(worker)
        if door is None:  # it is kept with its first place
            door = Door(machine, calls, self.settings, self.looking, self._door_changed, self._withdraw, self._hang_up)
        door.calls = calls
        return door, None, worker

    def _addresses(self, machine: Machine, service: Served, worker: Worker) -> tuple[Address, ...]:
        """A program of the host itself listens on the host's own port. A machine with an address of its own is reached
        there from its host, from others by the port that its host has for it. That one leads to the machine's IPv4
        address: a program that listens on 0.0.0.0, as most do, takes no connection at the private one."""
        if machine.worker != self.worker:
            return ((worker.host, service.host_port or service.internal_port),)
        if service.host_port == service.internal_port:
            return (("127.0.0.1", service.internal_port),)
        published = (("127.0.0.1", service.host_port),) if service.host_port else ()
        return ((machine.private_ip, service.internal_port), *published)

    def backhaul(self, app: str, machine: str) -> tuple[Header, ...]:
        """What goes to another proxy with a request; the public port comes after it."""
        return (self._token, (fields.APP, app.encode()), (fields.MACHINE, machine.encode()))

    def _door_changed(self, door: Door) -> None:
        if not door.places and not door.closing and self.doors.get(door.machine.id) is door:
            del self.doors[door.machine.id]  # its machine has gone meanwhile
        for place in door.places.values():
            place.room.all()
        for told in self.on_door:
            told(door)

    def _hang_up(self, place: Place, asleep: bool) -> None:
        for address in place.addresses:
            for told in self.on_let_go:
                told(address, asleep)

    async def _withdraw(self, machine: str) -> bool:
        return self.borrower is None or await self.borrower.withdraw(machine)


def _candidate(machine: Machine, service: Served) -> Candidate:
    limits = service.concurrency
    return Candidate(
        machine=machine.id,
        region=machine.region,
        state=machine.state,
        cordoned=machine.cordoned,
        healthy=machine.passes(service.internal_port),
        soft=limits.soft_limit,
        hard=limits.hard_limit,
        autostart=service.autostart,
    )

"""The apps that this proxy serves: which of their machines serve which public ports, and who owns each endpoint."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

from hawker.core.routing import Candidate, Pool
from hawker.proxy import fields
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.apps.routed_app import EndpointGroup, RoutedApp, joined, shape_of
from hawker.proxy.base import NO_UPSTREAMS, Address, Header, Upstreams
from hawker.proxy.catalog_view.index import App, CatalogIndex, Machine, Worker
from hawker.proxy.catalog_view.published import Served
from hawker.proxy.delegation import Delegate
from hawker.proxy.machines.calls import Workers
from hawker.proxy.machines.door import Door
from hawker.proxy.machines.listen_probe import ListenProbe
from hawker.proxy.machines.remote_proxy import RemoteProxy
from hawker.proxy.settings import RouterSettings
from hawker.sockets import Sockets

LOOKED_AT_MOST = 64
"""How many apps are checked, whether they may be dropped, for each app that is loaded."""


class AppTable:
    """All apps in memory. `worker` is the one whose doors this proxy has, "" for none; `region` is this proxy's."""

    def __init__(
        self,
        index: CatalogIndex,
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
        self.index = index
        self.workers = workers
        self.settings = settings
        self.worker = worker
        self.region = region
        self.doors: dict[str, Door] = {}  # by machine
        self.remote_proxies: dict[str, RemoteProxy] = {}  # by worker
        self.upstreams = upstreams
        self.listen_probe = ListenProbe(sockets or Sockets(), self.upstreams.offer)
        self.delegate: Delegate | None = None
        self.on_door: list[Callable[[Door], None]] = []
        self.on_let_go: list[Callable[[Address, bool], None]] = [self.upstreams.let_go]
        """These are told of a machine's address when the machine is put to rest or is gone, and whether it rests
        already."""
        self._token = (fields.TOKEN, token.encode())
        self._random = random
        self._app_table: OrderedDict[str, RoutedApp] = OrderedDict()
        index.on_machine.append(self._machine)
        index.on_app.append(self._app)
        index.on_worker.append(self._worker)
        index.on_doubt.append(self._doubt)

    def find(self, app: str) -> RoutedApp | None:
        """The app, if it was loaded before. Raises `StoreError`."""
        known = self.index.find(app)
        return self._routed_app(known) if known is not None else None

    def load(self, app: str) -> RoutedApp | None:
        """The app, read if need be; None when there is no such app. Raises `StoreError`."""
        known = self.index.load(app)
        return self._routed_app(known) if known is not None else None

    def _routed_app(self, app: App) -> RoutedApp:
        routed = self._app_table.get(app.name)
        if routed is None or routed.app is not app:
            routed = self._app_table[app.name] = RoutedApp(app)
            self._regroup(routed)
            if len(self._app_table) > self.settings.apps:
                self._drop_some(routed)
        routed.used = True
        return routed

    def remote_proxy(self, worker: str) -> RemoteProxy:
        """The remote proxy of another worker."""
        found = self.remote_proxies.get(worker)
        if found is None:
            found = RemoteProxy(
                worker, self.settings, self.listen_probe, lambda: self.endpoints_at(worker), self.upstreams
            )
            self.remote_proxies[worker] = found
        return found

    def delegate_to(self, delegate: Delegate | None) -> None:
        """From now on machines that run are delegated to this one, which gives them back before they are stopped."""
        self.delegate = delegate

    def rests(self, machine: str, state: str) -> None:
        """The machine's worker says that it comes to rest, before the catalog does. The worker calls this inside its
        commit; the door looks at it after that."""
        if door := self.doors.get(machine):
            asyncio.get_running_loop().call_soon(door.rests, state)

    # --- what is not needed ------------------------------------------------------------------------------------------

    def _drop_some(self, new: RoutedApp) -> None:
        """Drop apps that nobody has asked for in a while. Each call checks only a few; those that stay are checked
        again after all others (the second chance of a page: Corbató 1968)."""
        for _ in range(min(LOOKED_AT_MOST, len(self._app_table) - 1)):
            if len(self._app_table) <= self.settings.apps:
                return
            name, routed = next(iter(self._app_table.items()))
            if routed is not new and not routed.used and not routed.busy and not self._is_door_of(routed):
                self._drop(name, routed)
            else:
                routed.used = routed is new
                self._app_table.move_to_end(name)

    def _is_door_of(self, routed: RoutedApp) -> bool:
        """Whether this proxy has a door to one of the app's machines: only the door knows when the machine was last
        used, and how it does."""
        if any(machine.worker == self.worker for machine in routed.app.machines.values()):
            return True
        doors = [endpoint.owner for endpoint in routed.endpoints.values() if isinstance(endpoint.owner, Door)]
        return any(door.opening or door.closing for door in doors)

    def _drop(self, name: str, routed: RoutedApp) -> None:
        del self._app_table[name]
        self.index.forget(name)
        routed.dropped = True
        routed.groups = {}
        routed.services_changed()
        endpoints, routed.endpoints = routed.endpoints, {}
        self._remove_endpoints(routed, endpoints)

    # --- what changes ------------------------------------------------------------------------------------------------

    def _machine(self, app: App, before: Machine | None, now: Machine | None) -> None:
        routed = self._app_table.get(app.name)
        if routed is None or routed.app is not app:
            return
        services_before = before.services if before else ()
        services_now = now.services if now else ()
        moved = before is not None and now is not None and before.worker != now.worker
        if services_before != services_now or moved:
            routed.services_changed()
            machine = now or before
            assert machine is not None  # something has changed
            if moved or shape_of(app.machines.values()) == routed.shape:
                self._update_endpoints(routed, machine.id, now)
            else:
                self._regroup(routed)
        elif now is not None:
            self._update_endpoints(routed, now.id, now)
        elif before is not None:
            self._update_endpoints(routed, before.id, None)
        for group in {id(group): group for group in routed.groups.values()}.values():
            group.wait_queue.all()

    def _app(self, app: App) -> None:
        if app.gone:
            routed = self._app_table.pop(app.name, None)
            if routed:
                routed.services_changed()
                for group in routed.groups.values():
                    group.wait_queue.all()

    def _worker(self, before: Worker | None, now: Worker | None) -> None:
        """This worker's machines are reached at another address, or in another way."""
        name = (now or before).name  # type: ignore[union-attr]
        addresses = {(worker.host, worker.proxy_port) if worker else None for worker in (before, now)}
        if name in self.remote_proxies and len(addresses) > 1:
            self.remote_proxies[name].moved()
        for routed in self._app_table.values():
            for machine in [machine for machine in routed.app.machines.values() if machine.worker == name]:
                self._update_endpoints(routed, machine.id, machine)

    def _doubt(self, worker: str) -> None:
        """Membership says that this worker may be gone, or that it is back."""
        on = self._doubted(worker)
        for endpoint in self.endpoints_at(worker):
            endpoint.pool.doubt(endpoint.entry, on)
            if not on:
                endpoint.wait_queue.all()

    def _doubted(self, worker: str) -> bool:
        return worker in self.index.doubted and worker != self.worker  # its own door knows better than membership

    def endpoints_at(self, worker: str) -> Iterator[Endpoint]:
        """The endpoints of all machines that are known to be on this worker."""
        for routed in self._app_table.values():
            for (machine, _), endpoint in routed.endpoints.items():
                known = routed.app.machines.get(machine)
                if known is not None and known.worker == worker:
                    yield endpoint

    # --- groups and places -------------------------------------------------------------------------------------------

    def _regroup(self, routed: RoutedApp) -> None:
        """Make the app's groups again. Endpoints stay, and what is in flight at them."""
        machines = routed.app.machines.values()
        routed.shape = shape_of(machines)
        before = {id(group): group for group in routed.groups.values()}
        routed.groups = {}
        for ports in joined(routed.shape):
            group = EndpointGroup(routed.app.name, self._pool(routed.app))
            routed.groups.update(dict.fromkeys(ports, group))
        old, routed.endpoints = routed.endpoints, {}
        for machine in machines:
            self._add_endpoints(routed, machine, old)
        self._remove_endpoints(routed, old)
        for group in before.values():
            group.wait_queue.all()

    def _pool(self, app: App) -> Pool:
        return Pool(app.name, self.region, self.settings.regions, random=self._random)

    def _update_endpoints(self, routed: RoutedApp, machine: str, now: Machine | None) -> None:
        old = {key: routed.endpoints.pop(key) for key in [key for key in routed.endpoints if key[0] == machine]}
        if now is not None:
            self._add_endpoints(routed, now, old)
        self._remove_endpoints(routed, old)

    def _add_endpoints(self, routed: RoutedApp, machine: Machine, old: dict[tuple[str, int], Endpoint]) -> None:
        """Give a machine its endpoints; those that it keeps are taken out of `old`."""
        reached = self._reached(machine)
        if reached is None:
            return
        door, remote_proxy, worker = reached
        taken: set[int] = set()
        if door is not None:
            door.row(machine)
        for service in machine.services:
            group = routed.groups.get(service.internal_port)
            if group is None or id(group) in taken:
                continue
            taken.add(id(group))
            key = machine.id, service.internal_port
            row = _candidate(machine, service)
            entry = group.pool.put(door.candidate(row) if door else row)
            endpoint = old.pop(key, None) or routed.leaving.pop(key, None)
            if endpoint is None and entry.data is not None and entry.data.pool is group.pool:
                endpoint = entry.data  # it belongs to another port inside, or to a machine that was gone meanwhile
                for its in [its for its, other in old.items() if other is endpoint]:
                    del old[its]
            owner = door or remote_proxy
            assert owner is not None  # one of them
            addresses = self._addresses(machine, service, worker) if door else ((worker.host, worker.proxy_port),)
            headers = () if door else self.backhaul(routed.app.name, machine.id)
            if endpoint is None:
                endpoint = Endpoint(group.pool, entry, group.wait_queue, owner, addresses, headers)
            else:  # what is in flight there stays counted, by the same endpoint
                if endpoint.pool is not group.pool:
                    for _ in range(endpoint.entry.own):
                        group.pool.enter(entry)
                    endpoint.pool, endpoint.wait_queue = group.pool, group.wait_queue
                before = endpoint.owner
                endpoint.reach(owner, addresses, headers)
                if isinstance(before, Door):
                    self._take_from(before, endpoint)
            if door is not None:
                self.doors[machine.id] = door
                door.endpoints[service.internal_port] = endpoint
            entry.data = endpoint
            endpoint.entry = entry
            routed.endpoints[key] = endpoint
            group.pool.doubt(entry, self._doubted(machine.worker))
            if door is not None:  # a new entry knows nothing of a start or a stop under way
                group.pool.waking(entry, door.opening)
                group.pool.closing(entry, entry.closing or door.closing)
            elif entry.waking and machine.state == "started":
                group.pool.waking(entry, False)
            if remote_proxy is not None:
                remote_proxy.added(endpoint)

    def _remove_endpoints(self, routed: RoutedApp, endpoints: dict[tuple[str, int], Endpoint]) -> None:
        for endpoint in endpoints.values():
            endpoint.pool.remove(endpoint.machine)
            door = self.doors.get(endpoint.machine)
            if door is not None and endpoint.owner is door:
                self._hang_up(endpoint, False)
                self._take_from(door, endpoint)
        routed.leaving = {key: endpoint for key, endpoint in (routed.leaving | endpoints).items() if endpoint.entry.own}

    def _take_from(self, door: Door, endpoint: Endpoint) -> None:
        """Take an endpoint from a door, and drop a door that has none left."""
        for port in [port for port, its in door.endpoints.items() if its is endpoint]:
            del door.endpoints[port]
        if not door.endpoints and not door.opening and not door.closing and self.doors.get(endpoint.machine) is door:
            del self.doors[endpoint.machine]

    def _reached(self, machine: Machine) -> tuple[Door | None, RemoteProxy | None, Worker] | None:
        worker = self.index.workers.get(machine.worker)
        if worker is None:
            return None
        if machine.worker != self.worker and worker.proxy_port:
            return None, self.remote_proxy(worker.name), worker
        door = self.doors.get(machine.id)
        calls = self.workers.of(worker)
        if door is None:  # `doors` has it from its first endpoint on
            door = Door(
                machine, calls, self.settings, self.listen_probe, self._door_changed, self._withdraw, self._hang_up
            )
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
        """The fields that go to another proxy with a request; the public port comes after them."""
        return (self._token, (fields.APP, app.encode()), (fields.MACHINE, machine.encode()))

    def _door_changed(self, door: Door) -> None:
        if not door.endpoints and not door.closing and self.doors.get(door.machine.id) is door:
            del self.doors[door.machine.id]  # its machine has gone meanwhile
        for endpoint in door.endpoints.values():
            endpoint.wait_queue.all()
        for told in self.on_door:
            told(door)

    def _hang_up(self, endpoint: Endpoint, asleep: bool) -> None:
        for address in endpoint.addresses:
            for told in self.on_let_go:
                told(address, asleep)

    async def _withdraw(self, machine: str) -> bool:
        return self.delegate is None or await self.delegate.withdraw(machine)


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

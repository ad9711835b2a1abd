"""What looks after the machines of one worker, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hawker.http.handlers import Route
from hawker.services import Service
from hawker.worker.context import WorkerContext
from hawker.worker.flows.flow import Flow
from hawker.worker.machine.admission import Admission
from hawker.worker.machine.api.inside import InsideApi
from hawker.worker.machine.api.leases import LeaseApi
from hawker.worker.machine.api.machines import MachineApi
from hawker.worker.machine.api.metadata import MetadataApi
from hawker.worker.machine.at_start import HostAtStart
from hawker.worker.machine.exits import Exits
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.generations import Generations, Replaced
from hawker.worker.machine.inside.checks import Checks
from hawker.worker.machine.inside.reaching import ways_of
from hawker.worker.machine.inside.sessions import CONNECTIONS_MAX, Sessions
from hawker.worker.machine.launches import Launches
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.updates import Updates
from hawker.worker.machine.waking import Waking
from hawker.worker.machine.writer import MachineWriter
from hawker.worker.ports import nobody

FlowsOf = Callable[[MachineFlows], Sequence[Flow]]


class MachineParts:
    """See `hawker.worker.kinds.Parts`. `flows_of` gives the flows; tests that break one give others."""

    def __init__(self, context: WorkerContext, flows_of: FlowsOf = MachineFlows.all) -> None:
        settings, store, host, drivers, runner = (
            context.settings,
            context.store,
            context.host,
            context.drivers,
            context.runner,
        )
        holder = context.network.holder if context.network else nobody
        self.writer = log = MachineWriter(host, settings.capacity, settings.ports, holder)
        self.generations = Generations(settings.name, context.catalog)
        launches = Launches()
        acts = MachineFlows(
            store,
            host,
            drivers,
            log,
            self.generations.by,
            context.images,
            settings.disk_scale,
            waiters=launches,
            image_timeout_s=settings.image_timeout_s,
        )
        self.flows = flows_of(acts)
        self.exits = Exits(store, host, drivers, log, runner, context.news)
        admission = Admission(store, log, runner)
        self.machines = Machines(store, drivers, log, runner, admission)
        self.updates = Updates(store, host, drivers, log, admission)
        self.waking = Waking(store, host, runner, self.machines, launches, acts, log)
        ways = ways_of(context.network)
        self.checks = Checks(store, host, log, ways)
        self.api = MachineApi(
            store,
            host,
            drivers,
            log,
            self.machines,
            self.updates,
            settings.name,
            self.generations.by,
            self.checks.shown,
        )
        sessions, connections = Sessions(host), Sessions(host, CONNECTIONS_MAX)
        inside = InsideApi(
            store,
            drivers,
            self.machines,
            self.updates,
            sessions,
            connections,
            self.api.row,
            self.api.running,
            ways,
        )
        calls = [
            self.api.routes(),
            LeaseApi(store, host, self.api.row).routes(),
            MetadataApi(self.machines, self.api.row).routes(),
            inside.routes(),
        ]
        self.recovery: Sequence[Service] = [self.exits, HostAtStart(context)]
        self.services: Sequence[Service] = [
            Replaced(self.generations, context.catalog, store, self.machines),
            self.checks,
            self.waking,
            _Calls(calls, [sessions, connections]),
        ]


class _Calls(Service):
    def __init__(self, routes: Sequence[Sequence[Route]], sessions: Sequence[Sessions]) -> None:
        self._routes = routes
        self._sessions = sessions

    async def close(self) -> None:
        for each in self._sessions:
            await each.close()

    def routes(self) -> list[Route]:
        return [route for routes in self._routes for route in routes]

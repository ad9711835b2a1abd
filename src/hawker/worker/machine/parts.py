"""What looks after the machines of one worker, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hawker.model.rows import EventRow, VersionRow
from hawker.services import Service
from hawker.worker.context import WorkerContext
from hawker.worker.flows.flow import Flow
from hawker.worker.flows.runner import go_on_after_newest
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
        settings, store, host = context.settings, context.store, context.host
        for rises in (EventRow, VersionRow):
            go_on_after_newest(host, store.read, rises)
        holder = context.network.holder if context.network else nobody
        self.writer = writer = MachineWriter(host, settings.capacity, settings.ports, holder)
        self.generations = generations = Generations(settings.name, context.catalog)
        launches = Launches()
        acts = MachineFlows(context, writer, generations.by, launches)
        self.flows = flows_of(acts)
        self.exits = Exits(context, writer)
        admission = Admission(store, writer, context.runner)
        self.machines = machines = Machines(context, writer, admission)
        self.updates = updates = Updates(context, writer, admission)
        self.waking = Waking(context, machines, launches, acts, writer)
        ways = ways_of(context.network)
        self.checks = Checks(store, host, writer, ways)
        self.api = api = MachineApi(context, writer, machines, updates, generations.by, self.checks.shown)
        self.recovery: Sequence[Service] = [self.exits, HostAtStart(context)]
        self.services: Sequence[Service] = [
            Replaced(generations, context.catalog, store, machines),
            self.checks,
            self.waking,
            api,
            LeaseApi(store, host, api.row),
            MetadataApi(machines, api.row),
            InsideApi(context, api, machines, updates, ways),
        ]

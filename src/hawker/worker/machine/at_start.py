"""What a worker brings up to date on its host for its machines when it starts: network, images, drivers."""

from __future__ import annotations

from hawker.model.rows import UNENDED, MachineRow, RunRow
from hawker.network.base import NetworkError, Wanted
from hawker.services import Service
from hawker.telemetry import get_logger
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.networks import wanted_of
from hawker.worker.machine.endings import hold_before
from hawker.worker.machine.instance_spec import instance_spec

_RUNTIMES = "select distinct body ->> '$.driver' from (select body from machine order by id limit 64)"
"""The runtimes of some machines: to look at all takes long where there are many, and most have the same."""
_DIGESTS = """select id, digest from (select id, state, body ->> '$.image_digest' as digest from machine)
    where digest <> '' and state <> 'destroyed' order by id"""
"""SQLite reads one field of a machine in a tenth of the time that it takes to read the machine whole."""


class HostAtStart(Service):
    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def open(self) -> None:
        await self._bring_network_up_to_date()
        self._hold_images()
        self._context.drivers.stand_by(name for (name,) in self._context.store.read.query(_RUNTIMES))

    async def _bring_network_up_to_date(self) -> None:
        """Filters, routes and ports for the machines that run, and for no others."""
        context = self._context
        if context.network is None:
            return
        wanted: dict[str, Wanted] = {}
        for row in context.store.read.select(MachineRow, "instance > ''"):
            if found := wanted_of(instance_spec(row.as_it_runs(), row.instance)):
                wanted[row.id] = found
        try:
            await context.network.reconcile(wanted)
        except NetworkError as error:
            name = context.settings.name
            _logger.error("network.not_reconciled", worker=name, why=str(error), cause="worker start")

    def _hold_images(self) -> None:
        """Keep what machines run, or will run when they are started."""
        context = self._context
        if context.images is None:
            return
        for machine, digest in context.store.read.query(_DIGESTS):
            context.images.hold(machine, digest)
        for run in context.store.read.select(RunRow, UNENDED):
            hold_before(context.images, run)


_logger = get_logger()

"""The worker daemon: how it starts, serves and stops.

Starting: open the database, hear from the catalog if anybody answers, take hold of the driver's instances, compare what
should run with what does, resume the runs, then serve (`worker.assembly` has the order). Stopping leaves machines
running, so a daemon can be upgraded under them; `stop_machines` is for a host that goes down or a market on a laptop
that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import chain

from starlette.responses import Response
from starlette.types import ASGIApp

from hawker.catalog.base import Catalog
from hawker.catalog.publish.publisher import Publisher
from hawker.catalog.read.api import CatalogApi, health
from hawker.host import Host
from hawker.http.app import Serving, Tokens
from hawker.http.call import Call
from hawker.http.handlers import Route, unread
from hawker.images.base import ImageSource
from hawker.model.agent_calls import ShowHealth
from hawker.network.base import HostNetwork
from hawker.plugins import installed
from hawker.services import opened
from hawker.store.db import Store
from hawker.store.reserve import Reserve
from hawker.telemetry import Metrics, get_logger
from hawker.worker.assembly import Assembly
from hawker.worker.context import DriverNews, WorkerContext
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.runner import Runner
from hawker.worker.identity import identify, mark_stopping
from hawker.worker.invariants import validator
from hawker.worker.kinds import GROUP, Kind, Parts
from hawker.worker.lost_database import CAUSE, Own, adopt, look
from hawker.worker.lost_database import check as check_nothing_lost
from hawker.worker.lost_database import done as recovered
from hawker.worker.machine.kind import MACHINE
from hawker.worker.publishing import Publishing
from hawker.worker.settings import WorkerSettings

RECORDS_A_TOMBSTONE = 4
"""Records of its log that a worker keeps at most, for each tombstone of the catalog: every replica has those, too."""
STOP_GRACE_S = 5.0


class Worker:
    """One worker in this process. `open_store`, `check`, `open`, then serve the application, then `close`; last of all
    `close_store`. `kinds` are those beside machines; unless given, the installed ones."""

    def __init__(
        self,
        settings: WorkerSettings,
        host: Host,
        drivers: DriverSet,
        metrics: Metrics,
        images: ImageSource | None = None,
        network: HostNetwork | None = None,
        kinds: Sequence[Kind[Parts]] | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._host = host
        self._drivers = drivers
        self._images = images
        self._network = network
        self._others = _installed_kinds() if kinds is None else kinds
        self._kinds = [MACHINE, *self._others]
        self._news = DriverNews()
        self._stack = AsyncExitStack()
        self._holding = False  # of the driver's instances

    @property
    def failed(self) -> asyncio.Event:
        """Set when the database cannot be written any more."""
        return self.parts.upkeep.failed

    async def open_store(self) -> None:
        """Open the database. Raises `Corrupt` for a damaged one."""
        settings, host = self.settings, self._host
        reserve = None
        if host.vfs is None:
            settings.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            reserve = Reserve(settings.directory, settings.reserve_mib << 20)
            reserve.open()  # first of all: on a full disk nothing else would come about
        schemas = [kind.schema for kind in self._kinds]
        self.store = Store.open(settings.directory / "worker.db", host, vfs=host.vfs, schemas=schemas)
        self.store.reserve = reserve
        if settings.validate:
            self.store.on_change.append(validator(self._kinds))

    async def close_store(self) -> None:
        """End what `open_store` and `check` have begun."""
        if self._holding:
            await self._drivers.close()
        await self.store.close()

    def _publisher(self) -> Publisher:
        settings = self.settings
        publishing = Publishing(
            settings.name,
            settings.region,
            settings.host,
            settings.port,
            settings.capacity,
            self._drivers.name,
            of_kinds={row: of for kind in self._kinds for row, of in kind.projections(self.store.read).items()},
            proxy_port=settings.proxy_port,
        )
        tombstones = settings.history_records // RECORDS_A_TOMBSTONE
        return Publisher(self.store, publishing.outbox(self._host), tombstones_kept=tombstones)

    async def check(self, own: Own) -> Publisher:
        """Take hold of what runs, and see that the database knows of it, before anybody hears what it has. `own` is
        this node's copy of the catalog. Raises `DatabaseLost` when it has lost something and nobody has decided what is
        to come of it, `Refused` when it belongs to another worker. Returns what publishes it to the catalog."""
        settings, store = self.settings, self.store
        self._holding = True
        await self._drivers.open(self._news.exited, self._news.came_late)
        here = settings.directory if self._host.vfs is None else None
        found = chain.from_iterable((await self._drivers.recover()).values())
        lost = look(store.read, settings.name, list(found), here, own)
        if lost and settings.recover == "adopt":
            await store.submit(lambda tx: identify(tx, settings, self._host))
            for left in await store.submit(lambda tx: adopt(tx, lost, settings.name, settings.capacity, own)):
                _logger.error("worker.not_recovered", worker=settings.name, why=left, cause=CAUSE)
            lost = look(store.read, settings.name, lost.programs, here, None)
        if settings.recover != "discard":
            check_nothing_lost(lost, settings.name, settings.directory)
        await store.submit(lambda tx: identify(tx, settings, self._host))
        store.checkpoint()  # what a worker begins with is not in the write-ahead log alone
        if here and settings.recover:
            recovered(here)
        self.publisher = self._publisher()
        return self.publisher

    async def open(
        self,
        tokens: Tokens,
        catalog: Catalog | None = None,
        routes: Iterable[Route] = (),
        reading: CatalogApi | None = None,
        token: str = "",
    ) -> ASGIApp:
        """The rest, up to serving. The view of `catalog` tells which machines have gone to other workers; `routes` are
        served beside the worker's own; `reading` is the catalog for everybody; `token` is what agents know
        each other by."""
        settings, host = self.settings, self._host
        context = WorkerContext(
            settings=settings,
            host=host,
            store=self.store,
            drivers=self._drivers,
            news=self._news,
            runner=Runner(self.store, host, self.metrics),
            metrics=self.metrics,
            images=self._images,
            network=self._network,
            catalog=catalog.view if catalog else None,
            token=token,
        )
        self.parts = parts = Assembly(context, others=self._others, forget=catalog.forget if catalog else None)
        self._stack = await opened(parts.services)
        resumed = parts.runner.resumed
        _logger.info(
            "worker.opened", worker=settings.name, region=settings.region, resumed=resumed, cause="worker start"
        )
        self._reading = reading
        served = [
            *routes,
            *(reading.routes() if reading else ()),
            *(route for service in parts.services for route in service.routes()),
            unread(ShowHealth, self._health),
        ]
        return Serving(host, tokens, self.metrics, settings.region, settings.name).app(served)

    async def close(self, *, stop_machines: bool = False) -> None:
        """Stop serving first, close `store` after it. Machines go on running unless `stop_machines`; those are started
        again by the next `open`."""
        if stop_machines:
            await self.store.submit(mark_stopping)
        await self._stack.aclose()
        if stop_machines:
            await self._drivers.stop_all(grace_s=STOP_GRACE_S)
        self._holding = False
        await self._drivers.close()
        _logger.info("worker.closed", worker=self.settings.name, cause="worker stop")

    async def _health(self, call: Call) -> Response:
        return health("worker", self.settings.name, self._reading)

    def measure(self, metrics: Metrics) -> None:
        """Set the gauges of all parts, just before somebody reads the metrics."""
        for service in self.parts.services:
            service.measure(metrics)


def _installed_kinds() -> list[Kind[Parts]]:
    """The kinds beside machines that other distributions bring."""
    return [point.load() for point in installed(GROUP, (MACHINE.name,)).values()]


_logger = get_logger()

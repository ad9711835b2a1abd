"""The worker daemon: what it is made of, in which order it starts, and how it stops.

Starting: open the database, hear from the catalog if anybody answers, take hold of the driver's instances, compare what
should run with what does, resume the runs, then serve. Stopping leaves machines running, so a daemon can be upgraded
under them; `stop_machines` is for a host that goes down or a market on a laptop that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import ASGIApp

from hawker.catalog.base import Catalog
from hawker.catalog.publish.publisher import Publisher
from hawker.catalog.read.api import CatalogApi, health
from hawker.core import capacity as ledger_rules
from hawker.core.beats import until_beat
from hawker.errors import Refused, StoreError
from hawker.host import Host
from hawker.http.app import Handler, Serving, Tokens
from hawker.http.call import Call
from hawker.http.handlers import unread
from hawker.images.base import ImageSource
from hawker.model.calls import ShowHealth
from hawker.model.guest import RESOURCES
from hawker.model.rows import UNENDED, MachineRow, RunRow, WorkerRow
from hawker.network.base import HostNetwork, NetworkError, Wanted
from hawker.store.compaction import BATCH, Compaction, Kept
from hawker.store.db import Store
from hawker.store.reserve import Reserve
from hawker.store.tx import Tx
from hawker.telemetry import METRICS_CONTENT_TYPE, Metrics, get_logger
from hawker.worker import ledger
from hawker.worker.api.market import MarketApi
from hawker.worker.api.runs import RunsApi
from hawker.worker.app_copies import AppCopies
from hawker.worker.drivers.base import Exit, Instance
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.expiries import shorten
from hawker.worker.flows.runner import Runner
from hawker.worker.history import over
from hawker.worker.images.shelving import Shelving
from hawker.worker.invariants import validate
from hawker.worker.lost_database import CAUSE, Own, adopt, look
from hawker.worker.lost_database import check as check_nothing_lost
from hawker.worker.lost_database import done as recovered
from hawker.worker.machine.admission import Admission
from hawker.worker.machine.api.inside import InsideApi
from hawker.worker.machine.api.leases import LeaseApi
from hawker.worker.machine.api.machines import MachineApi
from hawker.worker.machine.api.metadata import MetadataApi
from hawker.worker.machine.endings import hold_before
from hawker.worker.machine.exits import Exits
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.generations import Generations
from hawker.worker.machine.inside.checks import Checks
from hawker.worker.machine.inside.reaching import ways_of
from hawker.worker.machine.inside.sessions import CONNECTIONS_MAX, Sessions
from hawker.worker.machine.instance_spec import instance_spec
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.updates import Updates
from hawker.worker.machine.waking import Launches, Waking
from hawker.worker.machine.writer import MachineWriter
from hawker.worker.market import Market
from hawker.worker.ports import nobody
from hawker.worker.publishing import Publishing
from hawker.worker.settings import WorkerSettings

SWEEP_S = 5.0
CHECKPOINT_SWEEPS = 12
"""Once in so many, from the first on, what a quiet worker has written is brought into the database itself."""
RECORDS_A_TOMBSTONE = 4
"""Of the log that are kept at most, for each tombstone of the catalog: every replica has those, too."""
STOP_GRACE_S = 5.0
_RUNTIMES = "select distinct body ->> '$.driver' from (select body from machine order by id limit 64)"
"""Of some machines: to look at all takes long where there are many, and most have the same."""
_DIGESTS = """select id, digest from (select id, state, body ->> '$.image_digest' as digest from machine)
    where digest <> '' and state <> 'destroyed' order by id"""
"""Asked of SQLite, which reads one field of a machine in a tenth of the time that it takes to read it whole."""


class Worker:
    """One worker in this process. `open_store`, `check`, `open`, then serve the application, then `close`; last of all
    `close_store`."""

    def __init__(
        self,
        settings: WorkerSettings,
        host: Host,
        drivers: DriverSet,
        metrics: Metrics,
        images: ImageSource | None = None,
        network: HostNetwork | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._host = host
        self._drivers = drivers
        self._images = images
        self._network = network
        self._path = settings.directory / "worker.db"
        self._sweeper: asyncio.Task[None] | None = None
        self._early: list[Exit] = []  # that a driver told of before anybody heard
        self._opened = asyncio.Event()
        self._reserve: Reserve | None = None
        self._holding = False  # of the driver's instances
        # The database cannot be written any more; only a new start can tell what it holds.
        self.failed = asyncio.Event()

    async def open_store(self) -> None:
        """Open the database. Raises `Corrupt` for a damaged one."""
        settings, host = self.settings, self._host
        if host.vfs is None:
            settings.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._reserve = Reserve(settings.directory, settings.reserve_mib << 20)
            self._reserve.open()  # first of all: on a full disk nothing else would come about
        self.store = Store.open(self._path, host, vfs=host.vfs)
        self.store.reserve = self._reserve
        if settings.validate:
            self.store.on_change.append(validate)

    async def close_store(self) -> None:
        """What `open_store` and `check` have begun."""
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
            proxy_port=settings.proxy_port,
        )
        publishing.recall(self.store.read)
        tombstones = settings.history_records // RECORDS_A_TOMBSTONE
        return Publisher(self.store, publishing.outbox(self._host), tombstones_kept=tombstones)

    async def check(self, own: Own) -> Publisher:
        """Take hold of what runs, and see that the database knows of it, before anybody hears what it has. `own` is
        this node's copy of the catalog. Raises `DatabaseLost` when it has lost something and nobody has decided what is
        to come of it, `Refused` when it belongs to another worker. Returns what publishes it to the catalog."""
        settings, store = self.settings, self.store
        self._holding = True
        await self._drivers.open(self._on_exit, self._recover_late)
        here = settings.directory if self._host.vfs is None else None
        found = chain.from_iterable((await self._drivers.recover()).values())
        lost = look(store.read, settings.name, list(found), here, own)
        if lost and settings.recover == "adopt":
            await store.submit(self._identify)
            for left in await store.submit(lambda tx: adopt(tx, lost, settings.name, settings.capacity, own)):
                _logger.error("worker.not_recovered", worker=settings.name, why=left, cause=CAUSE)
            lost = look(store.read, settings.name, lost.programs, here, None)
        if settings.recover != "discard":
            check_nothing_lost(lost, settings.name, settings.directory)
        self.me = await store.submit(self._identify)
        store.checkpoint()  # what a worker begins with is not in the write-ahead log alone
        if here and settings.recover:
            recovered(here)
        self.publisher = self._publisher()
        return self.publisher

    def _on_exit(self, ended: Exit) -> None:
        """The driver's callback. What it tells of before the worker is open waits."""
        if self._opened.is_set():
            self.exits.on_exit(ended)
        else:
            self._early.append(ended)

    async def _recover_late(self, name: str, instances: Sequence[Instance]) -> None:
        await self._opened.wait()
        await self.exits.recover_late(name, instances)

    async def open(
        self,
        tokens: Tokens,
        catalog: Catalog | None = None,
        routes: Mapping[tuple[str, str], Handler] | None = None,
        reading: CatalogApi | None = None,
        token: str = "",
    ) -> ASGIApp:
        """The rest, up to serving. The view of `catalog` tells which machines have gone to other workers; `routes` are
        served beside the worker's own, to agents; `reading` is the catalog for everybody; `token` is what agents know
        each other by."""
        settings, host, drivers, store, me = self.settings, self._host, self._drivers, self.store, self.me
        log = MachineWriter(host, settings.capacity, settings.ports, self._network.holder if self._network else nobody)
        view = catalog.view if catalog else None
        self.superseding = superseding = Generations(settings.name, view)
        launches = Launches()
        scale = settings.disk_scale
        flows = MachineFlows(
            *(store, host, drivers, log, superseding.by, self._images, scale),
            waiters=launches,
            image_timeout_s=settings.image_timeout_s,
        )
        self.runner = runner = Runner(store, host, flows.all(), self.metrics)
        self.exits = exits = Exits(store, host, drivers, log, runner)
        runner.on_end = exits.on_end
        self.market = market = Market(store, host, drivers, log, runner, me)
        self.shelving = Shelving(settings, host, store, self._images, view, token)
        market.stock = self.shelving.stock
        market.hold_images()
        await market.look()
        self._opened.set()
        for ended in self._early:
            exits.on_exit(ended)
        await exits.recover()  # first: a run must not start a program beside one that nobody knows
        await self._bring_network_up_to_date()
        self._hold_images()
        self.shelving.all_held()
        drivers.stand_by(name for (name,) in store.read.query(_RUNTIMES))
        resumed = runner.resume()
        admission = Admission(store, log, runner)
        machines = Machines(store, drivers, log, runner, admission)
        updates = Updates(store, host, drivers, log, admission)
        self.waking = Waking(store, host, runner, machines, launches, flows, log)
        superseding.watch(store, machines)
        self.adopting = AppCopies(settings.name, view, store) if view else None
        if self.adopting:
            self.adopting.watch()
        ways = ways_of(self._network)
        self.checks = checks = Checks(store, host, log, ways)
        checks.begin()
        machine_api = MachineApi(
            *(store, host, drivers, log, machines, updates, settings.name, superseding.by, checks.shown)
        )
        self.sessions, self.connections = Sessions(host), Sessions(host, CONNECTIONS_MAX)
        inside_api = InsideApi(
            *(
                store,
                drivers,
                machines,
                updates,
                self.sessions,
                self.connections,
                machine_api.row,
                machine_api.running,
                ways,
            )
        )
        forget = catalog.forget if catalog else None
        market_api = MarketApi(store, drivers, log, market, machines, machine_api, str(self._path), view, forget)
        kept = Kept(seconds=settings.history_s, records=settings.history_records)
        batch = min(BATCH, 8 + kept.records // 4)  # of few records few at a time
        self._compaction = Compaction(store, me.name, kept, partial(over, orders=kept.records), batch=batch)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweeper")
        _logger.info("worker.opened", worker=me.name, region=me.region, resumed=resumed, cause="worker start")
        serving = Serving(host, tokens, self.metrics, settings.region, settings.name)
        self._reading = reading
        runs_api = RunsApi(store, runner, settings.name)
        served = (
            *machine_api.routes(),
            *LeaseApi(store, host, machine_api.row).routes(),
            *MetadataApi(machines, machine_api.row).routes(),
            *inside_api.routes(),
            *runs_api.routes(),
            *self.shelving.routes(),
            *(reading.routes() if reading else ()),
            unread(ShowHealth, self._health),
        )
        agent_routes = {
            **market_api.routes(),
            **self.shelving.agent_routes(),
            **self.waking.routes(),
            **(routes or {}),
            ("GET", "/metrics"): self._metrics,
        }
        return serving.app(served, agent_routes=agent_routes)

    async def close(self, *, stop_machines: bool = False) -> None:
        """Stop serving first, close `store` after it. Machines go on running unless `stop_machines`; those are started
        again by the next `open`."""
        if self._sweeper:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.sessions.close()
        await self.connections.close()
        await self.superseding.close()
        if self.adopting:
            await self.adopting.close()
        await self.shelving.close()
        await self.checks.close()
        if stop_machines:
            await self.store.submit(self._mark_stopping)
        await self.runner.close()
        await self.exits.close()
        if stop_machines:
            await self._drivers.stop_all(grace_s=STOP_GRACE_S)
        self._holding = False
        await self._drivers.close()
        _logger.info("worker.closed", worker=self.settings.name, cause="worker stop")

    async def _bring_network_up_to_date(self) -> None:
        """Filters, routes and ports for the machines that run, and for no others."""
        if self._network is None:
            return
        wanted: dict[str, Wanted] = {}
        for row in self.store.read.select(MachineRow, "instance > ''"):
            network = instance_spec(row.as_it_runs(), row.instance).network
            if network:
                publish = tuple((p.protocol, p.internal_port, p.host_port) for p in network.publish)
                wanted[row.id] = Wanted(machine=row.id, number=network.number, address=network.address, publish=publish)
        try:
            await self._network.reconcile(wanted)
        except NetworkError as error:
            _logger.error("network.not_reconciled", worker=self.settings.name, why=str(error), cause="worker start")

    def _hold_images(self) -> None:
        """Keep what machines run, or will run when they are started."""
        if self._images is None:
            return
        for machine, digest in self.store.read.query(_DIGESTS):
            self._images.hold(machine, digest)
        for run in self.store.read.select(RunRow, UNENDED):
            hold_before(self._images, run)

    def _identify(self, tx: Tx) -> WorkerRow:
        """The worker's own row, made at its first start. Also notes the end of a shutdown of the host."""
        settings = self.settings
        me = tx.get(WorkerRow, "worker")
        if me is None:
            me = WorkerRow(name=settings.name, region=settings.region, epoch=self._host.ulid(), created_at_ms=tx.now_ms)
        elif (me.name, me.region) != (settings.name, settings.region):
            raise Refused(
                f"{settings.directory} belongs to worker {me.name} in {me.region}, "
                f"not {settings.name} in {settings.region}",
                hint="give each worker a directory of its own",
            )
        me = replace(me, started_again_ms=tx.now_ms)
        tx.record("worker.started", me.name, cause="worker start")
        tx.put(me)
        shorten(tx)
        held = ledger.held(tx)
        try:
            ledger_rules.check(settings.capacity, held)
        except AssertionError as error:
            # Capacity was lowered below what is held: nothing is evicted, nothing new fits.
            _logger.warning("capacity.below_held", worker=me.name, why=str(error), cause="worker start")
        return me

    def _mark_stopping(self, tx: Tx) -> None:
        me = tx.get(WorkerRow, "worker")
        assert me is not None  # written by open
        tx.record("worker.stopping", me.name, cause="the host shuts down")
        tx.put(replace(me, stopping_since_ms=tx.now_ms))

    async def _sweep(self) -> None:
        for number in count():
            await asyncio.sleep(until_beat(asyncio.get_running_loop().time(), SWEEP_S))
            if number % CHECKPOINT_SWEEPS == 0:
                self.store.checkpoint_later()
            if self.store.failed:
                _logger.critical(
                    "store.failed", worker=self.settings.name, why=self.store.failed, cause="local rule: sweep"
                )
                self.failed.set()
                return
            try:
                await self.market.sweep()
                await self._compaction.sweep()
                if self._reserve and self._reserve.given_up:
                    await asyncio.to_thread(self._reserve.make)
            except StoreError as error:
                _logger.error("sweep.failed", worker=self.settings.name, why=error.message, cause="local rule: sweep")

    async def _health(self, call: Call) -> Response:
        return health("worker", self.settings.name, self._reading)

    async def _metrics(self, call: Call) -> Response:
        held = ledger.held(self.store.read)
        for name in RESOURCES:
            self.metrics.held.labels(name).set(getattr(held, name))
            self.metrics.capacity.labels(name).set(getattr(self.settings.capacity, name))
        return Response(self.metrics.exposition(), media_type=METRICS_CONTENT_TYPE)


_logger = get_logger()

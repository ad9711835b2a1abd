"""A worker without its HTTP side, over a fake driver: store, runner, flows and market are the real ones.

It is put together and started in the order of `hawker.worker.daemon.Worker.open`. `die` ends it as kill -9 does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.kit.virtual_time import virtual_host

from hawker.catalog.view import RowView
from hawker.errors import DiskFull
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.market import Order
from hawker.model.rows import AppRow, EventRow, MachineRow, RunRow
from hawker.sim.checks import invariants
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import Program, World
from hawker.store.db import Store
from hawker.store.verify import verify
from hawker.telemetry import Metrics
from hawker.worker.daemon import STOP_GRACE_S, SWEEP_S, Worker
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.flow import Flow
from hawker.worker.flows.runner import Runner
from hawker.worker.invariants import validate
from hawker.worker.machine.admission import Admission
from hawker.worker.machine.exits import Exits
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.generations import Generations
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.updates import Updates
from hawker.worker.machine.waking import Launches, Waking
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.market import Market
from hawker.worker.request import Request
from hawker.worker.settings import WorkerSettings

REGION = "ord"
APP = AppRow(name="web", id="app1", org="personal", network="default", number=1, created_at_ms=0, stamp_ms=1)
ROOMY = Resources(cpus_shared=64, cpus_dedicated=8, memory_mib=65536, disk_mib=1 << 20, machines=64)

FlowsOf = Callable[[MachineFlows], Sequence[Flow]]


def the_flows(flows: MachineFlows) -> Sequence[Flow]:
    return flows.all()


class SimWorker:
    """Open with `SimWorker.open`; then `close`, or `die`."""

    def __init__(
        self,
        directory: Path,
        world: World,
        capacity: Resources = ROOMY,
        flows: FlowsOf = the_flows,
        catalog: RowView | None = None,
        drivers: Mapping[str, FakeDriver] | None = None,
    ) -> None:
        """With `drivers` those, by runtime, in the place of one over `world` that runs them all."""
        self.path = directory / "worker.db"
        self.host = host = world.host
        self.world = world
        self.capacity = capacity
        self.driver = FakeDriver(world)
        self._fakes = list(drivers.values()) if drivers else [self.driver]
        self.drivers = DriverSet(drivers) if drivers else self.driver.for_all()
        self.metrics = Metrics()
        self._flows = flows
        self._catalog = catalog
        self._sweeper: asyncio.Task[None] | None = None
        self._dead = False
        self._asked = count(1)
        settings = WorkerSettings(name="ord-1", region=REGION, directory=directory, capacity=capacity)
        self._daemon = Worker(settings, host, self.drivers, self.metrics)  # for its own row; it is not opened

    @classmethod
    async def open(
        cls,
        directory: Path,
        world: World,
        *,
        capacity: Resources = ROOMY,
        flows: FlowsOf = the_flows,
        on_commit: Callable[[str], None] | None = None,
        sweeping: bool = True,
        catalog: RowView | None = None,
    ) -> SimWorker:
        worker = cls(directory, world, capacity, flows, catalog)
        worker.open_store(on_commit)
        await worker.start(sweeping=sweeping)
        return worker

    def open_store(self, on_commit: Callable[[str], None] | None = None) -> None:
        self.store = Store.open(self.path, self.host, on_commit=on_commit)
        self.store.on_change.append(validate)

    async def start(self, *, sweeping: bool) -> None:
        """The rest of opening, once `store` is there."""
        store, host, driver = self.store, self.host, self.drivers
        me = await store.submit(self._daemon._identify)
        self.log = log = MachineWriter(host, self.capacity)
        self.superseding = superseding = Generations("ord-1", self._catalog)
        launches = Launches()
        machine_flows = MachineFlows(store, host, driver, log, superseding.by, self.driver.images, waiters=launches)
        self.runner = runner = Runner(store, host, self._flows(machine_flows), self.metrics)
        self.exits = exits = Exits(store, host, driver, log, runner)
        runner.on_end = exits.on_end
        await driver.open(exits.on_exit, exits.recover_late)
        self.market = Market(store, host, driver, log, runner, me)
        await self.market.look()
        await self.market.look()
        await exits.recover()
        self.resumed = runner.resume()
        admission = Admission(store, log, runner)
        self.machines = Machines(store, driver, log, runner, admission)
        self.updates = Updates(store, host, driver, log, admission)
        self.waking = Waking(store, host, runner, self.machines, launches, machine_flows, log)
        superseding.watch(store, self.machines)
        if sweeping:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweeper")

    async def close(self, *, stop_machines: bool = False) -> None:
        if self._sweeper:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.superseding.close()
        if stop_machines:
            await self.store.submit(self._daemon._mark_stopping)
        await self.runner.close()
        await self.exits.close()
        if stop_machines:
            await self.drivers.stop_all(grace_s=STOP_GRACE_S)
        await self.drivers.close()
        await self.store.close()

    async def die(self) -> None:
        """Be killed: nothing more is written or asked of the driver, and every task of this loop but the present one
        ends."""
        self.cut_off()
        for _ in range(10):
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError(f"tasks that cannot be cancelled: {tasks}")

    def cut_off(self) -> None:
        """The first half of `die`: nothing more happens outside this process, though tasks of it are still there."""
        if not self._dead:
            self._dead = True
            for fake in self._fakes:
                fake.die()
            self.store.abandon()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.market.sweep()

    # --- what tests ask of it ----------------------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """Every invariant that does not hold of this worker at rest, and what the replay of its log finds."""
        return [*verify(self.path).faults, *invariants.check(self.store.read, self.world, self.capacity)]

    def request(self, nonce: str = "", owner: str = "tester") -> Request:
        return Request(id=f"req-{next(self._asked)}", owner=owner, nonce=nonce)

    async def create(self, key: str = "order-1", program: str = "serve", **options: Any) -> str:
        """Reserve and confirm. Returns the machine's id."""
        await self.market.reserve(order(key, program, **options))
        row, _, _ = await self.market.confirm(key, APP, None)
        return row.id

    async def run_machine(self, key: str = "order-1", program: str = "serve", **options: Any) -> str:
        """A machine at rest after its create."""
        machine = await self.create(key, program, **options)
        await self.at_rest(machine)
        return machine

    def machine(self, machine: str) -> MachineRow:
        return get_machine(self.store.read, machine)

    def events(self, machine: str) -> list[EventRow]:
        return self.store.read.select(EventRow, "machine = ? order by id", (machine,))

    def story(self, machine: str) -> list[str]:
        """The machine's events, e.g. "start started"."""
        return [f"{event.type} {event.status}" for event in self.events(machine)]

    def runs(self, machine: str = "") -> list[RunRow]:
        where = "resource = ? order by id" if machine else "true order by id"
        return self.store.read.select(RunRow, where, (machine,) if machine else ())

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Until a look at the worker shows it, ten looks a second of virtual time."""
        for _ in range(int(within_s * 10)):
            if condition():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not so within {within_s} s")

    async def fill_disk(self) -> None:
        """Take away the disk's last room, as SQLite sees it."""
        db = self.store._db
        pages = self.store.read.query("pragma page_count")[0][0]
        db.execute(f"pragma max_page_count = {pages}")
        for n in range(10_000):  # what is left in the last pages
            try:
                await self.market.release(f"unknown-{n}", "a test fills the disk")
            except DiskFull:
                return
        raise AssertionError("the disk takes everything")

    def make_room(self) -> None:
        self.store._db.execute("pragma max_page_count = 1000000")

    async def at_rest(self, machine: str = "") -> None:
        """Until no run of the machine (of any) is active. A parked run is at rest."""
        for _ in range(1000):
            active = [run for run in self.runs(machine) if run.status == "active"]
            if not active:
                return
            await self.runner.wait_ended(active[0].id)
        raise AssertionError(f"runs without end: {active}")


def order(key: str, program: str = "serve", *, hold_s: float = 30.0, **options: Any) -> Order:
    """An order for one shared cpu with 256 MiB. `options` that `Order` has go there, the others into the config."""
    named = {
        name: options.pop(name)
        for name in ("skip_launch", "cordoned", "lease_ttl_s", "image_timeout_s")
        if name in options
    }
    config = machine_config(program, **options)
    return Order(
        key=key,
        app=APP.name,
        region=REGION,
        name=f"name-{key}",
        config=config,
        resources=check_config(config).resources(),
        owner="tester",
        request=f"req-{key}",
        hold_s=hold_s,
        **named,
    )


def machine_config(program: str = "serve", **fields: Any) -> dict[str, Any]:
    """A complete configuration, by default of a machine that is not restarted."""
    fields.setdefault("restart", {"policy": "no"})
    return check_config({"image": "host", "init": {"exec": [program]}, **fields}).raw


def a_world(programs: Mapping[str, Program] | None = None) -> World:
    """A world in virtual time. `programs` come in addition to "serve", which runs until stopped."""
    return World(virtual_host(), {"serve": Program(), **(programs or {})})


@asynccontextmanager
async def a_worker(
    directory: Path, programs: Mapping[str, Program] | None = None, *, capacity: Resources = ROOMY, **options: Any
) -> AsyncIterator[SimWorker]:
    """A worker over a world of its own, closed at the end."""
    worker = await SimWorker.open(directory, a_world(programs), capacity=capacity, **options)
    try:
        yield worker
    finally:
        await worker.close()

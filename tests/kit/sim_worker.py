"""A worker without its HTTP side, over a fake driver: all its services are the real ones (`hawker.worker.assembly`).

`die` ends it as kill -9 does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
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
from hawker.services import opened
from hawker.sim.checks import invariants
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import Program, World
from hawker.store.db import Store
from hawker.store.verify import verify
from hawker.telemetry import Metrics
from hawker.worker.assembly import Assembly
from hawker.worker.context import DriverNews, WorkerContext
from hawker.worker.daemon import STOP_GRACE_S
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.flow import Flow
from hawker.worker.flows.runner import Runner
from hawker.worker.identity import identify, mark_stopping
from hawker.worker.invariants import validator
from hawker.worker.kinds import Kinds
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.kind import MACHINE
from hawker.worker.machine.parts import FlowsOf, MachineParts
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import Request
from hawker.worker.settings import WorkerSettings

REGION = "ord"
APP = AppRow(name="web", id="app1", org="personal", network="default", number=1, created_at_ms=0, stamp_ms=1)
ROOMY = Resources(cpus_shared=64, cpus_dedicated=8, memory_mib=65536, disk_mib=1 << 20, machines=64)


def as_it_is(flow: Flow) -> Flow:
    return flow


class SimWorker:
    """Open with `SimWorker.open`; then `close`, or `die`."""

    def __init__(
        self,
        directory: Path,
        world: World,
        capacity: Resources = ROOMY,
        flows: FlowsOf = MachineFlows.all,
        catalog: RowView | None = None,
        drivers: Mapping[str, FakeDriver] | None = None,
        kinds: Kinds = (),
        alter: Callable[[Flow], Flow] = as_it_is,
    ) -> None:
        """With `drivers` those, by runtime, in the place of one over `world` that runs them all. `kinds` are
        those beside machines. `alter` as in `Assembly`."""
        self.path = directory / "worker.db"
        self.host = world.host
        self.world = world
        self.capacity = capacity
        self.driver = FakeDriver(world)
        self._fakes = list(drivers.values()) if drivers else [self.driver]
        self.drivers = DriverSet(drivers) if drivers else self.driver.for_all()
        self.metrics = Metrics()
        self.settings = WorkerSettings(name="ord-1", region=REGION, directory=directory, capacity=capacity)
        self._machine_kind = replace(MACHINE, parts=partial(MachineParts, flows_of=flows))
        self.kinds = kinds
        self._kinds = (MACHINE, *kinds)
        self._alter = alter
        self._catalog = catalog
        self._stack = AsyncExitStack()
        self._dead = False
        self._asked = count(1)

    @classmethod
    async def open(
        cls,
        directory: Path,
        world: World,
        *,
        capacity: Resources = ROOMY,
        flows: FlowsOf = MachineFlows.all,
        on_commit: Callable[[str], None] | None = None,
        sweeping: bool = True,
        catalog: RowView | None = None,
        kinds: Kinds = (),
    ) -> SimWorker:
        worker = cls(directory, world, capacity, flows, catalog, kinds=kinds)
        worker.open_store(on_commit)
        await worker.start(sweeping=sweeping)
        return worker

    def open_store(self, on_commit: Callable[[str], None] | None = None) -> None:
        schemas = [kind.schema for kind in self._kinds]
        self.store = Store.open(self.path, self.host, on_commit=on_commit, schemas=schemas)
        self.store.on_change.append(validator(self._kinds))

    async def start(self, *, sweeping: bool) -> None:
        """The rest of opening, once `store` is there. No health check is made: there is no network."""
        await self.store.submit(lambda tx: identify(tx, self.settings, self.host))
        self.runner = Runner(self.store, self.host, self.metrics)
        news = DriverNews()
        context = WorkerContext(
            settings=self.settings,
            host=self.host,
            store=self.store,
            drivers=self.drivers,
            news=news,
            runner=self.runner,
            metrics=self.metrics,
            images=self.driver.images,
            catalog=self._catalog,
        )
        assembly = Assembly(context, self._machine_kind, self.kinds, alter=self._alter)
        machine = assembly.machine
        self.parts, self.market, self.log, self.exits = assembly.parts, assembly.market, machine.writer, machine.exits
        self.machines, self.updates, self.waking = machine.machines, machine.updates, machine.waking
        self.generations, self.api, self.market_api = machine.generations, machine.api, assembly.market_api
        await self.drivers.open(news.exited, news.came_late)
        left_out = {machine.checks} if sweeping else {machine.checks, assembly.upkeep}
        self._stack = await opened(service for service in assembly.services if service not in left_out)
        self.resumed = self.runner.resumed

    async def close(self, *, stop_machines: bool = False) -> None:
        if stop_machines:
            await self.store.submit(mark_stopping)
        await self._stack.aclose()
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

    # --- what tests ask of it ----------------------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """Every invariant that does not hold of this worker at rest, and what the replay of its log finds."""
        return [*verify(self.path).faults, *invariants.check(self.store.read, self.world, self.capacity, self._kinds)]

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

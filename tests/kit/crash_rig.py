"""The crash kit: a script of operations on a worker, run uncut, then cut off everywhere, and compared.

`Rig` is a worker as the daemon puts it together, without HTTP: real store on real SQLite, real runner, flows, market
and exits, over a `World` that outlives it. `Script` says what a client does; it repeats an operation whose answer it
did not get, unless it sees that it was accepted. `End` is what is compared: everything durable and everything outside,
without ids and times.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.kit import crash_time as virtual
from tests.kit.crash_world import Cut, World, WorldDriver

from hawker.core import journal
from hawker.errors import HawkerError
from hawker.model.config import check_config
from hawker.model.guest import RESOURCES, Resources
from hawker.model.machine import State
from hawker.model.market import Order, Reservation
from hawker.model.rows import AppRow, EventRow, LeaseRow, MachineRow, ReservationRow, RunRow, VersionRow, WorkerRow
from hawker.store.db import Store, Tx
from hawker.store.verify import verify
from hawker.telemetry import Metrics
from hawker.worker import ledger
from hawker.worker.exits import Exits
from hawker.worker.flows import MachineFlows
from hawker.worker.machine_log import MachineLog
from hawker.worker.machines import Machines, Request
from hawker.worker.market import Market
from hawker.worker.runner import Runner

CAPACITY = Resources(cpus_shared=4, cpus_dedicated=2, memory_mib=4096, disk_mib=8192, machines=4)
APP = AppRow(name="app", id="app", org="org", network="default", number=7, created_at_ms=1, stamp_ms=1)
REQUEST = Request(id="req", owner="tester")
SETTLE_S = 600.0  # virtual: longer than any backoff the scripts meet


class Rig:
    """One worker's life, from a start to a crash or a close."""

    def __init__(self, path: Path, world: World, seed: int, flows: type[MachineFlows] = MachineFlows) -> None:
        self.world = world
        self._flows = flows
        self._path = path
        self._host = virtual.host(seed)

    async def open(self) -> Rig:
        host = self._host
        self.world.cut_off = False
        self.store = store = Store.open(self._path, host, on_commit=lambda when: self.world.point(f"{when} commit"))
        try:
            me = await store.submit(self._identify)
            self.driver = driver = WorldDriver(self.world, host.now_ms)
            log = MachineLog(host, CAPACITY)
            self.runner = runner = Runner(store, host, self._flows(store, host, driver, log).all(), Metrics())
            self.exits = exits = Exits(store, host, driver, log, runner)
            runner.on_end = exits.on_end
            await driver.open(exits.on_exit)
            self.market = Market(store, host, driver, log, runner, me)
            self.machines = Machines(store, host, driver, log, runner)
            runner.resume()
            await exits.recover()
        except BaseException:
            await self.crash()
            raise
        return self

    async def crash(self) -> None:
        """End as by kill -9: tasks vanish, what is not committed is gone."""
        self.store.abandon()
        me = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.runner.close()
        await self.exits.close()
        await self.store.close()

    def _identify(self, tx: Tx) -> WorkerRow:
        me = tx.get(WorkerRow, "worker")
        if me is None:
            me = WorkerRow(name="w", region="ord", epoch="e", created_at_ms=tx.now_ms)
            tx.record("worker.started", "w", cause="worker start")
            tx.put(me)
        return me

    async def settled(self) -> None:
        """Wait until no run is active and every ended program has been dealt with."""
        async with asyncio.timeout(SETTLE_S):
            while not self._quiet():
                if self.world.cut_off:
                    raise Cut
                await asyncio.sleep(0.05)

    def _quiet(self) -> bool:
        if self.store.read.query("select 1 from run where status = 'active' limit 1"):
            return False
        machines = {m.instance for m in self.store.read.select(MachineRow, "instance <> ''")}
        return not any(i.exit and key in machines for key, i in self.world.instances.items())

    def runs(self, flow: str) -> int:
        count: int = self.store.read.query("select count(*) from run where flow = ?", (flow,))[0][0]
        return count

    def machine(self, name: str) -> MachineRow:
        return self.store.read.select(MachineRow, "name = ?", (name,))[0]


class Operation(msgspec.Struct, frozen=True):
    """What a client does, and the flow whose run shows that it was accepted ("" for the programs' own doing)."""

    flow: str
    act: Callable[[Rig], Awaitable[Any]]


Script = Sequence[Operation]


class End(msgspec.Struct, frozen=True):
    """Where everything stands at the end, in the order of the machines' names."""

    machines: list[tuple[str, str, str, bool, int]]  # name, state, desired, has an instance, versions
    events: list[tuple[str, list[tuple[str, str]]]]
    runs: list[tuple[str, str]]
    held: dict[str, int]
    reservations: int
    leases: int
    programs: list[str]  # names of machines with a running program
    remains: int  # instances at the driver


async def play(
    script: Script, path: Path, world: World, *, tolerant: bool = False, flows: type[MachineFlows] = MachineFlows
) -> End:
    """Play a script to its end, starting the worker again whenever it is cut off.

    `tolerant`: an operation that is refused is passed over; an injected failure left the machine in another state.
    """
    seed = 1
    rig = await _opened(path, world, seed, flows)
    accepted: dict[str, int] = {}
    for operation in script:
        accepted[operation.flow] = accepted.get(operation.flow, 0) + 1
        done = False
        while not done:
            try:
                if not operation.flow or rig.runs(operation.flow) < accepted[operation.flow]:
                    await operation.act(rig)
                await rig.settled()
                done = True
            except (Cut, HawkerError):
                if not world.cut_off:
                    if tolerant:
                        break
                    raise
                await rig.crash()
                await asyncio.sleep(1)
                rig = await _opened(path, world, seed, flows)
    await rig.settled()
    end = _end(rig)
    check_invariants(rig)
    await rig.close()
    report = verify(path)
    assert report.ok, report.faults
    return end


async def _opened(path: Path, world: World, seed: int, flows: type[MachineFlows]) -> Rig:
    """A worker, started until it gets through. Each start comes a second later and draws other random numbers."""
    while True:
        with contextlib.suppress(Cut):
            return await Rig(path, world, seed + len(world.points), flows).open()
        await asyncio.sleep(1)


def check_invariants(rig: Rig) -> None:
    """What must hold whenever nothing is under way, whatever happened before."""
    read, world = rig.store.read, rig.world
    assert ledger.audit(read) == []
    held = ledger.held(read)
    assert all(0 <= getattr(held, name) <= getattr(CAPACITY, name) for name in RESOURCES), held
    machines = {m.id: m for m in read.select(MachineRow)}
    for key, machine in world.running().items():
        assert machines[machine].instance == key, f"program {key} runs unknown to its machine"
    running = list(world.running().values())
    assert len(running) == len(set(running)), "two programs of one machine run"
    for machine_row in machines.values():
        if machine_row.state in (State.started, State.suspended):
            assert machine_row.instance in world.running(), f"{machine_row.id} has no program"
        else:
            assert machine_row.id not in running, f"{machine_row.id} is {machine_row.state} and its program runs"
        times = [e.at_ms for e in read.select(EventRow, "machine = ? order by id", (machine_row.id,))]
        assert times == sorted(set(times)), "times of events rise"
    known = {run.id for run in read.select(RunRow)}
    assert {key.partition("/")[0] for key in world.starts} <= known, "an effect without a recorded run"
    for run in read.select(RunRow):
        journal.check(run)
        assert run.cause
    sequence = [seq for (seq,) in read.query("select seq from log order by seq")]
    assert sequence == list(range(1, len(sequence) + 1))
    assert not read.query("select 1 from log where cause = ''")


def _end(rig: Rig) -> End:
    read = rig.store.read
    rows = sorted(read.select(MachineRow), key=lambda m: m.name)
    names = {m.id: m.name for m in rows}
    events = [
        (m.name, [(e.type, e.status) for e in read.select(EventRow, "machine = ? order by id", (m.id,))]) for m in rows
    ]
    return End(
        machines=[
            (m.name, m.state, m.desired, bool(m.instance), len(read.select(VersionRow, "machine = ?", (m.id,))))
            for m in rows
        ],
        events=events,
        runs=sorted((r.flow, r.status) for r in read.select(RunRow)),
        held=msgspec.to_builtins(ledger.held(read)),
        reservations=len(read.select(ReservationRow)),
        leases=len(read.select(LeaseRow)),
        programs=sorted(names[m] for m in rig.world.running().values()),
        remains=len(rig.world.instances),
    )


# --- operations ------------------------------------------------------------------------------------------------------


def create(name: str, *, skip_launch: bool = False, **config: Any) -> Operation:
    """Reserve and confirm under a key of its own, as a broker does."""

    async def act(rig: Rig) -> None:
        checked = check_config({"image": "host", "init": {"exec": ["program"]}, **config})
        order = Order(
            key=f"order-{name}",
            app=APP.name,
            region="ord",
            name=name,
            config=checked.raw,
            resources=checked.guest.resources(),
            skip_launch=skip_launch,
            request="req",
        )
        answer = await rig.market.reserve(order)
        assert isinstance(answer, Reservation), answer
        await rig.market.confirm(order.key, APP, None)

    return Operation("machine.create", act)


def start(name: str) -> Operation:
    return Operation("machine.start", lambda rig: rig.machines.start(APP.name, rig.machine(name).id, REQUEST))


def stop(name: str) -> Operation:
    return Operation("machine.stop", lambda rig: rig.machines.stop(APP.name, rig.machine(name).id, REQUEST))


def restart(name: str) -> Operation:
    return Operation("machine.restart", lambda rig: rig.machines.restart(APP.name, rig.machine(name).id, REQUEST))


def suspend(name: str) -> Operation:
    return Operation("machine.suspend", lambda rig: rig.machines.suspend(APP.name, rig.machine(name).id, REQUEST))


def update(name: str, **config: Any) -> Operation:
    async def act(rig: Rig) -> None:
        checked = check_config({"image": "host", "init": {"exec": ["program"]}, **config})
        await rig.machines.update(APP.name, rig.machine(name).id, REQUEST, config=checked)

    return Operation("machine.update", act)


def destroy(name: str) -> Operation:
    async def act(rig: Rig) -> None:
        await rig.machines.destroy(APP.name, rig.machine(name).id, REQUEST, force=True)

    return Operation("machine.destroy", act)


def program_ends(name: str, *, code: int = 1, oom: bool = False) -> Operation:
    """The machine's program ends by itself, once."""

    async def act(rig: Rig) -> None:
        key = rig.machine(name).instance
        if key and rig.world.instances[key].exit is None:
            rig.driver.end(key, code=code, oom=oom)

    return Operation("machine.exit", act)

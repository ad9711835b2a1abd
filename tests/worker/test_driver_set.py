"""Several drivers in one worker: each call finds its driver, and one that is down says nothing about its machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_world, machine_config, order
from tests.kit.virtual_time import virtual_time

from hawker.errors import DeadlineExceeded
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import Program, World
from hawker.worker.drivers.base import Exit, Fingerprint, Instance, InstanceSpec, Limits, StartFailed, UnknownInstance
from hawker.worker.drivers.driver_set import RETRY_S, DriverDown, DriverSet

LIMITS = Limits(cpu_millis=1000, memory_mib=256)


class Late(FakeDriver):
    """Cannot be opened until it is `there`."""

    def __init__(self, world: World, *, there: bool = False) -> None:
        super().__init__(world)
        self.there = there

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        if not self.there:
            raise OSError("the runtime is not installed")
        await super().open(on_exit)


def ignore(ended: Exit) -> None:
    """Nobody asks."""


def spec(driver: str, machine: str = "m") -> InstanceSpec:
    return InstanceSpec(
        key=f"{machine}-{driver}/launch",
        machine=machine,
        driver=driver,
        image="app:1",
        argv=["serve"],
        env={},
        limits=LIMITS,
    )


@virtual_time
async def test_a_runtime_has_its_driver() -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    drivers = DriverSet({name: FakeDriver(world) for name, world in worlds.items()})
    await drivers.open(ignore)
    for name in worlds:
        await drivers.of(name).start(spec(name))
    assert [list(world.instances) for world in worlds.values()] == [["m-process/launch"], ["m-container/launch"]]
    with pytest.raises(UnknownInstance):
        await drivers.of("process").inspect("m-container/launch")
    with pytest.raises(DriverDown, match="the submarine driver of this worker is not available"):
        drivers.of("submarine")
    await drivers.close()


@virtual_time
async def test_what_runs_is_found_again_by_those_that_come_after() -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    first = DriverSet({name: FakeDriver(world) for name, world in worlds.items()})
    await first.open(ignore)
    for name in worlds:
        await first.of(name).start(spec(name))
    await first.close()
    second = DriverSet({name: FakeDriver(world) for name, world in worlds.items()})
    await second.open(ignore)
    found = {name: [instance.key for instance in instances] for name, instances in (await second.recover()).items()}
    assert found == {"process": ["m-process/launch"], "container": ["m-container/launch"]}
    await second.close()


@virtual_time
async def test_one_driver_may_serve_several_runtimes_and_is_opened_and_asked_once() -> None:
    world = a_world()
    drivers = FakeDriver(world).for_all()
    await drivers.open(ignore)
    await drivers.of("container").start(spec("container"))
    assert [len(instances) for instances in (await drivers.recover()).values()] == [1]
    assert (world.calls["open"], world.calls["recover"]) == (1, 1)
    assert set(await drivers.fingerprints()) == drivers.opened() == {"process", "container", "microvm"}
    await drivers.close()


@virtual_time
async def test_one_that_cannot_be_opened_keeps_no_other_from_working_and_is_said_to_be_down() -> None:
    drivers = DriverSet({"process": FakeDriver(a_world()), "container": Late(a_world())})
    await drivers.open(ignore)
    await drivers.of("process").start(spec("process"))
    with pytest.raises(DriverDown, match="the runtime is not installed"):
        drivers.of("container")
    found = await drivers.fingerprints()
    assert (found["process"].healthy, found["container"].healthy) == (True, False)
    assert found["container"].problem == "the runtime is not installed"
    assert drivers.opened() == {"process"}
    await drivers.close()


class Mute(FakeDriver):
    async def fingerprint(self) -> Fingerprint:
        raise ConnectionResetError("its supervisor was killed")


@virtual_time
async def test_one_that_cannot_say_what_it_can_is_not_healthy_and_the_others_are() -> None:
    drivers = DriverSet({"process": FakeDriver(a_world()), "container": Mute(a_world())})
    await drivers.open(ignore)
    found = await drivers.fingerprints()
    assert {name: one.healthy for name, one in found.items()} == {"process": True, "container": False}
    assert found["container"].problem == "it does not say what it can: its supervisor was killed"
    await drivers.close()


@virtual_time
async def test_when_not_one_can_be_opened_that_is_an_error() -> None:
    drivers = DriverSet({"process": Late(a_world()), "container": Late(a_world())})
    with pytest.raises(OSError, match="not installed"):
        await drivers.open(ignore)


@virtual_time
async def test_one_that_is_there_later_tells_what_it_has_before_anything_is_asked_of_it() -> None:
    world = a_world()
    world.start(spec("container"))
    late = Late(world)
    drivers = DriverSet({"process": FakeDriver(a_world()), "container": late})
    told: list[tuple[str, list[str], bool]] = []

    async def hear(name: str, instances: Sequence[Instance]) -> None:
        told.append((name, [instance.key for instance in instances], name in drivers.opened()))

    await drivers.open(ignore, hear)
    await asyncio.sleep(3 * RETRY_S)
    assert told == []
    late.there = True
    await asyncio.sleep(2 * RETRY_S)
    assert told == [("container", ["m-container/launch"], False)]
    assert (await drivers.of("container").inspect("m-container/launch")).exit is None
    assert drivers.opened() == {"process", "container"}
    await drivers.close()


@virtual_time
async def test_a_machine_is_not_lost_because_its_driver_is_down(tmp_path: Path) -> None:
    worlds = {name: a_world({"serve": Program()}) for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    await worker.market.reserve(order("a", image="app:1"))
    row, _, _ = await worker.market.confirm("a", APP, None)
    await worker.at_rest(row.id)
    instance = worker.machine(row.id).instance
    await worker.die()

    worker = await opened(tmp_path, worlds, there=False)
    await asyncio.sleep(60)
    assert worker.machine(row.id).state is State.started
    assert worker.machine(row.id).instance == instance
    assert len(worlds["container"].starts) == 1, "it was not started again beside itself"
    stopping = asyncio.ensure_future(worker.machines.stop(APP.name, row.id, worker.request()))
    await asyncio.sleep(30)
    assert worker.machine(row.id).state is State.stopping, "nothing is said of it before its driver is there"
    assert worlds["container"].instances[instance].exit is None
    worker.late.there = True
    await stopping
    await worker.until(lambda: worker.machine(row.id).state is State.stopped)
    assert worlds["container"].instances == {}
    await worker.close()


@virtual_time
async def test_what_cannot_be_done_without_its_driver_is_told_and_goes_on(tmp_path: Path) -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    await worker.market.reserve(order("a", image="app:1"))
    row, _, _ = await worker.market.confirm("a", APP, None)
    await worker.at_rest(row.id)
    await worker.die()

    worker = await opened(tmp_path, worlds, there=False)
    with pytest.raises(DriverDown, match=r"container driver .* not available: the runtime is not inst"):
        await worker.machines.suspend(APP.name, row.id, worker.request())
    with pytest.raises(DriverDown, match="not available"):
        await worker.updates.resize(APP.name, row.id, worker.request(), memory_mb=512)
    run = await worker.machines.destroy(APP.name, row.id, worker.request(), force=True)
    with pytest.raises(
        DeadlineExceeded, match=r"machine\.destroy of machine .* the container driver .* is not available"
    ):
        await worker.machines.wait_ended(run)
    worker.late.there = True
    ended = await worker.machines.wait_ended(run)
    assert ended
    assert ended.status == "done"
    assert worker.machine(row.id).state is State.destroyed
    await worker.close()


@virtual_time
async def test_what_a_late_driver_no_longer_has_is_begun_again_then(tmp_path: Path) -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    await worker.market.reserve(order("a", image="app:1", restart={"policy": "always"}))
    row, _, _ = await worker.market.confirm("a", APP, None)
    await worker.at_rest(row.id)
    await worker.die()
    worlds["container"].lose_power()

    worker = await opened(tmp_path, worlds, there=False)
    await asyncio.sleep(30)
    assert len(worlds["container"].starts) == 1
    worker.late.there = True
    await worker.until(lambda: len(worlds["container"].starts) == 2)
    await worker.at_rest(row.id)
    assert worker.machine(row.id).state is State.started
    await worker.close()


@pytest.mark.parametrize("running", [True, False])
@virtual_time
async def test_a_machine_that_changes_its_runtime_leaves_nothing_with_the_other(running: bool, tmp_path: Path) -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    machine = await worker.run_machine(image="app:1")
    if not running:
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
    assert worlds["container"].directories == {machine}
    await to_a_process(worker, machine)
    assert worker.machine(machine).state is (State.started if running else State.stopped)
    assert worlds["container"].directories == set()
    assert worlds["process"].directories == ({machine} if running else set())
    await worker.close()


@virtual_time
async def test_what_the_other_runtime_has_stays_until_the_new_one_runs_it(tmp_path: Path) -> None:
    """Its log may say why."""
    worlds = {name: a_world() for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    machine = await worker.run_machine(image="app:1")
    worlds["process"].faults["start"] = [StartFailed("not here")]
    await to_a_process(worker, machine)
    assert worker.machine(machine).state is State.failed
    assert worlds["container"].directories == {machine}
    await worker.close()


@virtual_time
async def test_a_machine_leaves_a_runtime_that_is_not_there_any_more(tmp_path: Path) -> None:
    worlds = {name: a_world() for name in ("process", "container")}
    worker = await opened(tmp_path, worlds, there=True)
    machine = await worker.run_machine(image="app:1")
    await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest()
    await worker.die()
    worker = await opened(tmp_path, worlds, there=False)
    await to_a_process(worker, machine)
    assert worker.machine(machine).driver == "process"
    await worker.machines.start(APP.name, machine, worker.request())
    await worker.at_rest()
    assert worker.machine(machine).state is State.started
    await worker.close()


async def to_a_process(worker: SimWorker, machine: str) -> None:
    config = check_config(machine_config(image="app:1", runtime="process"))
    await worker.updates.update(APP.name, machine, worker.request(), config=config)
    await worker.at_rest()


class TwoDriversWorker(SimWorker):
    """A worker with two drivers, the one for containers possibly late."""

    late: Late


async def opened(directory: Path, worlds: dict[str, World], *, there: bool) -> TwoDriversWorker:
    late = Late(worlds["container"], there=there)
    drivers = {"process": FakeDriver(worlds["process"]), "container": late}
    worker = TwoDriversWorker(directory, worlds["process"], drivers=drivers)
    worker.late = late
    worker.open_store()
    await worker.start(sweeping=False)
    return worker

"""Another size for a machine that runs: booked before it is given, and as it was when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world
from tests.kit.virtual_time import virtual_time

from hawker.errors import Invalid, NotBuilt
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import Program
from hawker.worker import ledger

SMALL = Resources(cpus_shared=4, memory_mib=1024, disk_mib=1 << 20, machines=10)


async def resize(worker: SimWorker, machine: str, memory_mb: int, cpus: int | None = None) -> None:
    await worker.updates.resize(APP.name, machine, worker.request(), memory_mb=memory_mb, cpus=cpus)
    await worker.at_rest()


def size(worker: SimWorker, machine: str) -> tuple[int, int]:
    guest = check_config(worker.machine(machine).config).guest
    return guest.cpus, guest.memory_mb


@virtual_time
async def test_a_machine_that_runs_has_another_size_and_is_the_same_program(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        before = worker.machine(machine)
        await resize(worker, machine, 1024, 2)
        after = worker.machine(machine)
        assert (after.instance, after.version, after.state) == (before.instance, before.version, State.started)
        assert size(worker, machine) == (2, 1024)
        limits = worker.world.limits[after.instance]
        assert (limits.cpu_millis, limits.memory_mib) == (2 * 62, 1024)
        assert ledger.held(worker.store.read).memory_mib == 1024
        assert worker.story(machine)[-2:] == ["resize resizing", "resize started"]
        assert worker.wrong() == []


@virtual_time
async def test_a_larger_machine_reads_and_writes_faster_at_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        instance = worker.machine(machine).instance
        limits = worker.world.limits[instance]
        assert (limits.disk_bytes, limits.disk_operations) == (16 << 20, 4000)
        await resize(worker, machine, 1024, 4)
        limits = worker.world.limits[instance]
        assert (limits.disk_bytes, limits.disk_operations) == (32 << 20, 8000)


@virtual_time
async def test_what_the_worker_has_no_room_for_is_refused_with_true_figures(tmp_path: Path) -> None:
    async with a_worker(tmp_path, capacity=SMALL) as worker:
        machine = await worker.run_machine("a")
        await worker.run_machine("b", guest={"memory_mb": 512})
        with pytest.raises(ledger.Full) as refused:
            await resize(worker, machine, 1024)
        assert (refused.value.short.wanted, refused.value.short.free) == (768, 256)
        assert size(worker, machine) == (1, 256)
        await resize(worker, machine, 512)
        assert worker.wrong() == []


@virtual_time
async def test_less_than_the_program_uses_is_refused_by_the_driver_and_undone(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"hungry": Program(least_mib=400)}) as worker:
        machine = await worker.run_machine(program="hungry", guest={"memory_mb": 512})
        await resize(worker, machine, 256)
        (run,) = [run for run in worker.runs(machine) if run.flow == "machine.resize"]
        assert (run.status, run.error) == ("failed", "400 MiB are in use")
        assert size(worker, machine) == (1, 512)
        assert worker.story(machine)[-1] == "resize failed"
        assert ledger.held(worker.store.read).memory_mib == 512
        assert worker.wrong() == []


@virtual_time
async def test_a_machine_at_rest_starts_with_its_new_size(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(skip_launch=True)
        await resize(worker, machine, 512)
        assert worker.world.calls["resize"] == 0
        await worker.machines.start(APP.name, machine, worker.request())
        await worker.at_rest()
        assert worker.world.starts[0].limits.memory_mib == 512
        assert worker.wrong() == []


@virtual_time
async def test_the_size_it_has_is_given_without_a_run(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        await resize(worker, machine, 256, 1)
        assert [run.flow for run in worker.runs(machine)] == ["machine.create"]


@pytest.mark.parametrize(
    ("memory_mb", "cpus", "field"), [(300, None, "limit_mb"), (4096, None, "limit_mb"), (256, 3, "cpus")]
)
@virtual_time
async def test_a_size_that_there_is_not_is_refused_in_the_words_of_the_request(
    memory_mb: int, cpus: int | None, field: str, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        with pytest.raises(Invalid) as refused:
            await resize(worker, machine, memory_mb, cpus)
        assert refused.value.field == field


@virtual_time
async def test_a_configuration_bounds_how_far_its_machine_may_grow(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(guest={"max_memory_mb": 512})
        await resize(worker, machine, 512)
        with pytest.raises(Invalid, match="max_memory_mb is 512"):
            await resize(worker, machine, 768)


@virtual_time
async def test_where_the_driver_cannot_the_remedy_is_an_update(tmp_path: Path) -> None:
    world = a_world()
    worker = SimWorker(tmp_path, world, drivers={"process": FakeDriver(world, can_resize=False)})
    worker.open_store()
    await worker.start(sweeping=False)
    machine = await worker.run_machine()
    with pytest.raises(NotBuilt, match="update it"):
        await resize(worker, machine, 512)
    assert size(worker, machine) == (1, 256)
    await worker.close()

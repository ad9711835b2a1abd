"""What a worker does by itself: programs that end, and what it finds when it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world
from tests.kit.virtual_time import virtual_time

from hawker.errors import DiskFull, Unreachable
from hawker.model.machine import State
from hawker.sim.hosts.world import Program, World
from hawker.store.tx import Tx
from hawker.worker.drivers.base import Exit, InstanceSpec, Limits
from hawker.worker.machine.writer import get_machine

PROGRAMS = {
    "ok": Program(runs_s=1),
    "fail": Program(runs_s=1, code=7),
    "killed": Program(runs_s=1, signal=9),
    "oom": Program(runs_s=1, signal=9, oom_killed=True),
    "oom and 0": Program(runs_s=1, code=0, oom_killed=True),
}


def exit_events(worker: SimWorker, machine: str) -> list[tuple[int, bool, bool]]:
    """Exit status, out of memory, restarting, by exit."""
    found = []
    for event in worker.events(machine):
        if event.type == "exit":
            assert event.request
            seen = event.request["exit_event"]
            found.append((seen["exit_code"], seen["oom_killed"], seen["restarting"]))
    return found


def files(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.iterdir()}


# --- the restart policy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "policy", "starts", "status", "oom"),
    [
        ("ok", "no", 1, 0, False),
        ("fail", "no", 1, 7, False),
        ("ok", "on-failure", 1, 0, False),
        ("fail", "on-failure", 4, 7, False),
        ("killed", "on-failure", 4, 137, False),
        ("oom", "on-failure", 4, 137, True),
        ("oom and 0", "on-failure", 4, 0, True),
    ],
)
@virtual_time
async def test_a_program_that_ends_is_started_again_as_its_policy_says(
    program: str, policy: str, starts: int, status: int, oom: bool, tmp_path: Path
) -> None:
    async with a_worker(tmp_path, PROGRAMS) as worker:
        machine = await worker.create(program=program, restart={"policy": policy, "max_retries": 3})
        await worker.until(lambda: worker.machine(machine).state is State.stopped)
        assert len(worker.world.starts) == starts
        assert exit_events(worker, machine) == [(status, oom, True)] * (starts - 1) + [(status, oom, False)]
        await worker.at_rest()
        assert worker.wrong() == []


@pytest.mark.parametrize("program", PROGRAMS)
@virtual_time
async def test_always_starts_it_again_after_a_delay_that_doubles(program: str, tmp_path: Path) -> None:
    async with a_worker(tmp_path, PROGRAMS) as worker:
        machine = await worker.create(program=program, restart={"policy": "always"})
        await worker.until(lambda: len(exit_events(worker, machine)) == 9)
        rises = [event.at_ms for event in worker.events(machine) if (event.type, event.status) == ("start", "started")]
        ran_ms = 1000
        pauses = [(later - sooner - ran_ms) / 1000 for sooner, later in pairwise(rises)]
        assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60], abs=0.1)


@virtual_time
async def test_the_cause_of_a_restart_is_the_rule_with_its_verdict(tmp_path: Path) -> None:
    async with a_worker(tmp_path, PROGRAMS) as worker:
        machine = await worker.create(program="oom", restart={"policy": "on-failure", "max_retries": 1})
        await worker.until(lambda: worker.machine(machine).state is State.stopped)
        assert [run.cause for run in worker.runs(machine) if run.flow == "machine.exit"] == [
            "restart policy on-failure: out of memory, restart 1",
            "restart policy on-failure: out of memory, 1 of 1 retries used",
        ]


# --- exits that come at a bad time -----------------------------------------------------------------------------------


@virtual_time
async def test_a_program_that_ends_before_its_start_is_recorded_is_not_taken_for_running(tmp_path: Path) -> None:
    world = a_world({"instant": Program(runs_s=0.01)})
    worker = await SimWorker.open(tmp_path, world)

    def cut_after_start(when: str, effect: str) -> None:
        if when == "after" and effect.startswith("start"):
            worker.cut_off()

    world.point = cut_after_start
    machine = await worker.create(program="instant")
    await asyncio.sleep(1)
    await worker.die()
    world.point = lambda when, effect: None
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: worker.machine(machine).state is State.stopped)
    assert exit_events(worker, machine) == [(0, False, False)]
    assert len(world.starts) == 1
    await worker.at_rest()
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_a_stop_reads_the_exit_itself_and_nothing_is_restarted(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=2)}) as worker:
        machine = await worker.run_machine(program="slow", restart={"policy": "always"})
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        await asyncio.sleep(60)
        assert worker.machine(machine).state is State.stopped
        assert exit_events(worker, machine) == [(130, False, False)]


@virtual_time
async def test_a_program_that_ends_on_a_full_disk_is_dealt_with_once_there_is_room(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"fail": Program(runs_s=60, code=1)}, sweeping=False) as worker:
        machine = await worker.run_machine(program="fail", restart={"policy": "always"})
        await worker.fill_disk()
        await asyncio.sleep(120)
        assert len(worker.world.starts) == 1
        assert worker.machine(machine).state is State.started
        worker.make_room()
        await worker.until(lambda: len(worker.world.starts) == 2)
        assert exit_events(worker, machine)[0] == (1, False, True)


# --- the start of a worker -------------------------------------------------------------------------------------------


@virtual_time
async def test_an_end_that_cannot_be_dealt_with_is_once_it_can(tmp_path: Path) -> None:
    """Here the machine's configuration is one that this worker does not read."""
    async with a_worker(tmp_path, {"short": Program(runs_s=5)}) as worker:
        machine = await worker.run_machine(program="short")

        def configured(config: dict[str, Any]) -> Callable[[Tx], None]:
            def change(tx: Tx) -> None:
                tx.record("machine.configured", machine, cause="a test")
                tx.put(replace(get_machine(tx, machine), config=config))

            return change

        config = worker.machine(machine).config
        await worker.store.submit(configured({**config, "restart": {"policy": "of tomorrow"}}))
        await asyncio.sleep(60)
        assert worker.machine(machine).state is State.started
        await worker.store.submit(configured(config))
        await worker.until(lambda: worker.machine(machine).state is State.stopped)
        assert worker.story(machine)[-1] == "exit stopped"


@virtual_time
async def test_a_host_that_lost_power_starts_its_machines_again_but_those_with_policy_no(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machines = {
        policy: await worker.run_machine(key=policy, restart={"policy": policy})
        for policy in ("no", "on-failure", "always")
    }
    await worker.die()
    world.lose_power()
    worker = await SimWorker.open(tmp_path, world)
    await asyncio.sleep(1)
    await worker.at_rest()
    assert {policy: worker.machine(machine).state for policy, machine in machines.items()} == {
        "no": State.stopped,
        "on-failure": State.started,
        "always": State.started,
    }
    lost = next(run for run in worker.runs(machines["always"]) if run.flow == "machine.exit")
    assert lost.cause == "worker start: the program was gone when the worker started"
    assert worker.machine(machines["always"]).restarts == 0
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_a_machine_that_was_being_suspended_when_its_host_lost_power_is_started_again(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine(restart={"policy": "always"})
    world.delays["suspend"] = 60
    await worker.machines.suspend(APP.name, machine, worker.request())
    await asyncio.sleep(1)
    await worker.die()
    world.lose_power()
    world.delays.clear()
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: len(world.running(machine)) == 1)
    await worker.at_rest()
    assert worker.machine(machine).state is State.started
    assert [placed.spec.key for placed in world.running(machine)] == [worker.machine(machine).instance]
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_a_daemon_that_was_killed_restarts_no_program(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine(restart={"policy": "always"})
    await worker.die()
    worker = await SimWorker.open(tmp_path, world)
    await asyncio.sleep(60)
    assert len(world.starts) == 1
    assert worker.story(machine) == ["launch created", "start starting", "start started"]
    await worker.close()


@virtual_time
async def test_a_host_that_shuts_down_takes_its_machines_along_and_brings_them_back(tmp_path: Path) -> None:
    world = a_world({"serve": Program(stops_in_s=1)})
    worker = await SimWorker.open(tmp_path, world)
    always = await worker.run_machine(key="always", restart={"policy": "always"})
    no = await worker.run_machine(key="no", restart={"policy": "no"})
    await worker.close(stop_machines=True)
    assert [placed.exit is not None for placed in world.instances.values()] == [True, True]
    await asyncio.sleep(3600)
    worker = await SimWorker.open(tmp_path, world)
    await asyncio.sleep(1)
    await worker.at_rest()
    assert worker.machine(always).state is State.started
    assert worker.machine(no).state is State.stopped
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_an_instance_that_no_machine_knows_is_removed(tmp_path: Path) -> None:
    world = a_world()
    limits = Limits(cpu_millis=62, memory_mib=256)
    world.start(InstanceSpec(key="run/launch", machine="m", image="host", argv=["serve"], env={}, limits=limits))
    worker = await SimWorker.open(tmp_path, world)
    assert world.instances == {}
    await worker.close()


@virtual_time
async def test_a_launch_that_ends_while_the_driver_lists_its_instances_is_not_taken_for_lost(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    world.delays["start"] = 1
    machine = await worker.create(restart={"policy": "always"})
    await worker.die()  # before the program was started
    world.delays["recover"] = 5
    worker = await SimWorker.open(tmp_path, world)
    await asyncio.sleep(60)
    assert len(world.starts) == 1
    assert worker.story(machine) == ["launch created", "start starting", "start started"]
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_an_exit_that_met_a_run_whose_commit_then_failed_is_not_lost(tmp_path: Path) -> None:
    full = False

    def on_commit(at: str) -> None:
        nonlocal full
        if at == "before" and full:
            full = False
            raise apsw.FullError("no room for this one commit")

    async with a_worker(tmp_path, {"long": Program()}, on_commit=on_commit) as worker:
        machine = await worker.run_machine(program="long")
        row = worker.machine(machine)
        full = True
        # In one commit: a client's stop, and the end of the program, which meets that run.
        stop = asyncio.ensure_future(worker.machines.stop(row.app, machine, worker.request()))
        worker.exits.on_exit(Exit(key=row.instance, machine=machine, code=1, at_ms=worker.host.now_ms()))
        with pytest.raises(DiskFull):
            await stop
        await worker.until(lambda: worker.machine(machine).state is State.stopped)
        assert [status for status, _, _ in exit_events(worker, machine)] == [1]


@virtual_time
async def test_after_a_restore_from_a_backup_a_resumed_start_does_not_run_beside_a_later_instance(
    tmp_path: Path,
) -> None:
    """Found by the simulator: seed 2, a restore while a machine that crashes again and again was in its backoff."""
    world = a_world({"crash": Program(runs_s=1, code=7)})
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.create(program="crash", restart={"policy": "always"})
    await worker.until(lambda: worker.machine(machine).restarts == 1)  # and it waits for its restart
    await worker.die()
    backup = {file: file.read_bytes() for file in sorted(tmp_path.iterdir())}  # noqa: ASYNC240  # nobody waits
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: worker.machine(machine).restarts == 2)
    world.programs["crash"] = Program()
    await worker.until(lambda: worker.machine(machine).state is State.started)
    await worker.die()
    for file, content in backup.items():
        file.write_bytes(content)
    world.delays["recover"] = 5  # long enough for a run to go on meanwhile
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: worker.machine(machine).state is State.started)
    await worker.at_rest()
    assert world.violations == []
    assert [placed.spec.key for placed in world.instances.values()] == [worker.machine(machine).instance]
    await worker.close()


@pytest.mark.parametrize("suspended", [True, False])
@virtual_time
async def test_after_a_restore_from_a_backup_a_program_is_frozen_as_its_machine_is(
    suspended: bool, tmp_path: Path
) -> None:
    """Found by the simulator: seed 156."""
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine()
    if suspended:
        await worker.machines.suspend(APP.name, machine, worker.request())
        await worker.at_rest(machine)
    await worker.die()
    backup = files(tmp_path)
    worker = await SimWorker.open(tmp_path, world)
    await (worker.machines.start if suspended else worker.machines.suspend)(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    await worker.die()
    for file, content in backup.items():
        file.write_bytes(content)
    worker = await SimWorker.open(tmp_path, world)
    assert worker.machine(machine).state is (State.suspended if suspended else State.started)
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_after_a_restore_from_a_backup_a_lost_program_does_not_begin_again_beside_a_later_one(
    tmp_path: Path,
) -> None:
    """Found by the simulator: seed 276."""
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machines = [await worker.run_machine(key, restart={"policy": "always"}) for key in ("one", "two", "three")]
    await worker.die()
    backup = files(tmp_path)
    worker = await SimWorker.open(tmp_path, world)
    for machine in machines:
        await worker.machines.restart(APP.name, machine, worker.request())
        await worker.at_rest(machine)
    await worker.die()
    for file, content in backup.items():
        file.write_bytes(content)
    world.delays["destroy"] = 3  # those that nobody knows go one after the other
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: all(worker.machine(machine).instance in world.instances for machine in machines))
    await worker.at_rest()
    assert world.violations == []
    there = {placed.spec.machine: placed.spec.key for placed in world.instances.values()}
    assert there == {machine: worker.machine(machine).instance for machine in machines}
    await worker.close()


@virtual_time
async def test_an_instance_that_cannot_be_removed_now_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    world = a_world()
    limits = Limits(cpu_millis=62, memory_mib=256)
    world.start(InstanceSpec(key="run/launch", machine="m", image="host", argv=["serve"], env={}, limits=limits))
    met = hindered(world, "destroy run/launch", times=3)
    worker = await SimWorker.open(tmp_path, world)
    assert await worker.run_machine()
    await worker.until(lambda: "run/launch" not in world.instances)
    assert len(met) == 3
    await worker.close()


@virtual_time
async def test_a_program_that_cannot_be_frozen_now_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine()
    await worker.machines.suspend(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    await worker.die()
    (placed,) = world.instances.values()
    world.freeze(placed.spec.key, suspended=False)
    met = hindered(world, "suspend", times=2)
    worker = await SimWorker.open(tmp_path, world)
    await worker.until(lambda: placed.suspended)
    assert len(met) == 2
    assert worker.wrong() == []
    await worker.close()


def hindered(world: World, effect: str, *, times: int) -> list[str]:
    """Have the driver fail so often before an effect; the effects that it met."""
    met: list[str] = []

    def point(when: str, what: str) -> None:
        if when == "before" and what.startswith(effect) and len(met) < times:
            met.append(what)
            raise Unreachable("the host hinders it")

    world.point = point
    return met

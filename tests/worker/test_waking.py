"""What a worker answers a proxy that wants a machine to run, or to rest, whatever else holds the machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world
from tests.kit.virtual_time import SetClock, virtual_time

from hawker.errors import DeadlineExceeded, NotFound, PreconditionFailed
from hawker.model import door
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.hosts.world import Program
from hawker.worker.drivers.driver import StartRelease
from hawker.worker.flows.runner import Busy
from hawker.worker.machine import leases
from hawker.worker.machine.admission import StartRefused
from hawker.worker.machine.waking import InBackoff
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import Request


def wake(worker: SimWorker, machine: str, request: str = "") -> asyncio.Future[door.Awake]:
    return asyncio.ensure_future(worker.waking.wake(door.Wake(app=APP.name, machine=machine, request=request)))


async def rest(worker: SimWorker, machine: str, **options: str) -> door.Resting:
    wish = {"app": APP.name, "machine": machine, **options}
    return await worker.waking.rest(door.Rest(**wish))  # type: ignore[arg-type]


async def stopped(worker: SimWorker, **options: object) -> str:
    machine = await worker.run_machine(**options)  # type: ignore[arg-type]
    await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    return machine


@virtual_time
async def test_a_start_is_answered_before_the_commit_that_tells_of_it(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        awake = await wake(worker, machine, "r1")
        assert (awake.before, worker.machine(machine).state) == (State.stopped, State.starting)
        assert worker.world.instances[awake.instance].exit is None
        await worker.at_rest(machine)
        row = worker.machine(machine)
        assert (row.state, row.instance, row.cause) == (State.started, awake.instance, "proxy autostart (request r1)")
        assert {event.source for event in worker.events(machine)[-2:]} == {"flyd"}
        assert worker.wrong() == []


@virtual_time
@pytest.mark.parametrize("release", ["now", "soon"])
async def test_who_is_in_a_hurry_is_told_of_a_program_that_was_let_go_or_is_about_to_be(
    tmp_path: Path, release: StartRelease
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        worker.world.releases = release
        worker.world.delays["start"] = 1.0
        told: list[door.Awake] = []
        waking = asyncio.ensure_future(worker.waking.wake(door.Wake(app=APP.name, machine=machine), told.append))
        other = wake(worker, machine)
        await worker.until(lambda: bool(told))
        assert (told[0].instance in worker.world.instances) is (release == "now")
        assert not waking.done()
        awake = await waking
        assert (awake.before, awake.instance) == (told[0].before, told[0].instance) == (State.stopped, awake.instance)
        assert (await other).instance == awake.instance
        await worker.at_rest(machine)
        assert (worker.machine(machine).instance, len(worker.world.starts)) == (awake.instance, 2)


@virtual_time
async def test_a_program_that_was_let_go_and_cannot_run_is_told_of(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        worker.world.releases = "now"
        worker.world.programs["serve"] = Program(fails="not executable")
        told: list[door.Awake] = []
        with pytest.raises(StartRefused, match="not executable"):
            await worker.waking.wake(door.Wake(app=APP.name, machine=machine), told.append)
        assert len(told) == 1
        assert worker.machine(machine).state is State.failed


@virtual_time
async def test_nothing_is_let_go_whose_order_never_came_to_be(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        worker.world.releases = "now"
        holder = worker.request(owner="somebody")
        await worker.store.submit(lambda tx: leases.acquire(tx, worker.host, get_machine(tx, machine), holder, 60))
        with pytest.raises(leases.LeaseHeld):
            await wake(worker, machine)
        assert len(worker.driver.prespawned) == 1
        assert len(worker.world.starts) == 1
        assert worker.waking._flows._prespawned == {}


@virtual_time
async def test_any_number_who_ask_get_one_start(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        awake = await asyncio.gather(*(wake(worker, machine, f"r{n}") for n in range(20)))
        assert len({each.instance for each in awake}) == 1
        assert (await wake(worker, machine)).before is State.starting  # the commit is still to come
        await worker.at_rest(machine)
        assert (await wake(worker, machine)).before is State.started
        assert worker.story(machine).count("start started") == 2  # its first, and this one


@virtual_time
async def test_a_suspended_machine_is_resumed(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        instance = worker.machine(machine).instance
        assert (await rest(worker, machine, how="suspend")).state is State.suspended
        await worker.at_rest(machine)
        assert (await wake(worker, machine)).instance == instance
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.started


@virtual_time
async def test_a_start_waits_for_the_end_of_a_stop(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=2.0)}) as worker:
        machine = await worker.run_machine(program="slow")
        old = worker.machine(machine).instance
        assert (await rest(worker, machine)).state is State.stopped
        awake = await wake(worker, machine)
        assert awake.before is State.stopping
        assert awake.instance != old
        assert 2.0 <= awake.seconds < 2.1
        await worker.at_rest(machine)
        assert worker.story(machine)[-4:] == ["exit stopped", "stop stopped", "start starting", "start started"]
        assert worker.wrong() == []


@virtual_time
async def test_a_program_that_cannot_be_started_is_told_of(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        worker.world.programs["serve"] = Program(fails="not executable")
        with pytest.raises(StartRefused, match="not executable"):
            await wake(worker, machine)
        assert worker.machine(machine).state is State.failed


@virtual_time
async def test_one_whose_image_does_not_come_is_not_waited_for_forever_and_says_so(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker, image="app:1")
        worker.world.images.clear()
        worker.world.silent_images.add("app:1")
        with pytest.raises(DeadlineExceeded, match=r"not started within 55 s: .*registry of app:1.* does not answer"):
            await wake(worker, machine)


@virtual_time
async def test_no_request_shortens_a_long_backoff(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"fail": Program(runs_s=0.1, code=1)}) as worker:
        machine = await worker.create(program="fail", restart={"policy": "always"})
        await worker.until(lambda: worker.machine(machine).restarts == 6)
        with pytest.raises(InBackoff) as refused:
            await wake(worker, machine)
        assert refused.value.details["until_ms"] > worker.host.now_ms()
        assert worker.machine(machine).restarts == 6


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("back_s", [3600.0, 86_400.0])
@virtual_time
async def test_a_clock_that_is_set_back_makes_no_backoff_longer_than_it_was_to_be(
    restart: bool, back_s: float, tmp_path: Path
) -> None:
    clock = SetClock(ahead_s=back_s)
    world = a_world({"fail": Program(runs_s=0.1, code=1)})
    world.host = clock.host()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.create(program="fail", restart={"policy": "always"})
    await worker.until(lambda: worker.machine(machine).restarts == 4)  # it waits for 4 s now
    await asyncio.sleep(1)
    starts = len(world.starts)
    clock.ahead_s = 0.0
    if restart:
        await worker.close()
        world.host = clock.host()
        worker = await SimWorker.open(tmp_path, world)
    with pytest.raises(InBackoff) as refused:
        await wake(worker, machine)
    assert 2000 < refused.value.details["until_ms"] - worker.host.now_ms() <= 4000
    await asyncio.sleep(4.1)
    assert len(world.starts) == starts + 1
    await worker.close()


@virtual_time
async def test_a_lease_stands_against_a_start_and_a_stop(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        holder = worker.request(owner="somebody")
        await worker.store.submit(lambda tx: leases.acquire(tx, worker.host, get_machine(tx, machine), holder, 60))
        with pytest.raises(leases.LeaseHeld):
            await wake(worker, machine)
        await worker.machines.start(APP.name, machine, _with_nonce(worker, machine))
        await worker.at_rest(machine)
        assert (await wake(worker, machine)).before is State.started  # it runs: nothing is changed
        with pytest.raises(leases.LeaseHeld):
            await rest(worker, machine)


def _with_nonce(worker: SimWorker, machine: str) -> Request:
    lease = leases.current(worker.store.read, machine, worker.host.steady_ms())
    assert lease is not None
    return worker.request(nonce=lease.nonce, owner=lease.owner)


@virtual_time
async def test_what_holds_a_machine_is_not_stopped_by_a_proxy(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=2.0)}) as worker:
        machine = await worker.run_machine(program="slow")
        restarting = asyncio.ensure_future(worker.machines.restart(APP.name, machine, worker.request()))
        await worker.until(lambda: worker.machine(machine).state is State.restarting)
        with pytest.raises(Busy):
            await rest(worker, machine)
        await restarting
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.started


@virtual_time
async def test_only_the_program_that_was_seen_idle_is_stopped(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        with pytest.raises(PreconditionFailed, match="by now"):
            await rest(worker, machine, instance="an-earlier-run/launch")
        assert (await rest(worker, machine, instance=worker.machine(machine).instance)).state is State.stopped
        await worker.at_rest(machine)
        assert (await rest(worker, machine)).state is State.stopped
        assert worker.events(machine)[-1].cause == door.AUTOSTOP


@virtual_time
async def test_a_machine_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        for call in (wake(worker, "0123456789abcd"), rest(worker, "0123456789abcd")):
            with pytest.raises(NotFound):
                await call


@virtual_time
async def test_a_worker_that_is_killed_after_its_answer_has_what_it_answered(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await stopped(worker)
        awake = await wake(worker, machine)
        await worker.die()
        again = await SimWorker.open(tmp_path, worker.world)
        try:
            await again.at_rest(machine)
            row: MachineRow = again.machine(machine)
            assert (row.state, row.instance) == (State.started, awake.instance)
            assert again.wrong() == []
        finally:
            await again.close()

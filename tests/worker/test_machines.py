"""Requests to a machine: what they meet, what they wait for, and what they leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, machine_config, order
from tests.kit.virtual_time import virtual_time

from hawker.errors import Broken, Conflict, HawkerError, PreconditionFailed
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import Reservation
from hawker.sim.hosts.world import Program
from hawker.store.db import SLOW_IN_A_ROW
from hawker.worker import ledger
from hawker.worker.drivers.wire import told
from hawker.worker.flows.flow import Done, Flow, Step, StepContext
from hawker.worker.flows.runner import Busy, failing
from hawker.worker.machine import leases
from hawker.worker.machine.flows import MachineFlows


@virtual_time
async def test_a_start_waits_for_the_stop_before_it(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=3)}) as worker:
        machine = await worker.run_machine(program="slow")
        await worker.machines.stop(APP.name, machine, worker.request())
        before, run = await worker.machines.start(APP.name, machine, worker.request())
        assert before is State.stopped
        await worker.runner.wait_ended(run)
        assert worker.machine(machine).state is State.started


async def test_a_request_waits_for_a_run_whose_commit_is_still_on_its_way_to_a_slow_disk(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:  # in real time: only there a commit is made beside the loop

        def commit_slowly() -> bool:
            time.sleep(0.01)
            return False

        worker.store._db.set_commit_hook(commit_slowly)
        for name in [f"before-{number}" for number in range(1, SLOW_IN_A_ROW)] + ["a"]:
            reserved = await worker.market.reserve(order(name))
        assert isinstance(reserved, Reservation)
        assert worker.store.slow
        confirming = worker.market.confirm("a", APP, None)
        stopping = worker.machines.stop(APP.name, reserved.machine, worker.request())  # in the same commit
        await asyncio.gather(confirming, stopping)
        await worker.at_rest()
        assert worker.machine(reserved.machine).state is State.stopped
        worker.store._db.set_commit_hook(None)


@virtual_time
async def test_a_request_that_the_state_forbids_is_refused_once_the_machine_is_at_rest(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.create()
        stopping = asyncio.ensure_future(worker.machines.stop(APP.name, machine, worker.request()))
        restarting = asyncio.ensure_future(worker.machines.restart(APP.name, machine, worker.request()))
        await stopping
        with pytest.raises(PreconditionFailed, match="unable to restart machine from current state: 'stopped'"):
            await restarting


@virtual_time
async def test_a_stop_in_a_backoff_wins_at_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"fail": Program(runs_s=0.1, code=1)}) as worker:
        machine = await worker.create(program="fail", restart={"policy": "always"})
        await worker.until(lambda: worker.machine(machine).restarts == 6)
        began = asyncio.get_running_loop().time()
        await worker.machines.stop(APP.name, machine, worker.request())
        assert asyncio.get_running_loop().time() - began < 0.01
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.stopped
        assert worker.world.instances == {}
        await asyncio.sleep(600)
        assert worker.machine(machine).state is State.stopped


# --- a crash-looping machine in its backoff ---------------------------------------------------------------------------


@asynccontextmanager
async def a_crash_loop(directory: Path) -> AsyncIterator[tuple[SimWorker, str]]:
    """A worker, and a machine of it in a backoff of 16 s."""
    async with a_worker(directory, {"fail": Program(runs_s=0.1, code=1)}) as worker:
        machine = await worker.create(program="fail", restart={"policy": "always"})
        await worker.until(lambda: worker.machine(machine).restarts == 6)
        assert worker.machine(machine).state is State.starting
        yield worker, machine
        assert worker.wrong() == []


def programs(worker: SimWorker) -> list[str]:
    """What runs on a worker, by its command line."""
    return [instance.spec.argv[0] for instance in worker.world.instances.values()]


@pytest.mark.parametrize("program", ["serve", "broken"])
@virtual_time
async def test_an_update_in_a_backoff_launches_the_new_program_at_once(program: str, tmp_path: Path) -> None:
    async with a_crash_loop(tmp_path) as (worker, machine):
        worker.world.programs["broken"] = Program(fails="not executable")
        config = check_config(machine_config(program, guest={"cpus": 2}))
        began = asyncio.get_running_loop().time()
        row, _ = await worker.updates.update(APP.name, machine, worker.request(), config=config)
        assert (row.desired, row.restarts, row.resources) == ("started", 0, config.guest.resources())
        await worker.at_rest(machine)
        assert asyncio.get_running_loop().time() - began < 0.01
        await asyncio.sleep(600)  # nothing is left of the backoff
        row = worker.machine(machine)
        assert row.state is (State.started if program == "serve" else State.failed)
        assert programs(worker) == (["serve"] if program == "serve" else [])
        assert worker.story(machine)[-3:-1] == ["exit stopped", "update starting"]


@virtual_time
async def test_an_update_in_a_backoff_that_is_not_to_launch_leaves_the_machine_stopped(tmp_path: Path) -> None:
    async with a_crash_loop(tmp_path) as (worker, machine):
        config = check_config(machine_config())
        row, _ = await worker.updates.update(APP.name, machine, worker.request(), config=config, skip_launch=True)
        assert (row.state, row.desired) == (State.stopped, "stopped")
        await asyncio.sleep(600)
        assert worker.machine(machine).state is State.stopped
        assert worker.world.instances == {}


@pytest.mark.parametrize("wrong", ["version", "room", "lease"])
@virtual_time
async def test_what_is_refused_in_a_backoff_leaves_the_machine_to_its_restart(wrong: str, tmp_path: Path) -> None:
    async with a_crash_loop(tmp_path) as (worker, machine):
        guest = {"cpu_kind": "performance", "cpus": 16} if wrong == "room" else {}
        config = check_config(machine_config(guest=guest))
        if wrong == "lease":
            row, owner = worker.machine(machine), worker.request(owner="another")
            await worker.store.submit(lambda tx: leases.acquire(tx, worker.host, row, owner, 60))
        before = worker.machine(machine), worker.story(machine), worker.runs(machine)
        version = "not-this-one" if wrong == "version" else ""
        with pytest.raises(Conflict):
            await worker.updates.update(APP.name, machine, worker.request(), config=config, current_version=version)
        assert (worker.machine(machine), worker.story(machine), worker.runs(machine)) == before
        await worker.until(lambda: worker.machine(machine).restarts == 7)
        assert worker.machine(machine).desired == "started"
        await asyncio.sleep(60)  # the lease is over
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest(machine)


@virtual_time
async def test_a_restart_in_a_backoff_happens_now(tmp_path: Path) -> None:
    async with a_crash_loop(tmp_path) as (worker, machine):
        worker.world.programs["fail"] = Program()  # what it lacked is there
        began = asyncio.get_running_loop().time()
        await worker.machines.restart(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        assert asyncio.get_running_loop().time() - began < 0.01
        await asyncio.sleep(600)
        row = worker.machine(machine)
        assert (row.state, row.desired, row.restarts) == (State.started, "started", 0)
        assert programs(worker) == ["fail"]
        assert worker.story(machine)[-3:] == ["exit stopped", "restart starting", "start started"]


@virtual_time
async def test_a_stop_while_a_crash_is_cleared_up_does_not_wait_for_the_backoff(tmp_path: Path) -> None:
    async with a_crash_loop(tmp_path) as (worker, machine):
        worker.world.delays["destroy"] = 2
        await worker.until(lambda: worker.machine(machine).restarts == 7)
        worker.world.programs["fail"] = Program()
        began = asyncio.get_running_loop().time()
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        assert asyncio.get_running_loop().time() - began < 6
        assert worker.machine(machine).state is State.stopped


@virtual_time
async def test_a_larger_guest_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        before = worker.machine(machine), worker.story(machine)
        config = check_config(machine_config(guest={"cpu_kind": "performance", "cpus": 16}))
        with pytest.raises(Conflict, match="insufficient CPUs"):
            await worker.updates.update(APP.name, machine, worker.request(), config=config)
        assert (worker.machine(machine), worker.story(machine)) == before
        assert worker.wrong() == []


@virtual_time
async def test_a_machine_at_rest_can_be_destroyed_on_a_full_worker(tmp_path: Path) -> None:
    room_for_one = Resources(cpus_shared=1, memory_mib=1024, disk_mib=1 << 20, machines=8)
    async with a_worker(tmp_path, capacity=room_for_one) as worker:
        asleep = await worker.run_machine("order-1")
        await worker.machines.stop(APP.name, asleep, worker.request())
        await worker.at_rest()
        await worker.run_machine("order-2")
        await worker.machines.destroy(APP.name, asleep, worker.request())
        await worker.at_rest()
        assert worker.machine(asleep).state is State.destroyed
        assert worker.wrong() == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (machine_config(guest={"cpu_kind": "performance", "cpus": 16}), "insufficient CPUs"),
        ({**machine_config(), "image": "nginx", "runtime": "elsewhere"}, "it has no such driver"),
    ],
)
@virtual_time
async def test_a_machine_at_rest_does_not_become_one_that_its_worker_can_never_run(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        before = worker.machine(machine)
        with pytest.raises(HawkerError, match=why):
            await worker.updates.update(APP.name, machine, worker.request(), config=check_config(config))
        assert worker.machine(machine) == before


@virtual_time
async def test_a_destroy_of_a_machine_that_runs_is_refused_with_a_remedy(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        with pytest.raises(PreconditionFailed) as refused:
            await worker.machines.destroy(APP.name, machine, worker.request())
        assert refused.value.body()["details"]["hint"] == "stop it first, or destroy it with force=true"


# --- destroy by force ends whatever is going on ----------------------------------------------------------------------


@virtual_time
async def test_a_forced_destroy_ends_the_run_in_the_way(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"stubborn": Program(stops_in_s=None)}) as worker:
        machine = await worker.run_machine(program="stubborn")
        worker.world.delays["stop"] = 20
        await worker.machines.stop(APP.name, machine, worker.request())
        await asyncio.sleep(6)
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.destroyed
        assert (worker.world.instances, worker.world.directories) == ({}, set())
        assert worker.wrong() == []


@virtual_time
async def test_a_forced_destroy_ends_a_parked_run(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        worker.world.faults["start"] = [Broken("look at this")]
        await worker.machines.restart(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        assert worker.runs(machine)[-1].status == "parked"
        with pytest.raises(Busy):
            await worker.machines.stop(APP.name, machine, worker.request())
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.destroyed
        assert (worker.world.instances, worker.world.directories) == ({}, set())
        assert worker.wrong() == []


@pytest.mark.parametrize("step", ["destroy", "purge"])
@virtual_time
async def test_a_forced_destroy_tries_a_parked_destroy_again(step: str, tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        worker.world.faults[step] = [Broken("look at this")]
        run = await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        parked = await worker.machines.wait_ended(run)
        assert parked
        assert parked.status == "parked"
        assert await worker.machines.destroy(APP.name, machine, worker.request()) == run, "and by itself nothing more"
        assert worker.runs(machine)[-1].status == "parked"
        again = [worker.machines.destroy(APP.name, machine, worker.request(), force=True) for _ in range(2)]
        assert await asyncio.gather(*again) == [run, run]
        ended = await worker.machines.wait_ended(run)
        assert ended
        assert ended.status == "done"
        assert worker.machine(machine).state is State.destroyed
        assert (worker.world.instances, worker.world.directories) == ({}, set())
        assert worker.wrong() == []


@virtual_time
async def test_what_meets_a_parked_run_is_told_what_a_person_can_do(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        worker.world.faults["stop"] = [Broken("look at this")]
        run = await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        with pytest.raises(Busy) as refused:
            await worker.machines.start(APP.name, machine, worker.request())
        assert refused.value.hint.startswith(f"hawker workers retry {run} ")


@virtual_time
async def test_a_suspend_that_was_given_up_leaves_the_program_running(tmp_path: Path) -> None:
    def broken(flows: MachineFlows) -> Sequence[Flow]:
        (suspend,) = (flow for flow in flows.all() if flow.name == "machine.suspend")
        act = suspend.by_name["suspend"].act
        assert act

        async def frozen_then_broken(context: StepContext) -> Done:
            await act(context)
            raise Broken("after its effect")

        mutant = Flow(suspend.name, 1, suspend.final, [Step("suspend", act=frozen_then_broken)])
        return [mutant if flow.name == suspend.name else flow for flow in flows.all()]

    async with a_worker(tmp_path, flows=broken) as worker:
        machine = await worker.run_machine()
        await worker.machines.suspend(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        (parked,) = [run for run in worker.runs(machine) if run.status == "parked"]
        await worker.runner.cancel(parked.id, "given up")
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.started
        assert worker.wrong() == []


@virtual_time
async def test_a_destroy_that_the_host_hinders_goes_on_later_and_says_why_meanwhile(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        met: list[str] = []

        def point(when: str, effect: str) -> None:
            if when == "before" and effect.startswith("destroy") and len(met) < 20:
                met.append(effect)
                raise told({"error": "Hindered", "message": "[Errno 28] No space left on device"})

        worker.world.point = point
        run = await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.until(lambda: len(met) == 10)
        assert "No space left on device" in failing(worker.store.read, machine)
        ended = await worker.runner.wait_ended(run)
        assert (ended.status, ended.error, len(met)) == ("done", "", 20)
        assert worker.machine(machine).state is State.destroyed


@virtual_time
async def test_a_suspended_machine_holds_no_cpu_and_books_it_again_to_resume_but_not_to_end(tmp_path: Path) -> None:
    room = Resources(cpus_shared=1, memory_mib=1024, disk_mib=1 << 20, machines=9)
    async with a_worker(tmp_path, capacity=room) as worker:
        first = await worker.run_machine("a")
        await worker.machines.suspend(APP.name, first, worker.request())
        await worker.at_rest(first)
        assert ledger.held(worker.store.read) == Resources(memory_mib=256, disk_mib=1024, machines=1)
        second = await worker.run_machine("b")
        with pytest.raises(ledger.Full, match=r"cpus_shared: 1 wanted, 0 free") as full:
            await worker.machines.start(APP.name, first, worker.request())
        assert "worker.cpu_overcommit" in full.value.hint
        await worker.machines.stop(APP.name, first, worker.request())
        await worker.at_rest(first)
        assert worker.machine(first).state is State.stopped
        await worker.machines.stop(APP.name, second, worker.request())
        await worker.at_rest(second)
        await worker.machines.start(APP.name, first, worker.request())
        await worker.at_rest(first)
        assert ledger.held(worker.store.read) == Resources(cpus_shared=1, memory_mib=256, disk_mib=2048, machines=2)

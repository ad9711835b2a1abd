"""Waiting for a machine's state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, machine_config
from tests.kit.virtual_time import virtual_time

from hawker.errors import DeadlineExceeded, Invalid, NotFound, PreconditionFailed
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.sim.hosts.world import Program
from hawker.worker.machine.wait import Reached, wait_state, wanted_states


async def wait(worker: SimWorker, machine: str, *states: str, timeout_s: float = 60, **options: Any) -> Reached:
    wanted = wanted_states(list(states))
    return await wait_state(worker.store, worker.log, APP.name, machine, wanted, timeout_s=timeout_s, **options)


@virtual_time
async def test_it_returns_at_once_when_the_state_is_there_and_when_it_comes_otherwise(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.delays["start"] = 5
        machine = await worker.create()
        began = asyncio.get_running_loop().time()
        reached = await wait(worker, machine, "started")
        assert asyncio.get_running_loop().time() - began == pytest.approx(5)
        assert reached.row.state is State.started
        assert reached.event_id == worker.events(machine)[-1].id
        assert (await wait(worker, machine, "started")).event_id == reached.event_id


@virtual_time
async def test_a_state_that_lasts_a_moment_is_not_missed(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"instant": Program(runs_s=0)}) as worker:
        machine = await worker.create(program="instant")
        reached = await wait(worker, machine, "started")
        assert reached.row.state is State.started
        assert (await wait(worker, machine, "settled", after_event=reached.event_id)).row.state is State.stopped


@virtual_time
async def test_a_program_that_has_just_ended_is_not_started_again_yet(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"short": Program(runs_s=10)}) as worker:
        machine = await worker.create(program="short", restart={"policy": "always"})
        seen = (await wait(worker, machine, "started")).event_id
        again = await wait(worker, machine, "started", after_event=seen)
        assert len(worker.world.starts) == 2
        assert again.event_id == worker.events(machine)[-1].id


@virtual_time
async def test_several_states_may_be_waited_for_at_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"broken": Program(fails="not executable")}) as worker:
        worker.world.delays["start"] = 5
        machine = await worker.create(program="broken")
        assert (await wait(worker, machine, "stopped", "failed")).row.state is State.failed


@virtual_time
async def test_only_what_comes_after_an_event_counts(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=3)}) as worker:
        machine = await worker.run_machine(program="slow")
        seen = (await wait(worker, machine, "started")).event_id
        waiting = asyncio.ensure_future(wait(worker, machine, "started", after_event=seen))
        await asyncio.sleep(1)
        assert not waiting.done()
        await worker.machines.restart(APP.name, machine, worker.request())
        assert (await waiting).event_id > seen


@virtual_time
async def test_a_version_that_is_replaced_ends_the_wait(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        old = worker.machine(machine).version
        waiting = asyncio.ensure_future(wait(worker, machine, "stopped", version=old))
        await asyncio.sleep(1)
        config = check_config(machine_config(env={"A": "1"}))
        row, _ = await worker.updates.update(APP.name, machine, worker.request(), config=config)
        with pytest.raises(PreconditionFailed, match="currently replaced"):
            await waiting
        assert (await wait(worker, machine, "started", version=row.version)).row.version == row.version
        with pytest.raises(PreconditionFailed, match="currently replaced"):
            await wait(worker, machine, "started", version=old)
        with pytest.raises(NotFound):
            await wait(worker, machine, "started", version="none")


@virtual_time
async def test_it_gives_up_in_time_and_says_what_it_saw(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="failed to reach desired state, stopped, currently started"):
            await wait(worker, machine, "stopped", timeout_s=7)
        assert asyncio.get_running_loop().time() - began == pytest.approx(7)


@virtual_time
async def test_it_says_what_a_machine_waits_for_whose_image_cannot_be_had(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.silent_images.add("app:1")
        machine = await worker.create(image="app:1")
        with pytest.raises(
            DeadlineExceeded, match=r"currently created: .*the registry of app:1.* does not answer"
        ) as told:
            await wait(worker, machine, "started", timeout_s=2)
        assert told.value.details == {"machine": machine, "why": told.value.message.partition("created: ")[2]}
        worker.world.silent_images.clear()
        assert (await wait(worker, machine, "started")).row.state is State.started


@virtual_time
async def test_what_nobody_can_wait_for_is_refused(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        with pytest.raises(Invalid):
            await wait(worker, machine, "created")
        with pytest.raises(NotFound):
            await wait(worker, "none", "started")

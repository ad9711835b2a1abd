"""Requests to a machine: what they meet, what they wait for, and what they leave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, a_worker
from tests.kit.virtual_time import virtual_time
from tests.kit.world import Program

from hawker.errors import PreconditionFailed
from hawker.model.machine import State


@virtual_time
async def test_a_start_waits_for_the_stop_before_it(tmp_path: Path) -> None:
    async with a_worker(tmp_path, {"slow": Program(stops_in_s=3)}) as worker:
        machine = await worker.run_machine(program="slow")
        await worker.machines.stop(APP.name, machine, worker.request())
        before, run = await worker.machines.start(APP.name, machine, worker.request())
        assert before is State.stopped
        await worker.runner.wait_ended(run)
        assert worker.machine(machine).state is State.started


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

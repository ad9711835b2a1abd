"""Runs over the API: what is told of them, and what a person can do about a parked one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request
from tests.kit.sim_worker import APP, SimWorker, a_worker
from tests.kit.virtual_time import virtual_time

from hawker.errors import Broken, Invalid, NotFound
from hawker.http.call import Call
from hawker.model.fleet_calls import CancelRun, ListRuns, RetryRun, ShowRun
from hawker.model.machine import State
from hawker.worker.api.runs import SETTLE_S, RunsApi

CALL = Call(Request({"type": "http", "headers": []}), b"", id="req-1", owner="tester", agent=False)


def runs_api(worker: SimWorker) -> RunsApi:
    return RunsApi(worker.store, worker.runner, "ord-1")


async def parked(worker: SimWorker, faults: int = 1) -> tuple[str, str]:
    """A machine, and its run that is parked at `stop`."""
    machine = await worker.run_machine()
    worker.world.faults["stop"] = [Broken("look at this")] * faults
    run = await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    return machine, run


@virtual_time
async def test_runs_that_have_not_ended_are_listed_and_others_when_asked_for(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine, run = await parked(worker)
        runs = runs_api(worker)
        (shown,) = await runs.runs(CALL, ListRuns())
        assert (shown.id, shown.worker, shown.machine) == (run, "ord-1", machine)
        assert (shown.flow, shown.status, shown.step, shown.error) == ("machine.stop", "parked", "stop", "look at this")
        assert await runs.run(CALL, ShowRun(run)) == shown
        assert [r.flow for r in await runs.runs(CALL, ListRuns(status=("parked", "done")))] == [
            "machine.stop",
            "machine.create",
        ]
        assert [r.flow for r in await runs.runs(CALL, ListRuns(status=("parked", "done"), limit=1))] == ["machine.stop"]
        assert await runs.runs(CALL, ListRuns(machine="0123456789abcd")) == []
        with pytest.raises(Invalid):
            await runs.runs(CALL, ListRuns(status=("stuck",)))
        with pytest.raises(NotFound):
            await runs.run(CALL, ShowRun("unknown"))


@virtual_time
async def test_a_parked_step_is_tried_again_as_often_as_it_takes(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine, run = await parked(worker, faults=2)
        runs = runs_api(worker)
        assert (await runs.retry(CALL, RetryRun(run))).status == "parked"
        done = await runs.retry(CALL, RetryRun(run))
        assert (done.status, done.step, done.error) == ("done", "", "")
        assert worker.machine(machine).state is State.stopped
        assert await runs.retry(CALL, RetryRun(run)) == done, "and repeating does no harm"
        assert await runs.cancel(CALL, CancelRun(run)) == done
        assert worker.wrong() == []


@virtual_time
async def test_a_parked_run_is_given_up_with_the_cause(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine, run = await parked(worker)
        ended = await runs_api(worker).cancel(CALL, CancelRun(run))
        assert (ended.status, ended.error) == ("cancelled", "cancelled by request req-1 by tester")
        assert worker.machine(machine).state is State.stopped
        assert worker.world.instances == {}
        assert worker.wrong() == []


@virtual_time
async def test_a_run_that_goes_on_is_shown_as_it_is(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine, run = await parked(worker)
        worker.world.delays["stop"] = 60
        began = asyncio.get_running_loop().time()
        shown = await runs_api(worker).retry(CALL, RetryRun(run))
        assert asyncio.get_running_loop().time() - began == pytest.approx(SETTLE_S)
        assert (shown.status, shown.step) == ("active", "stop")
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.stopped

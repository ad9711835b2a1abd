"""What a worker keeps of what is over, and for how long: machines that come and go leave no more behind than stated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker
from tests.kit.virtual_time import virtual_time

from hawker.model.machine import State
from hawker.model.rows import MachineRow, VersionRow
from hawker.store.compaction import Compaction, Kept
from hawker.worker import history

ALL_GONE = Kept(records=0, seconds=0.0)
TABLES = ("machine", "version", "event", "run", "decision", "log")


async def compact(worker: SimWorker, kept: Kept = ALL_GONE) -> None:
    work = Compaction(worker.store, "ord-1", kept, history.over, batch=16, images=32)
    while await worker.store.submit(work.step):
        pass


async def live(worker: SimWorker, key: str) -> str:
    machine = await worker.run_machine(key)
    await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
    await worker.at_rest(machine)
    return machine


def counts(worker: SimWorker) -> dict[str, int]:
    return {table: worker.store.read.query(f"select count(*) from {table}")[0][0] for table in TABLES}


@pytest.mark.parametrize("lives", [12, 36])
@virtual_time
async def test_however_many_machines_came_and_went_as_much_is_left_of_them(lives: int, tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        stays = await worker.run_machine("stays")
        for n in range(lives):
            await live(worker, f"order-{n}")
            await compact(worker)
        left = counts(worker)
        assert left["log"] < 32
        assert max(left["machine"], left["version"], left["run"]) < 10
        assert left["event"] < 40
        assert worker.machine(stays).state is State.started
        assert worker.story(stays)[-1] == "start started"
        assert worker.store.read.get(VersionRow, worker.machine(stays).version)


@virtual_time
async def test_a_destroyed_machine_is_there_with_its_events_until_its_time_is_over(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await live(worker, "order-1")
        for n in range(8):
            await live(worker, f"later-{n}")
        kept = Kept(records=10_000, seconds=3600.0)
        await asyncio.sleep(3590)
        await compact(worker, kept)
        assert worker.machine(machine).state is State.destroyed
        assert worker.story(machine)[-1] == "destroy destroyed"
        await asyncio.sleep(20)
        await compact(worker, kept)
        assert worker.store.read.get(MachineRow, machine) is None
        assert worker.events(machine) == []
        assert worker.runs(machine) == []


@virtual_time
async def test_a_machine_that_starts_again_and_again_keeps_its_newest_events(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        for _ in range(30):
            await worker.machines.stop(APP.name, machine, worker.request())
            await worker.at_rest()
            await worker.machines.start(APP.name, machine, worker.request())
            await worker.at_rest()
        before = worker.events(machine)
        assert len(before) > history.EVENTS_KEPT
        await compact(worker)
        after = worker.events(machine)
        assert after == before[-len(after) :]
        assert history.EVENTS_KEPT <= len(after) < history.EVENTS_KEPT + 20
        assert len(worker.runs(machine)) < 6


@virtual_time
async def test_a_worker_goes_on_after_a_cut_as_if_there_had_been_none(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        stays = await worker.run_machine("stays")
        for n in range(8):
            await live(worker, f"order-{n}")
        await compact(worker)
        world = worker.world
        await worker.close()
        again = await SimWorker.open(tmp_path, world)
        assert again.machine(stays).state is State.started
        await again.machines.destroy(APP.name, stays, again.request(), force=True)
        await again.at_rest()
        assert again.wrong() == []
        await again.close()

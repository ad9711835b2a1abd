"""A machine whose id a higher generation has elsewhere is not started here any more, and removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.owners import Owner, machine
from tests.kit.counting import Count, counting
from tests.kit.sim_worker import APP, SimWorker, a_world
from tests.kit.virtual_time import virtual_time

from hawker.catalog.gossip.replica import Replica
from hawker.model.machine import State

MINE, OTHER = "ord-1", "ord-2"


@asynccontextmanager
async def a_worker_with_a_catalog(directory: Path) -> AsyncIterator[tuple[SimWorker, Replica]]:
    world = a_world()
    replica = Replica.open(directory / "catalog.db", world.host)
    worker = await SimWorker.open(directory, world, catalog=replica)
    try:
        yield worker, replica
    finally:
        await worker.close()
        replica.close()


@pytest.mark.parametrize("stopped", [False, True])
@virtual_time
async def test_a_machine_that_a_higher_generation_has_is_removed_and_says_why(tmp_path: Path, stopped: bool) -> None:
    async with a_worker_with_a_catalog(tmp_path) as (worker, replica):
        lost = await worker.run_machine("order-1")
        kept = await worker.run_machine("order-2")
        Owner(replica, MINE).put("machines", **{lost: machine(), kept: machine()})
        if stopped:
            await worker.machines.stop(APP.name, lost, worker.request())
            await worker.at_rest()
        Owner(replica, OTHER).put("machines", **{lost: machine(generation=2)})
        await worker.until(lambda: worker.machine(lost).state is State.destroyed)
        assert worker.machine(lost).cause == f"local rule: superseded, generation 2 of it is on {OTHER}"
        assert worker.world.running(lost) == []
        assert worker.machine(kept).state is State.started


@virtual_time
async def test_such_a_machine_is_not_started_whoever_asks(tmp_path: Path) -> None:
    async with a_worker_with_a_catalog(tmp_path) as (worker, replica):
        lost = await worker.run_machine("order-1")
        await worker.machines.stop(APP.name, lost, worker.request())
        await worker.at_rest()
        # Our own row has not come into the catalog: nothing is removed yet, but nothing must start either.
        Owner(replica, OTHER).put("machines", **{lost: machine(generation=2)})
        await worker.machines.start(APP.name, lost, worker.request())
        await worker.at_rest()
        assert worker.machine(lost).state is State.failed
        assert [spec.machine for spec in worker.world.starts] == [lost]  # the first time


@virtual_time
async def test_a_lease_does_not_keep_a_superseded_machine(tmp_path: Path) -> None:
    async with a_worker_with_a_catalog(tmp_path) as (worker, replica):
        lost = await worker.run_machine("order-1", lease_ttl_s=3600)
        Owner(replica, MINE).put("machines", **{lost: machine()})
        Owner(replica, OTHER).put("machines", **{lost: machine(generation=2)})
        await worker.until(lambda: worker.machine(lost).state is State.destroyed)


@pytest.mark.parametrize(
    ("theirs", "removed"),
    [
        ({"generation": 1, "created_at_ms": 0}, True),  # of equal generations the one created first stays
        ({"generation": 1, "created_at_ms": 2}, False),
        ({"generation": 1}, False),  # at the same time: the worker whose name sorts first
        ({"generation": 0}, False),
    ],
)
@virtual_time
async def test_of_two_rows_of_one_id_every_node_picks_the_same(
    tmp_path: Path, theirs: dict[str, Any], removed: bool
) -> None:
    async with a_worker_with_a_catalog(tmp_path) as (worker, replica):
        both = await worker.run_machine("order-1")
        created_at_ms = worker.machine(both).created_at_ms
        given: dict[str, Any] = {**theirs, "created_at_ms": created_at_ms - 1 + theirs.get("created_at_ms", 1)}
        Owner(replica, OTHER).put("machines", **{both: machine(**given)})
        Owner(replica, MINE).put("machines", **{both: machine(created_at_ms=created_at_ms)})
        if removed:
            await worker.until(lambda: worker.machine(both).state is State.destroyed)
        else:
            assert worker.generations.by(worker.machine(both)) == ""
        [(winner,)] = replica.rows("select worker from machines where id = ?", (both,))
        assert winner == (OTHER if removed else MINE)


@virtual_time
async def test_a_worker_without_a_catalog_starts_what_it_has(tmp_path: Path) -> None:
    worker = await SimWorker.open(tmp_path, a_world())
    lost = await worker.run_machine("order-1")
    assert worker.machine(lost).state is State.started
    await worker.close()


@virtual_time
async def test_a_look_at_what_was_changed_does_not_read_all_machines(tmp_path: Path) -> None:
    """Every change of a machine is one of the catalog: with 2,000 machines the looks took more than the changes."""
    with counting() as counts:
        async with a_worker_with_a_catalog(tmp_path) as (worker, replica):
            mine = Owner(replica, MINE)

            async def cost(machines: int) -> Count:
                mine.put("machines", **{f"{number:014x}": machine() for number in range(machines)})
                await asyncio.sleep(1)
                mine.put("machines", **{"0" * 14: machine(state="stopped")})
                return await counts.of(asyncio.sleep(1))

            few, many = await cost(10), await cost(2000)
            assert many.statements == few.statements
            assert many.steps <= few.steps * 1.2
            assert few.steps > 0, "there was a look"
            lost = await worker.run_machine("order-1")
            mine.put("machines", **{lost: machine()})
            Owner(replica, OTHER).put("machines", **{lost: machine(generation=2)})
            await worker.until(lambda: worker.machine(lost).state is State.destroyed)

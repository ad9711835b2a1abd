"""What a worker keeps of what is over, and for how long: machines that come and go leave no more behind than stated."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, order
from tests.kit.virtual_time import virtual_time

from hawker.catalog.gossip.local_log import LocalLog
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.publisher import PURGE_S, Publisher
from hawker.model.catalog import LogId
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import ClaimKey, Reservation
from hawker.model.rows import ClaimRow, FillRow, MachineRow, VersionRow
from hawker.store.compaction import Compaction, Kept
from hawker.worker import upkeep
from hawker.worker.api.market import claim
from hawker.worker.machine.history import EVENTS_KEPT
from hawker.worker.machine.kind import MACHINE
from hawker.worker.machine.projections import projections
from hawker.worker.publishing import Publishing

ALL_GONE = Kept(records=0, seconds=0.0)


async def compact(worker: SimWorker, kept: Kept = ALL_GONE, orders: int = upkeep.ORDERS_KEPT) -> None:
    over = partial(upkeep.over, kinds=[MACHINE], orders=orders)
    work = Compaction(worker.store, "ord-1", kept, over, batch=16, images=32, free=16)
    while await worker.store.submit(work.step):
        pass


async def live(worker: SimWorker, key: str) -> str:
    machine = await worker.run_machine(key)
    await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
    await worker.at_rest(machine)
    return machine


def counts(worker: SimWorker) -> dict[str, int]:
    tables = worker.store.read.query("select name from sqlite_schema where type = 'table'")
    return {table: worker.store.read.query(f"select count(*) from {table}")[0][0] for (table,) in tables}


def pages(worker: SimWorker) -> int:
    found: int = worker.store.read.query("pragma page_count")[0][0]
    return found


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
        assert len(before) > EVENTS_KEPT
        await compact(worker)
        after = worker.events(machine)
        assert after == before[-len(after) :]
        assert EVENTS_KEPT <= len(after) < EVENTS_KEPT + 20
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


FEW = Kept(records=64, seconds=86_400.0)


@pytest.mark.parametrize("lives", [40, 120])
@virtual_time
async def test_however_many_machines_pass_within_a_moment_no_table_and_no_file_grows(
    lives: int, tmp_path: Path
) -> None:
    """Nothing is old enough to go by its age: all goes by number. Each of the bounds holds of any number of lives."""
    async with a_worker(tmp_path) as worker:
        publishing = Publishing(
            "ord-1", "ord", "127.0.0.1", 1, Resources(), "fake", of_kinds=projections(worker.store.read)
        )
        publisher = Publisher(worker.store, publishing.outbox(worker.host), tombstones_kept=8)
        replica = Replica.open(tmp_path / "catalog.db", worker.host)
        local = LocalLog(publisher, replica, lambda version: None)
        await local.open()
        stays = await worker.run_machine("stays")
        began_ms = worker.host.now_ms()
        for n in range(lives):
            await claim(worker.store, ClaimKey(id=f"key-{n}", worker="ord-1", order=f"order-{n}"))
            machine = await live(worker, f"order-{n}")
            await worker.market.release(f"lost-{n}", "a test")
            if n % 10 == 0:
                await asyncio.sleep(PURGE_S)
                await compact(worker, FEW, orders=8)
        await asyncio.sleep(2 * PURGE_S)
        await compact(worker, FEW, orders=8)
        assert worker.host.now_ms() - began_ms < 3600_000

        left = counts(worker)
        assert left.pop("log") < 150
        assert {table: count for table, count in left.items() if count > 70} == {}
        assert max(left["published"], left["claim"]) < 30
        assert pages(worker) < 160
        assert len(replica.log_rows(LogId("ord-1", "region"))) < 20

        assert worker.market.fate("order-0") == "unknown"
        assert worker.market.fate(f"order-{lives - 1}") == machine
        assert worker.market.fate("stays") == stays
        assert replica.rows("select id from machines") == [(stays,)]
        await local.close()
        replica.close()
        assert worker.wrong() == []


@virtual_time
async def test_how_the_order_of_a_machine_ended_is_known_for_as_long_as_the_machine_is_there(tmp_path: Path) -> None:
    """Or the same key would make a second machine, and a release that comes late would leave this one."""
    async with a_worker(tmp_path) as worker:
        stays = await worker.run_machine("stays")
        for n in range(30):
            await live(worker, f"order-{n}")
        await asyncio.sleep(2 * upkeep.FILL_KEPT_MS / 1000)
        await compact(worker, orders=0)
        again = await worker.market.reserve(order("stays"))
        assert isinstance(again, Reservation)
        assert again.machine == stays
        assert (await worker.market.confirm("stays", APP, None))[0].id == stays
        assert await worker.market.release("stays", "a test") == stays
        assert [row.id for row in worker.store.read.select(FillRow)] == ["stays"]


@virtual_time
async def test_ends_of_orders_and_clients_keys_go_by_their_age_too(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        await worker.market.release("old", "a test")
        await claim(worker.store, ClaimKey(id="old", worker="ord-1", order="old"))
        await asyncio.sleep(upkeep.FILL_KEPT_MS / 1000 + 1)
        await worker.market.release("young", "a test")
        await claim(worker.store, ClaimKey(id="young", worker="ord-1", order="young"))
        for n in range(10):
            await live(worker, f"order-{n}")
        await compact(worker)
        assert worker.market.fate("old") == "unknown"
        assert worker.market.fate("young") == "released"
        assert [row.id for row in worker.store.read.select(ClaimRow)] == ["old", "young"]
        await asyncio.sleep(upkeep.CLAIM_KEPT_MS / 1000 - upkeep.FILL_KEPT_MS / 1000)
        for n in range(10):
            await live(worker, f"later-{n}")
        await compact(worker)
        assert [row.id for row in worker.store.read.select(ClaimRow)] == ["young"]

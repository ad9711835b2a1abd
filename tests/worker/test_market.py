"""The worker's side of the market: offers, reservations that lapse, and what one key answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, REGION, SimWorker, a_worker, a_world, order
from tests.kit.virtual_time import SetClock, virtual_time

from hawker.errors import DiskFailed
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import Ask, Offer, Reason, Refusal, Reservation
from hawker.model.rows import ReservationRow, WorkerRow
from hawker.sim.platform.disk import CrashDisk
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker import ledger
from hawker.worker.market import Lapsed

THREE = Resources(cpus_shared=3, memory_mib=65536, disk_mib=1 << 20, machines=64)


def held(worker: SimWorker) -> int:
    return ledger.held(worker.store.read).cpus_shared


def ask() -> Ask:
    return Ask(app=APP.name, region=REGION, image="host", resources=order("x").resources)


@virtual_time
async def test_a_reservation_holds_room_until_it_lapses(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        await worker.market.reserve(order("a", hold_s=30))
        await asyncio.sleep(29)
        assert (held(worker), worker.market.fate("a")) == (1, "held")
        await asyncio.sleep(1)
        assert worker.market.fate("a") == "released"
        await asyncio.sleep(5)  # the sweep
        assert held(worker) == 0
        assert worker.store.read.select(ReservationRow) == []
        assert worker.wrong() == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("back_s", [0.5, 90.0, 86_400.0])
@virtual_time
async def test_a_clock_that_is_set_back_lets_no_reservation_hold_longer_than_its_time(
    restart: bool, back_s: float, tmp_path: Path
) -> None:
    """It held its room and its order's key for as long as the clock had been ahead (simulation, seed 185)."""
    clock = SetClock(ahead_s=back_s)
    world = a_world()
    world.host = clock.host()
    worker = await SimWorker.open(tmp_path, world)
    await worker.market.reserve(order("a", hold_s=30))
    await asyncio.sleep(10)
    clock.ahead_s = 0.0
    rest_s = 20.0
    if restart:
        await worker.close()
        world.host = clock.host()
        worker = await SimWorker.open(tmp_path, world)
        rest_s = min(20.0 + back_s, 30.0)
    await asyncio.sleep(rest_s - 1)
    assert worker.market.fate("a") == "held"
    await asyncio.sleep(1)
    assert worker.market.fate("a") == "released"
    with pytest.raises(Lapsed):
        await worker.market.confirm("a", APP, None)
    await worker.market.sweep()
    assert held(worker) == 0
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_a_lapsed_reservation_cannot_be_confirmed_nor_taken_again(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        await worker.market.reserve(order("a", hold_s=30))
        await asyncio.sleep(30)
        with pytest.raises(Lapsed):
            await worker.market.confirm("a", APP, None)
        again = await worker.market.reserve(order("a"))
        assert isinstance(again, Refusal)
        assert again.reason is Reason.in_doubt
        assert held(worker) == 0


@virtual_time
async def test_room_that_has_lapsed_is_there_for_the_next_order_before_any_sweep(tmp_path: Path) -> None:
    async with a_worker(tmp_path, capacity=THREE, sweeping=False) as worker:
        for n in range(3):
            await worker.market.reserve(order(f"gone-{n}", hold_s=1))
        await asyncio.sleep(2)
        assert isinstance(await worker.market.reserve(order("next")), Reservation)
        assert held(worker) == 1


@virtual_time
async def test_the_same_key_is_the_same_reservation_and_then_the_same_machine(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        first, second = await asyncio.gather(*(worker.market.reserve(order("a")) for _ in range(2)))
        assert first == second == await worker.market.reserve(order("a"))
        assert held(worker) == 1
        row, _, run = await worker.market.confirm("a", APP, None)
        again, _, no_run = await worker.market.confirm("a", APP, None)
        assert (row.id, bool(run)) == (again.id, True)
        assert no_run == ""
        late = await worker.market.reserve(order("a"))
        assert isinstance(late, Reservation)
        assert (late.machine, late.state) == (row.id, "confirmed")
        await worker.at_rest()
        assert (len(worker.world.starts), held(worker)) == (1, 1)


@virtual_time
async def test_an_order_that_was_released_before_it_arrived_is_refused(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        assert await worker.market.release("a", "no answer in time") == ""
        late = await worker.market.reserve(order("a"))
        assert isinstance(late, Refusal)
        assert late.reason is Reason.in_doubt
        assert held(worker) == 0


@virtual_time
async def test_a_release_gives_the_room_back_and_names_a_machine_that_was_made(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        await worker.market.reserve(order("a"))
        assert await worker.market.release("a", "no answer in time") == ""
        assert await worker.market.release("a", "no answer in time") == ""
        assert held(worker) == 0
        machine = await worker.create("b")
        assert await worker.market.release("b", "no answer in time") == machine
        assert held(worker) == 1


@virtual_time
async def test_reservations_survive_a_killed_worker(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    reserved = await worker.market.reserve(order("a"))
    await worker.die()
    worker = await SimWorker.open(tmp_path, world)
    assert await worker.market.reserve(order("a")) == reserved
    row, _, _ = await worker.market.confirm("a", APP, None)
    assert isinstance(reserved, Reservation)
    assert row.id == reserved.machine
    await worker.close()


@virtual_time
async def test_sixty_four_orders_at_once_take_the_last_slots_and_no_more(tmp_path: Path) -> None:
    async with a_worker(tmp_path, capacity=THREE) as worker:
        answers = await asyncio.gather(*(worker.market.reserve(order(f"order-{n}")) for n in range(64)))
        filled = [answer for answer in answers if isinstance(answer, Reservation)]
        refused = [answer for answer in answers if isinstance(answer, Refusal)]
        assert (len(filled), len(refused)) == (3, 61)
        assert {(r.reason, r.resource, r.wanted, r.free) for r in refused} == {(Reason.full, "cpus_shared", 1, 0)}
        await asyncio.gather(*(worker.market.confirm(answer.key, APP, None) for answer in filled))
        await worker.at_rest()
        assert len(worker.world.instances) == 3
        assert worker.wrong() == []


@virtual_time
async def test_stopped_machines_make_room_that_a_start_must_find_again(tmp_path: Path) -> None:
    async with a_worker(tmp_path, capacity=THREE) as worker:
        machine = await worker.run_machine("a")
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        assert held(worker) == 0
        for key in "bcd":
            await worker.run_machine(key)
        with pytest.raises(ledger.Full, match="could not reserve resource for machine: insufficient CPUs available"):
            await worker.machines.start(APP.name, machine, worker.request())
        assert worker.machine(machine).state is State.stopped
        assert worker.wrong() == []


@virtual_time
async def test_offers_tell_what_is_free_and_refusals_what_is_short(tmp_path: Path) -> None:
    async with a_worker(tmp_path, capacity=THREE) as worker:
        for free, machines in ((THREE, 0), (THREE - order("a").resources, 1)):
            offer = worker.market.offer(ask())
            assert isinstance(offer, Offer)
            assert (offer.capacity, offer.free, offer.app_machines) == (THREE, free, machines)
            await worker.run_machine(f"order-{machines}")
        large = Ask(app=APP.name, region=REGION, image="host", resources=Resources(memory_mib=65536))
        refusal = worker.market.offer(large)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.resource, refusal.wanted, refusal.free) == (
            Reason.full,
            "memory_mib",
            65536,
            65536 - 2 * 256,
        )


@virtual_time
async def test_what_does_not_fit_at_all_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        elsewhere = Ask(app=APP.name, region="mad", image="host", resources=Resources())
        odd = Ask(app=APP.name, region=REGION, image="nginx", runtime="odd", resources=Resources())
        for unfit, reason in ((elsewhere, Reason.wrong_region), (odd, Reason.no_driver)):
            refusal = worker.market.offer(unfit)
            assert isinstance(refusal, Refusal)
            assert refusal.reason is reason

        def cordon(tx: Tx) -> None:
            me = tx.get(WorkerRow, "worker")
            assert me
            tx.record("worker.cordoned", me.name, cause="a test")
            tx.put(WorkerRow(name=me.name, region=me.region, epoch=me.epoch, created_at_ms=0, cordoned=True))

        await worker.store.submit(cordon)
        for answer in (worker.market.offer(ask()), await worker.market.reserve(order("a"))):
            assert isinstance(answer, Refusal)
            assert answer.reason is Reason.cordoned


@virtual_time
async def test_a_disk_that_failed_is_not_told_as_a_full_one(tmp_path: Path) -> None:
    with CrashDisk(1) as disk:
        worker = SimWorker(tmp_path, a_world())
        worker.store = Store.open("worker.db", worker.host, vfs=disk.name)
        await worker.start(sweeping=False)
        disk.broken = True
        with pytest.raises(DiskFailed):
            await worker.market.reserve(order("a"))
        refusal = worker.market.offer(ask())
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.disk_failed
        assert "cannot be read or written" in refusal.sentence()
        await worker.die()


@virtual_time
async def test_a_full_disk_refuses_orders_while_machines_run_on(tmp_path: Path) -> None:
    async with a_worker(tmp_path, sweeping=False) as worker:
        machine = await worker.run_machine("a", restart={"policy": "always"})
        await worker.fill_disk()
        for answer in (worker.market.offer(ask()), await worker.market.reserve(order("b"))):
            assert isinstance(answer, Refusal)
            assert answer.reason is Reason.disk_full
        await asyncio.sleep(600)
        assert worker.machine(machine).state is State.started
        assert len(worker.world.running(machine)) == 1
        worker.make_room()
        await worker.market.sweep()  # whatever is written next finds the room
        assert isinstance(await worker.market.reserve(order("b")), Reservation)
        assert worker.wrong() == []

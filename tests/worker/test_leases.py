"""Leases: one client's right to change a machine, for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request as HttpRequest
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world
from tests.kit.virtual_time import SetClock, virtual_time

from hawker.errors import Invalid, NotFound, PreconditionFailed
from hawker.http.call import Call
from hawker.model.machine import State
from hawker.model.machine_calls import AcquireLease
from hawker.model.rows import LeaseRow
from hawker.store.tx import Tx
from hawker.worker.machine import leases
from hawker.worker.machine.api.leases import LeaseApi


async def acquire(worker: SimWorker, machine: str, *, ttl_s: int = 60, nonce: str = "", owner: str = "ann") -> LeaseRow:
    request = worker.request(nonce, owner)
    return await worker.store.submit(
        lambda tx: leases.acquire(tx, worker.host, worker.machine(machine), request, ttl_s, "deploy")
    )


async def release(worker: SimWorker, machine: str, nonce: str) -> None:
    request = worker.request(nonce)
    await worker.store.submit(lambda tx: leases.release(tx, worker.machine(machine), request))


@virtual_time
async def test_a_machine_under_a_lease_is_changed_by_its_holder_alone(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        lease = await acquire(worker, machine)
        for change in (worker.machines.stop, worker.machines.restart, worker.machines.destroy):
            with pytest.raises(leases.LeaseHeld, match="lease currently held by ann, expires at 2023-11-14T22:14:20"):
                await change(APP.name, machine, worker.request())
        await worker.machines.stop(APP.name, machine, worker.request(lease.nonce))
        await worker.at_rest()
        assert worker.machine(machine).state is State.stopped


@virtual_time
async def test_a_second_client_waits_for_the_lease_or_for_its_end_by_the_clock(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        first = await acquire(worker, machine, ttl_s=60)
        await asyncio.sleep(59)
        with pytest.raises(leases.LeaseHeld):
            await acquire(worker, machine, owner="bob")
        await asyncio.sleep(1)
        second = await acquire(worker, machine, owner="bob")
        assert (second.owner, second.nonce != first.nonce) == ("bob", True)
        with pytest.raises(leases.LeaseHeld):
            await worker.machines.stop(APP.name, machine, worker.request(first.nonce))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("back_s", [1.0, 3600.0, 86_400.0])
@virtual_time
async def test_a_clock_that_is_set_back_lets_no_lease_last_longer_than_its_time(
    restart: bool, back_s: float, tmp_path: Path
) -> None:
    clock = SetClock(ahead_s=back_s)
    world = a_world()
    world.host = clock.host()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine()
    await acquire(worker, machine, ttl_s=5)
    await asyncio.sleep(2)
    clock.ahead_s = 0.0
    rest_s = 3.0
    if restart:
        await worker.close()
        world.host = clock.host()
        worker = await SimWorker.open(tmp_path, world)
        rest_s = min(3.0 + back_s, 5.0)
    await asyncio.sleep(rest_s - 0.5)
    with pytest.raises(leases.LeaseHeld):
        await worker.machines.stop(APP.name, machine, worker.request())
    await asyncio.sleep(0.5)
    await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest()
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_the_holder_refreshes_it_with_the_same_nonce(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        first = await acquire(worker, machine, ttl_s=60)
        await asyncio.sleep(50)
        again = await acquire(worker, machine, ttl_s=60, nonce=first.nonce)
        assert (again.nonce, again.expires_at_ms - first.expires_at_ms) == (first.nonce, 50_000)


@virtual_time
async def test_a_lease_is_given_back_by_its_holder_alone_and_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        lease = await acquire(worker, machine)
        with pytest.raises(leases.LeaseHeld):
            await release(worker, machine, "another")
        await release(worker, machine, lease.nonce)
        with pytest.raises(NotFound):
            await release(worker, machine, lease.nonce)
        await worker.machines.stop(APP.name, machine, worker.request())


@pytest.mark.parametrize("ttl_s", [0, -1, leases.TTL_S_MAX + 1])
@virtual_time
async def test_a_time_to_live_out_of_bounds_is_refused(ttl_s: int, tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        with pytest.raises(Invalid):
            await acquire(worker, machine, ttl_s=ttl_s)
        assert leases.current(worker.store.read, machine, worker.host.steady_ms()) is None


@virtual_time
async def test_an_order_may_bring_the_machine_under_a_lease_from_its_first_moment(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(lease_ttl_s=10)
        with pytest.raises(leases.LeaseHeld):
            await worker.machines.stop(APP.name, machine, worker.request())
        await asyncio.sleep(10)
        await worker.machines.stop(APP.name, machine, worker.request())


@virtual_time
async def test_a_destroyed_machine_leaves_no_lease(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        lease = await acquire(worker, machine)
        await worker.machines.destroy(APP.name, machine, worker.request(lease.nonce), force=True)
        await worker.at_rest()
        assert worker.store.read.select(LeaseRow) == []


@virtual_time
async def test_nobody_gets_a_lease_of_a_machine_that_is_gone(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest()
        with pytest.raises(PreconditionFailed, match="is destroyed"):
            await acquire(worker, machine)


@virtual_time
async def test_a_lease_names_the_version_that_its_holder_will_change(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        before = worker.machine(machine)
        lease_api = LeaseApi(worker.store, worker.host, lambda request: worker.machine(machine))
        http = HttpRequest({"type": "http", "headers": [], "query_string": b"", "path_params": {}})
        asked = Call(http, b"", id="req-lease", owner="ann", agent=False)

        def update(tx: Tx) -> None:
            tx.record("machine.updated", machine, cause="a test")
            worker.log.move(tx, before, cause="a test", version="01NEW")

        _, reply = await asyncio.gather(
            worker.store.submit(update), lease_api.create(asked, AcquireLease(APP.name, machine, ttl=30))
        )
        assert reply.data.version == worker.machine(machine).version == "01NEW"

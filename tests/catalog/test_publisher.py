"""Between a worker's database and its replica: what becomes of news when the replica's disk does not take them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.catalog.gossip.local_log import GATHER_S, LocalLog
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.catalog.publish.publisher import Publisher
from hawker.model.catalog import LogId, Position, Version
from hawker.model.guest import Resources
from hawker.model.rows import LedgerRow, LogHeadRow, TallyRow
from hawker.sim.platform.disk import CrashDisk
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.publishing import Publishing


@virtual_time
async def test_what_a_full_disk_kept_from_the_own_replica_is_there_once_it_has_room(tmp_path: Path) -> None:
    """With nothing published afterwards it was missing for ever, everywhere. Found by the simulator, seed 55."""
    host = virtual_host()
    store = Store.open(tmp_path / "worker.db", host)
    publishing = Publishing("ord-1", "ord", "127.0.0.1", 1, Resources(), "fake")
    publisher = Publisher(store, Outbox(host, OwnerLog(host, "ord-1"), publishing.projections()))
    told: list[Version] = []
    log = LogId("ord-1", "global")

    def change(tx: Tx) -> None:
        tx.record("app.kept", "web", cause="a test")
        tx.put(TallyRow(app="web", machines=1))

    def head() -> Position:
        row = store.read.get(LogHeadRow, "global")
        assert row is not None
        return Position(row.epoch, row.head)

    with CrashDisk(seed=1) as disk:
        replica = Replica.open("catalog.db", host, vfs=disk.name)
        local = LocalLog(publisher, replica, told.append)
        await local.open()
        await asyncio.sleep(1)
        disk.room = disk.used()
        await store.submit(change)
        await asyncio.sleep(5)
        assert replica.position(log) < head()
        disk.room = None
        await asyncio.sleep(5)
        assert replica.position(log) == head()
        assert replica.rows("select app from app_regions") == [("web",)]
        assert head() in [Position(version.epoch, version.number) for version in told]
        await local.close()
        replica.close()
    await store.close()


@virtual_time
async def test_what_is_published_is_shown_at_once_but_a_burst_of_it_in_few_commits(tmp_path: Path) -> None:
    host = virtual_host()
    store = Store.open(tmp_path / "worker.db", host)
    publishing = Publishing("ord-1", "ord", "127.0.0.1", 1, Resources(), "fake")
    publisher = Publisher(store, Outbox(host, OwnerLog(host, "ord-1"), publishing.projections()))
    replica = Replica.open(tmp_path / "catalog.db", host)
    told: list[Version] = []
    local = LocalLog(publisher, replica, told.append)
    await local.open()
    await asyncio.sleep(1)
    commits: list[tuple[str, ...]] = []
    replica.on_applied.append(commits.append)

    async def publish(number: int) -> None:
        def change(tx: Tx) -> None:
            tx.record("app.kept", "web", cause="a test")
            tx.put(TallyRow(app=f"web-{number}", machines=1))

        await store.submit(change)
        await asyncio.sleep(0)

    def shown() -> int:
        return len(replica.rows("select app from app_regions"))

    told.clear()
    await publish(0)
    assert shown() == len(told) == 1
    for number in range(1, 40):
        await publish(number)
        await asyncio.sleep(GATHER_S / 10)
    await asyncio.sleep(GATHER_S)
    assert shown() == len(told) == 40
    assert len(commits) <= 6
    await publish(40)
    assert shown() == 40, "but a moment ago"
    local.tell()
    assert shown() == len(told) == 41, "a node that leaves does not wait"
    await local.close()
    replica.close()
    await store.close()


@virtual_time
async def test_what_a_full_disk_of_the_worker_kept_waiting_goes_out_once_it_has_room(tmp_path: Path) -> None:
    """A flush that failed was not repeated: what waited did so until something else was published."""
    host = virtual_host()
    capacity = Resources(machines=16)
    publishing = Publishing("ord-1", "ord", "127.0.0.1", 1, capacity, "fake")
    replica = Replica.open(tmp_path / "catalog.db", host)

    def change(tx: Tx) -> None:
        tx.record("ledger.changed", "ord-1", cause="a test")
        tx.put(LedgerRow(held=Resources(machines=8)))

    with CrashDisk(seed=1) as disk:
        store = Store.open("worker.db", host, vfs=disk.name)
        publisher = Publisher(store, Outbox(host, OwnerLog(host, "ord-1"), publishing.projections()))
        local = LocalLog(publisher, replica, lambda version: None)
        await local.open()
        await asyncio.sleep(1)
        await store.submit(change)
        disk.room = disk.used()
        await asyncio.sleep(20)
        assert replica.rows("select machines from capacity") == []
        disk.room = None
        await asyncio.sleep(20)
        assert replica.rows("select machines from capacity") == [(8,)]
        await local.close()
        await store.close()
    replica.close()


@virtual_time
async def test_an_epoch_that_a_full_disk_kept_low_is_raised_when_somebody_is_ahead_again(
    tmp_path: Path,
) -> None:
    host = virtual_host()
    publishing = Publishing("ord-1", "ord", "127.0.0.1", 1, Resources(), "fake")
    replica = Replica.open(tmp_path / "catalog.db", host)
    log = LogId("ord-1", "global")
    with CrashDisk(seed=1) as disk:
        store = Store.open("worker.db", host, vfs=disk.name)
        publisher = Publisher(store, Outbox(host, OwnerLog(host, "ord-1"), publishing.projections()))
        local = LocalLog(publisher, replica, lambda version: None)
        await local.open()
        await asyncio.sleep(1)
        theirs = replica.position(log).epoch + 1000
        disk.room = disk.used()
        await local.ahead("global", theirs)
        await asyncio.sleep(5)
        assert replica.position(log).epoch < theirs
        disk.room = None
        await local.ahead("global", theirs)
        await asyncio.sleep(5)
        assert replica.position(log).epoch > theirs
        await local.close()
        await store.close()
    replica.close()

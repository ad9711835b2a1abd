"""The log is cut behind rows that stay: what is left verifies, gives all the tables, and its size does not grow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.kit.virtual_time import virtual_host, virtual_time
from tests.store.leases import HOST, freeing, lease, leased, taking

from hawker.errors import Corrupt, StoreError
from hawker.host import Host
from hawker.model.rows import LeaseRow, Row
from hawker.sim.platform.disk import CrashDisk
from hawker.store import compaction
from hawker.store.compaction import Compaction, Kept, Last
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.store.verify import verify

NOTHING = Kept(records=0, seconds=0.0)
ALL_YOUNG = Kept(records=10, seconds=1e6)


def over(tx: Tx, rows: Collection[Last]) -> set[tuple[type[Row], str]]:
    """Leases whose nonce says so."""
    return {
        (row.kind, row.key)
        for row in rows
        if row.kind is LeaseRow and msgspec.json.decode(row.body, type=LeaseRow).nonce == "over"
    }


def a_compaction(
    store: Store, kept: Kept = ALL_YOUNG, *, batch: int = 8, images: int = 16, free: int = 1000
) -> Compaction:
    return Compaction(store, "ord-1", kept, over, batch=batch, images=images, free=free)


async def compact(store: Store, kept: Kept = ALL_YOUNG, **bounds: int) -> int:
    """All that is due. Returns how many commits it took."""
    before, work = store.commits, a_compaction(store, kept, **bounds)
    while await store.submit(work.step):
        pass
    return store.commits - before - 1


def records(store: Store) -> list[int]:
    return [seq for (seq,) in store.read.query("select seq from log order by seq")]


def pages(store: Store) -> int:
    return int(store.read.query("pragma page_count")[0][0])


async def test_what_is_left_after_a_cut_verifies_and_gives_all_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    store = Store.open(path, HOST)
    for n in range(60):
        await store.submit(taking(f"m{n % 20}", f"nonce {n}"))
    await store.submit(freeing("m3"))
    rows = store.read.select(LeaseRow, "true order by id")
    assert await compact(store) > 3
    kept = records(store)
    assert kept[0] > 40
    assert kept == list(range(kept[0], kept[0] + len(kept)))
    assert store.read.select(LeaseRow, "true order by id") == rows
    await store.close()
    report = verify(path)
    assert (report.faults, report.cut, report.records) == ([], kept[0] - 1, len(kept))
    with closing(apsw.Connection(str(path))) as db:
        db.execute("delete from lease")
    assert verify(path, rebuild=True).rebuilt
    store = Store.open(path, HOST)
    assert store.read.select(LeaseRow, "true order by id") == rows
    await store.submit(taking("more"))
    await store.close()
    assert verify(path).ok


async def test_rows_that_are_over_go_with_the_record_that_wrote_them_last(store: Store) -> None:
    for n in range(20):
        await store.submit(taking(f"m{n}", "over" if n % 2 else "n"))
    await store.submit(taking("m1", "it is not over any more"))
    for _ in range(20):
        await store.submit(taking("last"))
    await compact(store)
    assert leased(store) == sorted(["last", "m1", *(f"m{n}" for n in range(0, 20, 2))])


async def test_a_row_that_is_as_it_was_once_before_stays(store: Store) -> None:
    for n in range(60):
        await store.submit(taking("m", "n" if n % 2 else "other"))
    await compact(store)
    assert leased(store) == ["m"]


async def test_neither_young_records_nor_few_are_cut(store: Store) -> None:
    for n in range(17):
        await store.submit(taking(f"m{n}"))
    assert await compact(store) == 0
    await store.submit(taking("one more"))
    assert await compact(store) == 1


async def test_records_older_than_what_is_kept_are_cut_though_they_are_few(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store.open(tmp_path / "worker.db", Host(lambda: now[0], random.Random(1)))
    for n in range(40):
        await store.submit(taking("m", str(n)))
    kept = Kept(records=1000, seconds=60.0)
    assert await compact(store, kept) == 0
    now[0] += 61
    assert await compact(store, kept) > 3
    assert len(records(store)) < 20
    await store.close()
    assert verify(tmp_path / "worker.db").ok


@pytest.mark.parametrize("lives", [100, 300])
async def test_however_many_rows_came_and_went_the_size_is_the_same(lives: int, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "worker.db", HOST)
    work = a_compaction(store, NOTHING, batch=32, images=64)
    for n in range(lives):
        await store.submit(taking(f"m{n}", "x" * 1000))
        await store.submit(taking(f"m{n}", "over"))
        if n % 10 == 9:
            while await store.submit(work.step):
                pass
    assert len(records(store)) < 2 * 32 + 20
    assert len(leased(store)) < 2 * 32 + 20
    assert pages(store) < 200
    await store.close()
    assert verify(tmp_path / "worker.db").ok


async def test_many_rows_that_stay_are_not_written_again_for_each_few_new_records(store: Store) -> None:
    for n in range(400):
        await store.submit(taking(f"m{n}"))
    await compact(store, batch=16, images=32)
    before = store.read.query("select sum(length(writes)) from log")[0][0]
    commits = 0
    for n in range(100):
        await store.submit(taking("new", str(n)))
        commits += await compact(store, batch=16, images=32)
    assert commits < 40
    assert store.read.query("select sum(length(writes)) from log")[0][0] < 1.5 * before
    assert len(leased(store)) == 401


@virtual_time
async def test_a_sweep_gets_ahead_of_records_that_come_faster_than_it_cuts_at_first(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "worker.db", virtual_host())

    async def write() -> int:
        """As many as are there while the sweep still goes on."""
        for number in range(80):
            for _ in range(20):  # for each commit of the sweep, which cuts 8 to begin with
                await store.submit(taking("m1", f"n{number}"))
            await asyncio.sleep(compaction.PAUSE_S)
        return len(records(store))

    writing = asyncio.create_task(write())
    while not writing.done():
        await asyncio.sleep(compaction.PAUSE_S)
        await a_compaction(store).sweep()
    assert await writing < 400
    await store.close()
    assert verify(tmp_path / "worker.db").faults == []


async def test_a_record_with_more_rows_than_one_commit_may_write_is_cut_after_several(store: Store) -> None:
    def many(tx: Tx) -> None:
        tx.record("lease.taken", "all", cause="test")
        for n in range(100):
            tx.put(lease(f"m{n:02}", "over" if n % 10 == 0 else "n"))

    await store.submit(many)
    for n in range(30):
        await store.submit(taking("m99", str(n)))
    assert await compact(store, batch=8, images=16) >= 100 // 16
    assert records(store)[0] > 1
    assert len(leased(store)) == 90
    written = store.read.query("select writes from log where kind = 'log.cut'")
    assert max(writes.count(b'["lease"') for (writes,) in written) <= 16


async def test_pages_that_become_free_go_back_to_the_disk_a_few_in_a_commit(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "worker.db", HOST)
    for n in range(150):
        await store.submit(taking(f"m{n}", "x" * 8000))
        await store.submit(taking(f"m{n}", "over"))
    big = pages(store)
    await compact(store, NOTHING, free=16)
    assert pages(store) < big / 2
    [[free]] = store.read.query("pragma freelist_count")
    assert free <= max(16, pages(store) // 4) + compaction.PAGES_BACK
    await store.close()
    assert verify(tmp_path / "worker.db").ok
    assert (tmp_path / "worker.db").stat().st_size < big / 2 * 4096


# --- damage and crashes ----------------------------------------------------------------------------------------------


async def a_cut_log(path: Path) -> None:
    store = Store.open(path, HOST)
    for n in range(60):
        await store.submit(taking(f"m{n % 20}", f"nonce {n}"))
    await compact(store)
    await store.close()
    assert verify(path).cut > 40


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("delete from log where seq = (select min(seq) from log)", "is missing"),
        ("update log_floor set body = json_set(body, '$.checksum', '0011223344556677')", "its checksum does not match"),
        ("update log_floor set body = json_set(body, '$.through', 3)", "are missing"),
        ("update log_floor set body = json_set(body, '$.rows', 7)", "table log_floor: row log differs from the log"),
        ("update log_floor set body = '{'", "table log_floor: it does not say how far the log was cut off"),
        ("delete from log_floor", "table log_floor: row log of the log is missing"),
    ],
)
async def test_damage_to_what_says_how_far_the_log_was_cut_is_named(tmp_path: Path, damage: str, named: str) -> None:
    path = tmp_path / "worker.db"
    await a_cut_log(path)
    with closing(apsw.Connection(str(path))) as db:
        db.execute(damage)
    assert any(named in fault for fault in verify(path).faults)


async def test_a_short_log_whose_beginning_does_not_follow_what_was_cut_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    await a_cut_log(path)
    with closing(apsw.Connection(str(path))) as db:
        db.execute("update log_floor set body = json_set(body, '$.checksum', '0011223344556677')")
    with pytest.raises(Corrupt, match="its checksum does not match"):
        Store.open(path, HOST)


async def cut_while_it_compacts(disk: CrashDisk) -> dict[str, str]:
    """Writes and cuts until it ends or the power goes. Returns what was acknowledged: nonces by machine."""
    acknowledged: dict[str, str] = {}
    try:
        store = Store.open("worker.db", HOST, vfs=disk.name)
    except StoreError:
        return acknowledged
    with suppress(StoreError):  # the power goes
        work = a_compaction(store, free=2)
        store._db.execute("pragma wal_autocheckpoint = 0")
        for n in range(45):
            machine, nonce = f"m{n % 6 if n % 3 else n}", "over" if n % 9 == 0 else f"{n} " * 300
            await store.submit(taking(machine, nonce))
            acknowledged[machine] = nonce
            if n % 15 == 14:
                while await store.submit(work.step):
                    pass
    store.abandon()
    return acknowledged


@pytest.mark.slow
async def test_whenever_the_power_goes_a_cut_is_there_or_it_is_not() -> None:
    with CrashDisk(0) as disk:
        await cut_while_it_compacts(disk)
        calls = disk.calls
    cut = whole = 0
    for at in range(1, calls, 5):
        with CrashDisk(at) as disk:
            disk.cut_at = at
            acknowledged = await cut_while_it_compacts(disk)
            disk.power_on()
            store = Store.open("worker.db", HOST, vfs=disk.name)
            there = {row.machine: row.nonce for row in store.read.select(LeaseRow)}
            lost = [m for m, nonce in acknowledged.items() if there.get(m) != nonce and nonce != "over"]
            assert len(lost) <= 1, "but for what was under way"
            await compact(store)
            await store.close()
            report = verify("worker.db", vfs=disk.name)
            assert report.faults == []
            cut += report.cut > 0
            whole += report.cut == 0
    assert min(cut, whole) > 5

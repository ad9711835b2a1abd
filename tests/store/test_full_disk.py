"""The store on a disk without room: nothing of a change is kept, reads go on, and room helps."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.store.leases import HOST, freeing, lease, leased, logged, refused, taking

from hawker.errors import Broken, Conflict, Corrupt, DiskFailed, DiskFull, StoreError
from hawker.model.rows import LeaseRow
from hawker.sim.platform.disk import CrashDisk
from hawker.store import log
from hawker.store.db import Store
from hawker.store.reserve import Reserve
from hawker.store.tx import Tx
from hawker.store.verify import verify


def limit(store: Store, pages_left: int) -> None:
    [[pages]] = store._db.execute("pragma page_count")
    store._db.execute(f"pragma max_page_count = {pages + pages_left}").fetchall()


async def test_on_a_full_disk_nothing_of_a_change_is_kept_reads_go_on_and_room_helps(either: Store) -> None:
    await either.submit(taking("kept"))
    limit(either, 2)
    records = len(logged(either))
    with pytest.raises(DiskFull, match="the disk is full"):
        await either.submit(taking("big", "x" * 100_000))
    full = either.full
    assert full
    assert leased(either) == ["kept"]
    assert len(logged(either)) == records
    limit(either, 1000)
    await either.submit(taking("big", "x" * 100_000))
    assert either.full is not full
    assert leased(either) == ["big", "kept"]
    assert [seq for seq, _ in logged(either)] == list(range(1, records + 2))


async def test_when_the_disk_fills_up_inside_a_commit_all_of_it_is_refused_and_told_so(store: Store) -> None:
    await store.submit(taking("kept"))
    limit(store, 2)
    changes = (taking("small"), refused, taking("big", "x" * 100_000), taking("after"))
    answers = await asyncio.gather(*(store.submit(change) for change in changes), return_exceptions=True)
    assert [type(answer) for answer in answers] == [DiskFull] * 4  # what the second met may be gone again
    assert leased(store) == ["kept"]
    await store.submit(taking("small"))
    assert not store.full


@pytest.mark.parametrize("then", ["returns", "raises", "writes on"])
async def test_a_change_that_hides_a_full_disk_keeps_nothing_either(store: Store, then: str) -> None:
    """SQLite has rolled the whole transaction back by then; what it wrote next would stand alone."""
    limit(store, 2)

    def change(tx: Tx) -> None:
        tx.record("lease.taken", "m", cause="test")
        try:
            tx.put(lease("big", "x" * 100_000))
            tx.flush()
        except apsw.FullError:
            limit(store, 1000)  # there is room again: what is written from here on would not fail by itself
            if then == "raises":
                raise Conflict("in its own words") from None
        if then == "writes on":
            tx.put(lease("alone"))

    answers = await asyncio.gather(store.submit(taking("before")), store.submit(change), return_exceptions=True)
    assert all(isinstance(answer, StoreError | Broken) for answer in answers)
    assert leased(store) == []
    assert logged(store) == []
    await store.submit(taking("m"))
    assert logged(store) == [(1, "m")]


async def test_a_change_whose_transaction_is_gone_writes_nothing_of_what_it_holds(store: Store) -> None:
    """SQLite also rolls back after some errors of reads; here the change does it."""

    def change(tx: Tx) -> None:
        taking("m")(tx)
        store._db.execute("rollback")

    with pytest.raises(Broken, match="rolled the transaction back"):
        await store.submit(change)
    assert leased(store) == []
    assert logged(store) == []


async def test_a_row_written_several_times_under_a_record_is_logged_once_as_it_was_left(store: Store) -> None:
    def change(tx: Tx) -> list[str]:
        tx.record("lease.taken", "m", cause="test")
        tx.put(lease("m", "first"))
        tx.put(lease("m", "second"))
        seen = [row.nonce for row in tx.select(LeaseRow)]
        tx.put(lease("m", "third"))
        tx.put(lease("gone"))
        tx.delete(LeaseRow, "gone")
        assert tx.get(LeaseRow, "gone") is None
        tx.record("lease.renewed", "m", cause="test")
        tx.put(lease("m", "fourth"))
        found = tx.get(LeaseRow, "m")
        return [*seen, found.nonce if found else ""]

    assert await store.submit(change) == ["second", "fourth"]
    written = [log.read_images(writes) for (writes,) in store.read.query("select writes from log order by seq")]
    assert [[(key, body and msgspec.json.decode(body)["nonce"]) for _, key, body in row] for row in written] == [
        [("m", "second"), ("m", "third"), ("gone", None)],
        [("m", "fourth")],
    ]
    assert leased(store) == ["m"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, half of which the write-ahead log takes at once."""
    at = tmp_path / "small"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "hawker-test", at], check=True)
    yield at
    subprocess.run(["umount", "--lazy", at], check=True)


@pytest.mark.root
async def test_on_a_real_file_system_that_is_full_the_same_holds(small_disk: Path) -> None:
    store = Store.open(small_disk / "worker.db", HOST)
    await store.submit(taking("kept"))
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(16 << 20))
    changes = [store.submit(taking(f"m{n}", "x" * 100_000)) for n in range(100)]
    answers = await asyncio.gather(*changes, return_exceptions=True)
    assert {type(answer) for answer in answers} == {DiskFull}
    full = store.full
    assert full
    assert leased(store) == ["kept"]
    ballast.unlink()
    await store.submit(taking("with room", "x" * 5000))
    assert store.full is not full
    await store.close()
    assert verify(small_disk / "worker.db").ok


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def there(path: Path) -> bool:
    return path.exists()


def fill(path: Path) -> None:
    """All that its disk has left, to the last page."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.root
async def test_a_reserve_is_given_up_for_what_finds_no_room_and_made_again_when_there_is(small_disk: Path) -> None:
    reserve = Reserve(small_disk, 4 << 20)
    reserve.open()
    store = Store.open(small_disk / "worker.db", HOST)
    store.reserve = reserve
    await store.submit(taking("kept"))
    takes = [store.takes_orders]
    ballast = small_disk / "ballast"
    fill(ballast)
    taken = 0
    while there(small_disk / "reserve"):  # the write-ahead log has some room of its own
        await store.submit(taking(f"m{taken}", "x" * 30_000))
        taken += 1
    takes.append(store.takes_orders)
    assert not store.full
    await asyncio.gather(*(store.submit(freeing(f"m{n}")) for n in range(taken)))
    assert leased(store) == ["kept"]
    await store.close()
    again = Reserve(small_disk, 4 << 20)
    again.open()
    assert again.given_up
    store = Store.open(small_disk / "worker.db", HOST)  # as an agent that starts on a full disk
    store.reserve = again
    await store.submit(freeing("kept"))
    ballast.unlink()
    again.make()
    assert [*takes, store.takes_orders] == [True, False, True]
    assert (small_disk / "reserve").stat().st_blocks * 512 == 4 << 20
    await store.close()
    assert verify(small_disk / "worker.db").ok


@pytest.mark.root
async def test_a_start_on_a_full_disk_gives_the_reserve_up_first(small_disk: Path) -> None:
    Reserve(small_disk, 4 << 20).open()
    fill(small_disk / "ballast")
    reserve = Reserve(small_disk, 4 << 20)
    reserve.open()
    assert reserve.given_up
    store = Store.open(small_disk / "worker.db", HOST)
    store.reserve = reserve
    await store.submit(taking("m"))
    await store.close()


async def test_damage_and_a_failing_disk_are_told_apart_also_on_reads(path: Path) -> None:
    store = Store.open(path, HOST)
    for n in range(100):
        await store.submit(taking(f"m{n}", "x" * 2000))
    [[root]] = store.read.query("select rootpage from sqlite_schema where name = 'lease'")
    await store.close()
    overwrite(path, (root - 1) * 4096, bytes(4096))
    store = Store.open(path, HOST)
    with pytest.raises(Corrupt, match="is damaged") as damaged:
        store.read.select(LeaseRow)
    assert "hawker worker verify" in damaged.value.hint
    await store.close()
    with CrashDisk(1) as disk:
        store = Store.open("worker.db", HOST, vfs=disk.name)
        await store.submit(taking("m", "x" * 100_000))
        disk.off = True
        with pytest.raises(DiskFailed, match="cannot be read or written") as failed:
            await store.submit(taking("n"))
        assert "look at the disk" in failed.value.hint
        store.abandon()

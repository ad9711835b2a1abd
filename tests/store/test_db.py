"""The store: durable when acknowledged, one commit for all who write in the same tick, a change whole or not at all."""

from __future__ import annotations

import asyncio
import random
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests.kit.waiting import until

from hawker.errors import Broken, Conflict, Corrupt, DiskFull, StoreError
from hawker.host import Host
from hawker.model.rows import AppRow, LeaseRow, RunRow
from hawker.store import log
from hawker.store.db import BATCH_MOST, SLOW_COMMIT_S, Store
from hawker.store.tx import Tx
from hawker.store.verify import verify

HOST = Host(lambda: 1.0, random.Random(1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    store = Store.open(path, HOST)
    yield store
    await store.close()
    assert verify(path).faults == []


def lease(machine: str, nonce: str = "n") -> LeaseRow:
    return LeaseRow(machine=machine, nonce=nonce, owner="o", description="", expires_at_ms=0)


def taking(machine: str, nonce: str = "n") -> Callable[[Tx], str]:
    def change(tx: Tx) -> str:
        tx.record("lease.taken", machine, cause="test")
        tx.put(lease(machine, nonce))
        return machine

    return change


def freeing(machine: str) -> Callable[[Tx], None]:
    def change(tx: Tx) -> None:
        tx.record("lease.freed", machine, cause="test")
        tx.delete(LeaseRow, machine)

    return change


def refused(tx: Tx) -> None:
    taking("refused")(tx)
    raise Conflict("no")


def leased(store: Store) -> list[str]:
    return [row.machine for row in store.read.select(LeaseRow, "true order by id")]


def logged(store: Store) -> list[tuple[int, str]]:
    return [(seq, resource) for seq, resource in store.read.query("select seq, resource from log order by seq")]


def make_slow(store: Store, seconds: float = 2.5 * SLOW_COMMIT_S) -> list[str]:
    """Every commit takes this long from now on; gives the names of the threads that commits were made in."""
    threads: list[str] = []

    def hook() -> bool:
        threads.append(threading.current_thread().name)
        time.sleep(seconds)
        return False

    store._db.set_commit_hook(hook)
    return threads


@pytest.fixture(params=["quick", "slow"])
async def either(request: pytest.FixtureRequest, store: Store) -> Store:
    """The store on a quick disk, where commits are made on the loop, and on a slow one, where a thread makes them."""
    if request.param == "slow":
        threads = make_slow(store)
        await store.submit(taking("first"))
        await store.submit(freeing("first"))
        assert threads == ["MainThread", "hawker-commit_0"]
        assert store._slow
    return store


# --- a change ---


async def test_what_is_acknowledged_is_there_after_a_kill(path: Path) -> None:
    store = Store.open(path, HOST)
    assert await store.submit(taking("m1", "secret")) == "m1"
    store.abandon()
    again = Store.open(path, HOST)
    assert again.read.get(LeaseRow, "m1") == lease("m1", "secret")
    await again.submit(taking("m2"))
    assert logged(again) == [(1, "m1"), (2, "m2")]
    await again.close()


async def test_commits_do_not_make_the_write_ahead_log_longer_and_a_kill_leaves_it_readable(path: Path) -> None:
    wal = path.with_name("worker.db-wal")
    for n in range(3):
        store = Store.open(path, HOST)
        length = wal.stat().st_size
        for m in range(20):
            await store.submit(taking(f"{n}-{m}"))
        assert wal.stat().st_size == length >= 2000 * 4096
        store.abandon()
    store = Store.open(path, HOST)
    assert len(leased(store)) == 60
    await store.close()
    assert verify(path).faults == []


async def test_changes_are_made_in_the_order_of_their_submits(either: Store) -> None:
    before = len(logged(either))
    names = [f"m{n}" for n in random.Random(3).sample(range(200), 50)]
    assert await asyncio.gather(*(either.submit(taking(name)) for name in names)) == names
    assert [resource for _, resource in logged(either)[before:]] == names


async def test_a_change_that_raises_leaves_nothing_and_its_neighbours_are_kept(either: Store) -> None:
    before = len(logged(either))
    answers = await asyncio.gather(
        *(either.submit(change) for change in (taking("a"), refused, taking("b"))), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["a", "no", "b"]
    assert leased(either) == ["a", "b"]
    assert [resource for _, resource in logged(either)[before:]] == ["a", "b"]


async def test_changes_of_one_tick_share_a_commit(either: Store) -> None:
    before = either.commits
    await asyncio.gather(*(either.submit(taking(f"m{n}")) for n in range(100)))
    assert either.commits == before + 1
    await either.submit(taking("m"))
    await either.submit(taking("m"))
    assert either.commits == before + 3


async def test_a_commit_is_bounded_so_that_the_loop_gets_its_turn(store: Store) -> None:
    await asyncio.gather(*(store.submit(taking(f"m{n}")) for n in range(2 * BATCH_MOST + 1)))
    assert store.commits == 3
    assert len(leased(store)) == 2 * BATCH_MOST + 1


async def test_a_change_sees_earlier_ones_of_its_commit_and_reads_outside_see_none(either: Store) -> None:
    def look(tx: Tx) -> list[str]:
        assert either.read.select(LeaseRow) == []
        tx.record("looked", "b", cause="test")
        tx.put(lease("b"))
        return [row.machine for row in tx.select(LeaseRow, "true order by id")]

    _, seen = await asyncio.gather(either.submit(taking("a")), either.submit(look))
    assert seen == ["a", "b"]
    assert leased(either) == ["a", "b"]


async def test_calls_after_a_commit_run_once_it_is_on_disk_and_before_the_answer(either: Store) -> None:
    order: list[str] = []

    def change(tx: Tx) -> None:
        taking("m")(tx)
        tx.after_commit(lambda: order.append(f"after commit of {either.read.select(LeaseRow)[0].machine}"))

    def never(tx: Tx) -> None:
        tx.after_commit(lambda: order.append("after a change that was refused"))
        refused(tx)

    async def submit(change: Callable[[Tx], None]) -> None:
        await either.submit(change)
        order.append("answered")

    await asyncio.gather(submit(change), submit(never), return_exceptions=True)
    assert order == ["after commit of m", "answered"]


async def test_a_call_after_a_commit_that_raises_is_reported_and_everyone_is_answered(store: Store) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, problem: reported.append(problem))

    def change(tx: Tx) -> str:
        tx.after_commit(lambda: [][1])
        return taking("a")(tx)

    answers = await asyncio.gather(store.submit(change), store.submit(taking("b")))
    assert list(answers) == ["a", "b"]
    assert [type(problem["exception"]) for problem in reported] == [IndexError]


async def test_a_write_without_a_record_is_a_bug(store: Store) -> None:
    with pytest.raises(AssertionError, match="lease m: written without a record"):
        await store.submit(lambda tx: tx.put(lease("m")))
    with pytest.raises(AssertionError, match="lease m: written without a record"):
        await store.submit(lambda tx: tx.delete(LeaseRow, "m"))


async def test_a_record_without_a_cause_is_a_bug(store: Store) -> None:
    with pytest.raises(AssertionError, match="without a cause"):
        await store.submit(lambda tx: tx.record("lease.taken", "m", cause=""))
    assert logged(store) == []


async def test_a_change_that_has_ended_cannot_write(store: Store) -> None:
    kept: list[Tx] = []

    def change(tx: Tx) -> None:
        taking("m")(tx)
        kept.append(tx)

    await store.submit(change)
    with pytest.raises(AssertionError, match="written after its change had ended"):
        kept[0].put(lease("later"))
    with pytest.raises(Conflict):
        await store.submit(lambda tx: (kept.append(tx), refused(tx)))  # type: ignore[func-returns-value]
    with pytest.raises(AssertionError, match="written after its change had ended"):
        kept[1].flush()
    assert leased(store) == ["m"]


async def test_a_change_that_raises_stop_iteration_is_refused_like_any_other(store: Store) -> None:
    with pytest.raises(Broken, match="StopIteration"):
        await store.submit(lambda tx: next(iter([])))
    await store.submit(taking("m"))


async def test_a_change_whose_caller_left_before_it_began_is_not_made(store: Store) -> None:
    leaving = asyncio.ensure_future(store.submit(taking("left")))
    staying = asyncio.ensure_future(store.submit(taking("stayed")))
    await asyncio.sleep(0)  # both are submitted, the commit has not begun
    leaving.cancel()
    assert await staying == "stayed"
    assert leased(store) == ["stayed"]


async def test_a_change_whose_caller_left_during_its_commit_is_kept(store: Store) -> None:
    make_slow(store, 0.05)
    await store.submit(taking("slow"))
    leaving = asyncio.ensure_future(store.submit(taking("left")))
    await until(lambda: store._committing is not None)
    leaving.cancel()
    await store.submit(taking("next"))
    assert leased(store) == ["left", "next", "slow"]


async def test_the_database_refuses_a_second_exclusive_run_of_a_resource_and_keeps_the_first(store: Store) -> None:
    def begin(run: str, *, exclusive: bool = True) -> Callable[[Tx], None]:
        row = RunRow(
            id=run,
            flow="start",
            flow_version=1,
            resource="m",
            exclusive=exclusive,
            args={},
            steps=["end"],
            cause="test",
            source="user",
            trace="",
            started_at_ms=0,
            updated_at_ms=0,
        )

        def change(tx: Tx) -> None:
            tx.record("run.started", "m", cause="test")
            tx.put(row)

        return change

    await store.submit(begin("one"))
    with pytest.raises(Broken, match=r"UNIQUE constraint failed: run\.resource"):
        await store.submit(begin("two"))
    await store.submit(begin("one"))  # the same run, written again
    await store.submit(begin("three", exclusive=False))
    assert [run.id for run in store.read.select(RunRow, "true order by id")] == ["one", "three"]


async def test_a_row_that_does_not_read_is_named(store: Store) -> None:
    await store.submit(taking("m"))
    with pytest.raises(Corrupt, match="table app: a row does not read as AppRow"):
        store.read.select(AppRow, "true union all select body from lease")


# --- a slow disk ---


async def test_on_a_slow_disk_the_loop_goes_on_while_a_thread_commits(store: Store) -> None:
    threads = make_slow(store, 0.05)
    await store.submit(taking("first"))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.ensure_future(tick())
    await store.submit(taking("second"))
    ticking.cancel()
    assert threads[-1] == "hawker-commit_0"
    assert ticks > 5


async def test_once_the_disk_is_quick_again_commits_are_made_on_the_loop(store: Store) -> None:
    make_slow(store)
    await store.submit(taking("a"))
    store._db.set_commit_hook(None)
    for _ in range(200):  # one quick commit is enough; a busy machine may need several
        await store.submit(taking("b"))
        if not store._slow:
            break
    assert not store._slow


async def test_what_is_submitted_during_a_slow_commit_goes_into_the_next(store: Store) -> None:
    make_slow(store, 0.05)
    await store.submit(taking("a"))
    first = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store._committing is not None)
    before = store.commits
    rest = [store.submit(taking(f"c{n}")) for n in range(20)]
    assert leased(store) == ["a"]  # what is being committed is not seen yet
    await asyncio.gather(first, *rest)
    assert store.commits == before + 2


async def test_closing_during_a_slow_commit_finishes_it_and_what_waits_behind_it(path: Path) -> None:
    store = Store.open(path, HOST)
    make_slow(store, 0.05)
    await store.submit(taking("a"))
    first = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store._committing is not None)
    second = asyncio.ensure_future(store.submit(taking("c")))
    await asyncio.sleep(0)
    await asyncio.gather(store.close(), store.close())
    assert [await first, await second] == ["b", "c"]
    with pytest.raises(StoreError, match="the database is closed"):
        await store.submit(taking("d"))
    again = Store.open(path, HOST)
    assert leased(again) == ["a", "b", "c"]
    await again.close()


async def test_a_store_abandoned_during_a_slow_commit_tells_nobody_and_can_be_opened_again(path: Path) -> None:
    store = Store.open(path, HOST)
    make_slow(store, 0.05)
    await store.submit(taking("a"))
    waiting = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store._committing is not None)
    behind = asyncio.ensure_future(store.submit(taking("c")))
    await asyncio.sleep(0)
    store.abandon()
    done, _ = await asyncio.wait([waiting, behind], timeout=0.05)
    assert not done
    for task in (waiting, behind):
        task.cancel()
    again = Store.open(path, HOST)
    assert leased(again) == ["a", "b"]
    await again.close()
    assert verify(path).ok


async def test_many_writers_at_once_on_a_slow_disk_lose_nothing(store: Store) -> None:
    make_slow(store, 0.003)
    rng = random.Random(5)

    async def writer(name: str) -> None:
        for n in range(10):
            await store.submit(taking(f"{name}-{n}"))
            await asyncio.sleep(rng.random() * 0.005)

    await asyncio.gather(*(writer(f"w{n}") for n in range(20)))
    assert len(leased(store)) == 200
    assert [seq for seq, _ in logged(store)] == list(range(1, 201))
    assert store.commits < 150


# --- a full disk ---


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


# --- a cut, as the crash tests make it ---


class Cut(BaseException):
    """The end of the program at this point."""


@pytest.mark.parametrize("speed", ["quick", "slow"])
@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_cut_beside_a_commit_reaches_everyone_who_waits_and_ends_the_store(
    path: Path, where: str, speed: str
) -> None:
    armed = False

    def on_commit(at: str) -> None:
        if armed and at == where:
            raise Cut

    store = Store.open(path, HOST, on_commit=on_commit)
    if speed == "slow":
        make_slow(store)
        await store.submit(taking("slow"))
    armed = True
    answers = await asyncio.gather(
        *(store.submit(change) for change in (taking("a"), refused, taking("b"))), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Cut] * 3
    with pytest.raises(StoreError, match="cut off"):
        await store.submit(taking("c"))
    store.abandon()
    again = Store.open(path, HOST)
    assert leased(again)[:2] == (["a", "b"] if where == "after" else ["slow"][: speed == "slow"])
    await again.close()
    assert verify(path).ok


async def test_a_cut_inside_a_change_undoes_the_commit(path: Path) -> None:
    store = Store.open(path, HOST)

    def cut(tx: Tx) -> None:
        taking("cut")(tx)
        raise Cut

    answers = await asyncio.gather(store.submit(taking("a")), store.submit(cut), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Cut, Cut]
    assert leased(store) == []
    await store.close()


# --- opening ---


async def test_a_database_of_a_newer_hawker_is_refused(path: Path) -> None:
    await Store.open(path, HOST).close()
    db = apsw.Connection(str(path))
    db.execute("pragma user_version = 9999")
    db.close()
    with pytest.raises(StoreError, match=r"has version 9999; this Hawker knows up to \d+: upgrade it"):
        Store.open(path, HOST)


def test_a_directory_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent/worker\.db cannot be read or written"):
        Store.open(tmp_path / "absent" / "worker.db", HOST)


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(Corrupt, match=r"worker\.db is damaged"):
        Store.open(path, HOST)


async def test_a_damaged_record_at_the_end_of_the_log_is_named_and_the_database_not_opened(path: Path) -> None:
    store = Store.open(path, HOST)
    for n in range(150):
        await store.submit(taking(f"m{n}"))
    await store.close()
    db = apsw.Connection(str(path))
    db.execute("update log set resource = 'other' where seq = 149")
    with pytest.raises(Corrupt, match="log record 149: its checksum does not match") as caught:
        Store.open(path, HOST)
    assert caught.value.seq == 149
    db.execute("update log set resource = 'm148', data = cast(x'7b80ff7d' as text) where seq = 149")
    with pytest.raises(Corrupt, match="log record 149"):
        Store.open(path, HOST)
    db.close()


async def test_another_process_that_writes_is_told_from_other_trouble(path: Path, store: Store) -> None:
    store._db.set_busy_timeout(1)
    other = apsw.Connection(str(path))
    other.execute("begin immediate")
    with pytest.raises(StoreError, match="is being written by another process"):
        await store.submit(taking("m"))
    other.execute("rollback")
    other.close()
    await store.submit(taking("m"))
    assert leased(store) == ["m"]


async def test_a_long_reader_does_not_leave_a_long_log_behind(path: Path, store: Store) -> None:
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("begin")
    reader.execute("select count(*) from log").fetchall()
    store._db.execute("pragma wal_autocheckpoint = 10")
    store._db.execute("pragma journal_size_limit = 100000").fetchall()
    wal = path.with_name("worker.db-wal")
    for n in range(100):
        await store.submit(taking(f"m{n}", "x" * 20_000))
    assert wal.stat().st_size > 1_000_000
    reader.execute("commit")
    reader.close()
    for n in range(3):
        await store.submit(taking(f"m{n}", "y"))
    assert wal.stat().st_size <= 100_000


async def test_the_write_ahead_log_is_limited(store: Store) -> None:
    [[limit]] = store._db.execute("pragma journal_size_limit")
    assert limit == 64 << 20
    assert store._db.pragma("synchronous") == 2


async def test_old_fills_are_found_without_reading_all(store: Store) -> None:
    """The worker's sweep looks for them every few seconds, on its loop, among a day's orders."""
    plan = store.read.query("explain query plan select body from fill where at_ms < 1 limit 1000")
    assert "USING INDEX fill_at" in plan[0][3]

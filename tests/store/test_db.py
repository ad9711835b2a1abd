"""The store: durable when acknowledged, one commit for all who write in the same tick, a change whole or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.kit.counting import counting
from tests.kit.virtual_time import virtual_host, virtual_time
from tests.kit.waiting import until
from tests.store.leases import HOST, held_up, lease, leased, logged, refused, slowed, taking

from hawker.errors import Broken, Conflict, Corrupt, StoreError
from hawker.model.rows import AppRow, LeaseRow, RunRow
from hawker.store.db import BATCH_MOST, Store
from hawker.store.tx import Tx
from hawker.store.verify import verify

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


@virtual_time
async def test_a_change_that_is_not_to_be_made_before_a_time_lets_others_go_ahead(path: Path) -> None:
    store = Store.open(path, virtual_host())
    loop = asyncio.get_running_loop()
    at = loop.time() + 0.003
    waits = asyncio.ensure_future(store.submit(lambda tx: loop.time(), not_before_s=at))
    assert await store.submit(lambda tx: loop.time()) < at
    assert await waits == at
    assert await store.submit(lambda tx: loop.time(), not_before_s=at) == at  # it is past: nothing waits
    await store.close()


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
    go_on = await held_up(store)
    leaving = asyncio.ensure_future(store.submit(taking("left")))
    await until(lambda: store.committing)
    leaving.cancel()
    go_on.set()
    await store.submit(taking("next"))
    assert leased(store) == ["left", "next", "slow"]


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


async def test_the_database_refuses_a_second_exclusive_run_of_a_resource_and_keeps_the_first(store: Store) -> None:
    await store.submit(begin("one"))
    with pytest.raises(Broken, match=r"UNIQUE constraint failed: run\.resource"):
        await store.submit(begin("two"))
    await store.submit(begin("one"))  # the same run, written again
    await store.submit(begin("three", exclusive=False))
    assert [run.id for run in store.read.select(RunRow, "true order by id")] == ["one", "three"]


async def test_a_row_that_its_table_refuses_is_the_failure_of_its_change_alone(path: Path, either: Store) -> None:
    changes = (taking("a"), begin("one"), begin("two"), refused, taking("b"))
    answers = await asyncio.gather(*(either.submit(change) for change in changes), return_exceptions=True)
    assert [type(answer) for answer in answers] == [str, type(None), Broken, Conflict, str]
    assert leased(either) == ["a", "b"]
    assert [run.id for run in either.read.select(RunRow)] == ["one"]
    await either.submit(taking("c"))
    assert verify(path).faults == []


async def test_what_a_failed_change_has_looked_at_is_kept_of_the_changes_before_it(path: Path, either: Store) -> None:
    def looked(tx: Tx) -> None:
        begin("of the change that fails")(tx)
        assert len(tx.select(RunRow)) == 2
        assert [row.machine for row in tx.select(LeaseRow)] == ["a"]
        raise Conflict("no")

    changes = (taking("a"), begin("kept", exclusive=False), looked, taking("b"))
    answers = await asyncio.gather(*(either.submit(change) for change in changes), return_exceptions=True)
    assert [type(answer) for answer in answers] == [str, type(None), Conflict, str]
    assert leased(either) == ["a", "b"]
    assert [run.id for run in either.read.select(RunRow)] == ["kept"]
    assert verify(path).faults == []


async def test_a_commit_writes_each_row_and_each_record_once(path: Path) -> None:
    with counting() as counts:
        store = Store.open(path, HOST)
        alone = await counts.of(store.submit(taking("m")))
        together = await counts.of(asyncio.gather(*(store.submit(taking("m", str(n))) for n in range(50))))
        await store.close()
    assert alone.statements == len(("begin", "the row", "its record", "commit"))
    assert together.statements == alone.statements + 49, "a record for each change"


async def test_a_row_that_does_not_read_is_named(store: Store) -> None:
    await store.submit(taking("m"))
    with pytest.raises(Corrupt, match="table app: a row does not read as AppRow"):
        store.read.select(AppRow, "true union all select body from lease")


async def test_a_row_that_damage_made_no_text_is_named(path: Path, store: Store) -> None:
    await store.submit(taking("m"))
    db = apsw.Connection(str(path))
    ((body,),) = db.execute("select cast(body as blob) from lease")
    db.execute("update lease set body = cast(? as text)", (body.replace(b'"o"', b'"\xff"'),))
    problem = r"table lease: a row does not read as LeaseRow: .* can't decode byte 0xff"
    with pytest.raises(Corrupt, match=problem):
        store.read.get(LeaseRow, "m")
    with pytest.raises(Corrupt, match=problem):
        store.read.select(LeaseRow)
    with pytest.raises(Corrupt, match=problem):
        await store.submit(lambda tx: tx.get(LeaseRow, "m"))
    db.execute("update lease set body = cast(? as text)", (body,))
    db.close()


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
        await slowed(store)
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

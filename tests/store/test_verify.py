"""Replaying the log: whatever is damaged is named, and tables are rebuilt from a log that holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.kit.tiers import costly

from hawker.errors import Corrupt, StoreError
from hawker.host import Host
from hawker.model.rows import ROWS, AppRow, LeaseRow
from hawker.store import log
from hawker.store.db import Store
from hawker.store.schema import tables
from hawker.store.tx import Tx
from hawker.store.verify import verify

HOST = Host(lambda: 1.0, random.Random(1))
RECORDS = 12
COLUMNS = log.COLUMNS.split(", ")


def lease(machine: str, nonce: str = "n") -> LeaseRow:
    return LeaseRow(machine=machine, nonce=nonce, owner="ö", description="", expires_at_ms=0)


def app(name: str) -> AppRow:
    return AppRow(name=name, id="i", org="o", network="", number=1, created_at_ms=0, stamp_ms=0)


def step(n: int) -> Callable[[Tx], None]:
    def change(tx: Tx) -> None:
        tx.record("lease.taken", f"m{n}", cause="a test", flow="f", run="r", step="s", attempt=n, data={"n": n})
        tx.put(lease(f"m{n % 4}", f"nonce {n}"))
        if n % 5 == 4:
            tx.delete(LeaseRow, f"m{n % 4}")
        if n % 3 == 0:
            tx.record("app.made", f"a{n}", cause="a test", trace="t")
            tx.put(app(f"a{n}"))

    return change


def make(path: Path) -> None:
    async def run() -> None:
        store = Store.open(path, HOST)
        n = 0
        while store._seq < RECORDS:
            await store.submit(step(n))
            n += 1
        await store.close()

    asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "worker.db"
    make(path)
    assert verify(path).ok
    return path


def change(path: Path, sql: str, *values: Any) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute(sql, values)
        assert db.changes() == 1, sql


def dump(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        return {table: list(db.execute(f"select id, body from {table} order by id")) for table in tables(db)}


def test_a_sound_database_has_no_faults(path: Path) -> None:
    report = verify(path)
    assert report.ok
    assert report.faults == []
    assert report.records == RECORDS
    assert report.rows == sum(len(rows) for rows in dump(path).values()) > 3
    assert not report.rebuilt


def test_every_table_is_compared(path: Path) -> None:
    made = [name for (name,) in _query(path, "select name from sqlite_schema where type = 'table'")]
    assert sorted(made) == sorted(["log", *(row.table for row in ROWS)])


def flipped(value: Any, at: int, bit: int) -> Any:
    """The value with one bit of one of its bytes flipped; None when the database cannot hold that."""
    if isinstance(value, int):
        return value ^ (1 << (bit + 8 * (at % 4)))
    raw = bytearray(value.encode() if isinstance(value, str) else value)
    raw[at % len(raw)] ^= 1 << bit
    return bytes(raw)


@pytest.mark.parametrize("column", COLUMNS)
@settings(max_examples=costly(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seq=st.integers(1, RECORDS), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_in_any_column_of_any_record_is_named(
    path: Path, column: str, seq: int, at: int, bit: int
) -> None:
    with closing(apsw.Connection(str(path))) as db:
        [[old]] = db.execute(f"select {column} from log where seq = ?", (seq,))
        if old == "":
            return
        new = flipped(old, at, bit)
        assume(column != "seq" or new not in range(1, RECORDS + 1))  # there is one of that number
        text = isinstance(old, str)
        with db:
            db.execute(f"update log set {column} = {'cast(? as text)' if text else '?'} where seq = ?", (new, seq))
        found = verify(path)
        with pytest.raises(Corrupt, match="the log itself is damaged, so nothing was rebuilt"):
            verify(path, rebuild=True)
        key = new if column == "seq" else seq
        db.execute(f"update log set {column} = ? where seq = ?", (old, key))
    assert not found.ok
    if column == "seq":
        assert any(fault.startswith((f"log: record {seq} is", f"log: records {seq} to")) for fault in found.faults)
    else:
        assert f"log record {seq}: its checksum does not match its content" in found.faults
    assert verify(path).ok


@pytest.mark.parametrize("seq", range(1, RECORDS))
def test_a_deleted_record_is_named(path: Path, seq: int) -> None:
    change(path, "delete from log where seq = ?", seq)
    assert f"log: record {seq} is missing" in verify(path).faults


def test_a_deleted_stretch_is_named(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute("delete from log where seq between 4 and 6")
    assert "log: records 4 to 6 are missing" in verify(path).faults


def test_a_record_cut_off_at_the_end_shows_in_the_rows_it_wrote(path: Path) -> None:
    change(path, "delete from log where seq = ?", RECORDS)
    faults = verify(path).faults
    assert len(faults) == 1
    assert faults[0].startswith("table ")


def test_a_record_put_in_between_is_named(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute("update log set seq = -seq where seq > 5")
        db.execute("update log set seq = 1 - seq where seq < 0")
        db.execute(f"insert into log select 6, {', '.join(COLUMNS[1:])} from log where seq = 5")
    assert "log record 6: its checksum does not match its content" in verify(path).faults


def test_two_records_that_changed_places_are_both_named(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        for old, new in ((3, 99), (4, 3), (99, 4)):
            db.execute("update log set seq = ? where seq = ?", (new, old))
    faults = verify(path).faults
    assert {f"log record {seq}: its checksum does not match its content" for seq in (3, 4)} <= set(faults)


def test_a_changed_row_is_named(path: Path) -> None:
    change(path, "update lease set body = replace(body, 'nonce', 'NONCE') where id = 'm0'")
    assert verify(path).faults == ["table lease: row m0 differs from the log"]


def test_a_missing_row_is_named(path: Path) -> None:
    change(path, "delete from app where id = 'a3'")
    assert verify(path).faults == ["table app: row a3 of the log is missing"]


def test_a_row_that_nobody_logged_is_named(path: Path) -> None:
    change(path, "insert into app (id, body) values ('other', '{}')")
    assert verify(path).faults == ["table app: row other is not in the log"]


def test_a_row_that_is_not_even_text_is_named(path: Path) -> None:
    change(path, "update lease set body = cast(x'7b22ff223a317d' as text) where id = 'm0'")
    assert "table lease: row m0 differs from the log" in verify(path).faults


def test_an_index_that_does_not_match_its_table_is_named(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute("create index app_org on app (org)")
        db.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        db.execute("update sqlite_schema set sql = replace(sql, '(org)', '(deleted)') where name = 'app_org'")
        db.execute("pragma user_version")
    faults = verify(path).faults
    assert faults
    assert all(fault.startswith("SQLite: ") for fault in faults)
    assert "app_org" in faults[0]


def test_rebuilding_restores_the_tables_byte_by_byte(path: Path) -> None:
    before = dump(path)
    with closing(apsw.Connection(str(path))) as db:
        db.execute("update lease set body = '{}'")
        db.execute("delete from app")
        db.execute("insert into worker (id, body) values ('x', '{}')")
    damaged = verify(path)
    report = verify(path, rebuild=True)
    assert report.rebuilt
    assert report.faults == damaged.faults != []
    assert dump(path) == before
    assert verify(path).ok


def test_rebuilding_a_sound_database_changes_nothing(path: Path) -> None:
    before = dump(path)
    assert verify(path, rebuild=True).ok
    assert dump(path) == before


def test_a_damaged_log_is_not_rebuilt_from(path: Path) -> None:
    change(path, "update log set cause = 'other' where seq = 3")
    change(path, "delete from app where id = 'a3'")
    before = dump(path)
    with pytest.raises(Corrupt, match="log record 3: its checksum"):
        verify(path, rebuild=True)
    assert dump(path) == before


def test_a_page_that_is_overwritten_is_reported_and_not_rebuilt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    [[root]] = _query(path, "select rootpage from sqlite_schema where name = 'log'")
    content[(root - 1) * 4096 : root * 4096] = bytes(4096)
    path.write_bytes(content)
    assert not verify(path).ok
    with pytest.raises(Corrupt):
        verify(path, rebuild=True)


def _query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        return list(db.execute(sql))


def test_where_there_is_no_database_of_ours_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent\.db cannot be read or written"):
        verify(tmp_path / "absent.db")
    (tmp_path / "text.db").write_text("no database at all " * 100)
    assert verify(tmp_path / "text.db").faults == ["SQLite: file is not a database"]


async def test_verifying_beside_a_running_worker_sees_one_moment_and_does_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    store = Store.open(path, HOST)
    await store.submit(step(0))
    done, written = False, 0

    async def write() -> None:
        nonlocal written
        while not done:
            await asyncio.gather(*(store.submit(step(written + k)) for k in range(5)))
            written += 5

    writing = asyncio.ensure_future(write())
    seen: list[int] = []
    async with asyncio.timeout(40):  # neither the disk nor a core may be ours for a while
        while len(seen) < 10 or written <= 20 or seen[-1] == seen[0]:
            report = await asyncio.to_thread(verify, path)
            assert report.faults == []
            seen.append(report.records)
    done = True
    await writing
    assert seen == sorted(seen)
    await store.close()
    assert verify(path).ok


async def test_rebuilding_beside_an_idle_worker_leaves_it_able_to_write(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    store = Store.open(path, HOST)
    await store.submit(step(0))
    change(path, "update lease set body = '{}' where id = 'm0'")
    assert (await asyncio.to_thread(verify, path, rebuild=True)).rebuilt
    assert store.read.get(LeaseRow, "m0") == lease("m0", "nonce 0")
    await store.submit(step(1))
    await store.close()
    assert verify(path).ok

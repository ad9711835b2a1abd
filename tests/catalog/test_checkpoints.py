"""The catalog's write-ahead log ends up in its file, whoever writes, and however much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.kit.waiting import wait_until

from hawker.catalog.tables.checkpoints import Checkpoints
from hawker.store.connection import BUSY_MS


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[apsw.Connection]:
    db = apsw.Connection(str(tmp_path / "a.db"))
    db.set_busy_timeout(BUSY_MS)  # as the catalog's own: the last round keeps it out
    for sql in ("pragma journal_mode = wal", "pragma synchronous = normal", "create table t (n integer, text)"):
        db.execute(sql).fetchall()
    yield db
    db.close(True)


def write(db: apsw.Connection, count: int) -> None:
    for n in range(count):
        db.execute("insert into t values (?, ?)", (n, "x" * 3000))


def test_the_log_is_brought_into_the_file_by_another_thread_and_begun_anew(
    tmp_path: Path, writer: apsw.Connection
) -> None:
    file, log = tmp_path / "a.db", tmp_path / "a.db-wal"
    checkpoints = Checkpoints(str(file), writer, pages=100, most=1 << 30)
    for _ in range(10):
        before = file.stat().st_size
        write(writer, 60)
        checkpoints.close()
        assert file.stat().st_size > before, "before anything else was written"
    assert log.stat().st_size < 300 * 4200, "it did not grow on and on"


def test_a_log_that_grows_faster_than_it_is_brought_is_bounded_all_the_same(
    tmp_path: Path, writer: apsw.Connection
) -> None:
    file, log = tmp_path / "a.db", tmp_path / "a.db-wal"
    checkpoints = Checkpoints(str(file), writer, pages=100, most=100)
    write(writer, 1000)
    checkpoints.close()
    assert log.stat().st_size < 200 * 4200
    assert file.stat().st_size > 2_000_000


def test_a_log_that_is_written_all_the_time_begins_anew_though_no_commit_brings_any_of_it(
    tmp_path: Path, writer: apsw.Connection
) -> None:
    """Once a commit brought the rest, and waited for the disk twice: 25 ms in which a proxy did nothing else."""
    log = tmp_path / "a.db-wal"
    checkpoints = Checkpoints(str(tmp_path / "a.db"), writer, pages=100, most=1 << 30)

    def begun_anew() -> bool:
        if not checkpoints.holding:
            write(writer, 10)
        return salt(log) != first

    write(writer, 1)
    first = salt(log)
    wait_until(begun_anew, "the log has begun anew")
    checkpoints.close()
    assert not checkpoints.holding


def salt(log: Path) -> bytes:
    """What tells a log from the one before it in the same file (SQLite's file format, section 4.1)."""
    with log.open("rb") as file:
        return file.read(24)[16:]

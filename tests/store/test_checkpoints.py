"""The write-ahead log ends up in the database, beside the commits, and nothing that was acknowledged is lost by it."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
from tests.kit.waiting import eventually
from tests.store.leases import HOST, leased, taking

from hawker.store.checkpoints import Checkpoints
from hawker.store.db import Store
from hawker.store.verify import verify

NEVER = 1 << 30


def set_pages(store: Store, *, pages: int, at_once: int = NEVER, most: int = NEVER) -> Checkpoints:
    checkpoints = store._checkpoints
    assert checkpoints is not None
    checkpoints.pages, checkpoints.at_once, checkpoints.most = pages, at_once, most
    return checkpoints


def size(path: Path) -> int:
    return path.stat().st_size


def salt(path: Path) -> bytes:
    """What tells a log from the one before it in the same file (SQLite's file format, section 4.1)."""
    with path.with_name("worker.db-wal").open("rb") as file:
        return file.read(24)[16:]


async def test_in_a_quiet_moment_a_thread_brings_the_log_and_the_next_commit_begins_it_anew(
    path: Path, store: Store
) -> None:
    checkpoints = set_pages(store, pages=50)
    await store.submit(taking("first"))
    before, first, length = leased(store), salt(path), size(path)

    async def brought() -> bool:
        return size(path) > length

    for n in range(20):
        await store.submit(taking(f"m{n:02}", "x" * 20_000))
        before.append(f"m{n:02}")
    await eventually(brought, "pages are in the database, though nothing was committed since")
    checkpoints.at_once = 0  # commits may come so often now that there is no quiet moment any more

    async def begun_anew() -> bool:
        await store.submit(taking("again"))
        return salt(path) != first

    await eventually(begun_anew, "the log begins anew")
    assert leased(store) == sorted([*before, "again"])


async def test_where_no_moment_is_quiet_the_log_is_brought_all_the_same_and_no_commit_does_it(
    path: Path, store: Store
) -> None:
    set_pages(store, pages=50, at_once=100)
    await store.submit(taking("first"))
    length, done = size(path), False

    async def write() -> None:
        n = 0
        while not done:
            await store.submit(taking(f"m{n % 10}", "x" * 10_000))
            n += 1

    async def brought() -> bool:
        return size(path) > length

    writing = asyncio.ensure_future(write())
    await eventually(brought, "pages are in the database")
    done = True
    await writing


async def test_commits_bring_the_log_themselves_when_they_are_quicker_than_the_thread(path: Path, store: Store) -> None:
    set_pages(store, pages=NEVER, most=100)
    wal = path.with_name("worker.db-wal")
    length = size(wal)
    for n in range(400):
        await store.submit(taking(f"m{n % 10}", "x" * 10_000))
    assert size(path) > 10 * 10_000
    assert size(wal) == length, "thousands of pages were written, and the log has not grown"


async def test_who_reads_for_long_does_not_leave_a_long_log_behind(path: Path, store: Store) -> None:
    set_pages(store, pages=10, at_once=20, most=100)
    store._db.execute("pragma journal_size_limit = 100000").fetchall()
    wal = path.with_name("worker.db-wal")
    length = size(wal)
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("begin")
    reader.execute("select count(*) from log").fetchall()
    for n in range(length // 100_000 + 10):
        await store.submit(taking(f"m{n}", "x" * 100_000))
    assert size(wal) > length
    reader.execute("commit")
    reader.close()

    async def short() -> bool:
        await store.submit(taking("m", "y"))
        return size(wal) <= 100_000

    await eventually(short, "the log is short")


async def test_closing_waits_for_what_is_under_way_and_leaves_no_log(path: Path) -> None:
    store = Store.open(path, HOST)
    checkpoints = set_pages(store, pages=1, at_once=1)
    for n in range(50):
        await store.submit(taking(f"m{n:02}", "x" * 10_000))
    await store.close()
    assert not checkpoints._busy()
    assert not path.with_name("worker.db-wal").exists()
    again = Store.open(path, HOST)
    assert len(leased(again)) == 50
    await again.close()
    assert verify(path).faults == []


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.store.leases import HOST, taking
from hawker.store.db import Store

async def main():
    store = Store.open(Path(sys.argv[1]), HOST)
    checkpoints = store._checkpoints
    checkpoints.pages, checkpoints.at_once, checkpoints.most = 5, 10, 200
    n = 0
    while True:
        await asyncio.gather(*(store.submit(taking(f"{sys.argv[2]}-{n + each}", "x" * 5000)) for each in range(3)))
        for each in range(3):
            print(f"{sys.argv[2]}-{n + each}", flush=True)
        n += 3

asyncio.run(main())
"""


@pytest.mark.slow
def test_what_is_acknowledged_is_there_after_a_kill_in_the_middle_of_bringing_the_log(path: Path) -> None:
    """Killed again and again, while a thread has work to do all the time."""
    rng = random.Random(7)
    acknowledged: list[str] = []
    for life in range(4):
        before = size(path) if life else 0
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"l{life}"], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            least = len(acknowledged) + rng.randrange(10, 150)
            while len(acknowledged) < least or size(path) <= before:  # until some of it was brought
                acknowledged.append(next(writer.stdout).strip())
            writer.kill()
            acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
        assert writer.returncode == -signal.SIGKILL
        found = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        there = {key for (key,) in found.execute("select id from lease")}
        found.close()
        assert there >= set(acknowledged)
        assert verify(path).faults == []

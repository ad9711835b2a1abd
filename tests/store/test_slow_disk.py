"""The store on a disk that takes its time: a thread commits, and the loop goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.kit.virtual_time import virtual_time
from tests.kit.waiting import eventually, until
from tests.store.leases import HOST, held_up, leased, logged, make_slow, slowed, taking

from hawker.errors import StoreError
from hawker.store.db import SLOW_IN_A_ROW, Store
from hawker.store.verify import verify


async def test_on_a_slow_disk_the_loop_goes_on_while_a_thread_commits(store: Store) -> None:
    go_on = await held_up(store)
    committing = asyncio.ensure_future(store.submit(taking("second")))
    await until(lambda: store.committing)
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert not committing.done()
    go_on.set()
    assert await committing == "second"


@pytest.fixture
async def in_memory() -> AsyncIterator[Store]:
    """A store whose disk is quick, whatever else is written on this machine."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        store = Store.open(Path(directory) / "worker.db", HOST)
        yield store
        await store.close()


async def test_once_the_disk_is_quick_again_commits_are_made_on_the_loop(in_memory: Store) -> None:
    store = in_memory
    await slowed(store)
    store._db.set_commit_hook(None)

    async def quick() -> bool:  # one quick commit is enough; a busy machine may need several
        await store.submit(taking("b"))
        return not store.slow

    await eventually(quick, "a commit is quick")


async def test_a_slow_commit_now_and_then_is_no_slow_disk(in_memory: Store) -> None:
    """As on a host whose processors are all in use: in a thread a commit takes more of them, not less."""
    store = in_memory
    threads: list[str] = []

    async def quick() -> bool:
        await store.submit(taking("b"))
        return not store.slow

    for _ in range(3):
        made = make_slow(store)
        for _ in range(2):
            await store.submit(taking("a"))
        threads += made
        store._db.set_commit_hook(None)
        await eventually(quick, "a commit is quick")
    assert threads == ["MainThread"] * 6


@virtual_time
async def test_on_virtual_time_no_disk_is_slow(path: Path) -> None:
    """How long a real commit took decided on which turn of the loop the next one was told, in runs that are to be the
    same each time."""
    store = Store.open(path, HOST)
    threads = make_slow(store)
    for number in range(SLOW_IN_A_ROW + 1):
        await store.submit(taking(str(number)))
    assert threads == ["MainThread"] * (SLOW_IN_A_ROW + 1)
    assert not store.slow
    assert store._thread is None
    await store.close()


async def test_what_is_submitted_during_a_slow_commit_goes_into_the_next(store: Store) -> None:
    go_on = await held_up(store)
    first = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store.committing)
    before = store.commits
    rest = [asyncio.ensure_future(store.submit(taking(f"c{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    assert leased(store) == ["slow"]  # what is being committed is not seen yet
    go_on.set()
    await asyncio.gather(first, *rest)
    assert store.commits == before + 2


async def test_closing_during_a_slow_commit_finishes_it_and_what_waits_behind_it(path: Path) -> None:
    store = Store.open(path, HOST)
    go_on = await held_up(store)
    first = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store.committing)
    second = asyncio.ensure_future(store.submit(taking("c")))
    await asyncio.sleep(0)
    closing = [asyncio.ensure_future(store.close()) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*closing)
    assert [await first, await second] == ["b", "c"]
    with pytest.raises(StoreError, match="the database is closed"):
        await store.submit(taking("d"))
    again = Store.open(path, HOST)
    assert leased(again) == ["b", "c", "slow"]
    await again.close()


async def test_a_store_abandoned_during_a_slow_commit_tells_nobody_and_can_be_opened_again(path: Path) -> None:
    store = Store.open(path, HOST)
    go_on = await held_up(store)
    waiting = asyncio.ensure_future(store.submit(taking("b")))
    await until(lambda: store.committing)
    behind = asyncio.ensure_future(store.submit(taking("c")))
    await asyncio.sleep(0)
    go_on.set()  # the loop is told of its end only in a later turn
    store.abandon()
    done, _ = await asyncio.wait([waiting, behind], timeout=0.05)
    assert not done
    for task in (waiting, behind):
        task.cancel()
    again = Store.open(path, HOST)
    assert leased(again) == ["b", "slow"]
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

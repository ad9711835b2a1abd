"""Of every app three workers keep a row, so that an app outlives the disk of the worker that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.catalog.owners import Owner
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.catalog.gossip.replica import Replica
from hawker.core.rendezvous import ranked
from hawker.model.rows import AppRow
from hawker.store.db import Store
from hawker.worker.app_copies import COPIES, LOOK_S, AppCopies

WORKERS = [f"ord-{n}" for n in range(1, 6)]
KEEPERS = ranked("app/web", WORKERS)[:COPIES]
OTHERS = ranked("app/web", WORKERS)[COPIES:]


def app(stamp_ms: int, **more: Any) -> dict[str, Any]:
    row = {"app_id": "web", "org": "personal", "network": "default", "number": 7, "created_at_ms": 1}
    return {**row, "stamp": stamp_ms << 16, **more}


@asynccontextmanager
async def worker(directory: Path, name: str) -> AsyncIterator[tuple[Store, Replica]]:
    host = virtual_host()
    replica = Replica.open(directory / "catalog.db", host)
    store = Store.open(directory / "worker.db", host)
    for other in WORKERS:
        row = {"region": "ord", "host": "127.0.0.1", "port": 1, "state": "active", "since_ms": 0}
        Owner(replica, other, "global").put("workers", **{other: row})
    adopting = AppCopies(name, replica, store)
    await adopting.open()
    try:
        yield store, replica
    finally:
        await adopting.close()
        await store.close()
        replica.close()


async def looked() -> None:
    await asyncio.sleep(LOOK_S * 3)


@virtual_time
async def test_a_worker_near_in_rank_keeps_a_copy_and_follows_its_changes(tmp_path: Path) -> None:
    async with worker(tmp_path, KEEPERS[1]) as (store, replica):
        maker = Owner(replica, "mad-1", "global")
        maker.put("apps", web=app(10))
        await looked()
        assert store.read.get(AppRow, "web") == AppRow(
            name="web", id="web", org="personal", network="default", number=7, created_at_ms=1, stamp_ms=10
        )
        maker.put("apps", web=app(20, deleted=True))
        await looked()
        deleted = store.read.get(AppRow, "web")
        assert deleted is not None
        assert (deleted.stamp_ms, deleted.deleted) == (20, True)
        [(count, causes)] = store.read.query("select count(*), count(cause) from log where kind = 'app.copied'")
        assert (count, causes) == (2, 2)


@virtual_time
async def test_a_copy_that_is_newer_stays(tmp_path: Path) -> None:
    async with worker(tmp_path, KEEPERS[0]) as (store, replica):
        Owner(replica, "mad-1", "global").put("apps", web=app(20))
        await looked()
        Owner(replica, "mad-2", "global").put("apps", web=app(10, org="older"))
        await looked()
        kept = store.read.get(AppRow, "web")
        assert kept is not None
        assert (kept.stamp_ms, kept.org) == (20, "personal")


@virtual_time
async def test_a_worker_far_in_rank_keeps_none_until_others_are_gone(tmp_path: Path) -> None:
    async with worker(tmp_path, OTHERS[0]) as (store, replica):
        Owner(replica, "mad-1", "global").put("apps", web=app(10))
        await looked()
        assert store.read.get(AppRow, "web") is None
        replica.forget(KEEPERS[0])
        await looked()
        assert store.read.get(AppRow, "web") is not None

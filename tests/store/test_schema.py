"""The tables that a kind of thing brings to the database."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import apsw
import pytest
from tests.kit.virtual_time import virtual_host

from hawker.errors import StoreError
from hawker.model.rows import Row
from hawker.store.compaction import Compaction, Kept
from hawker.store.db import Store
from hawker.store.schema import Schema
from hawker.store.tx import Tx
from hawker.store.verify import verify


class StoneRow(Row, frozen=True, kw_only=True):
    table: ClassVar[str] = "stone"

    id: str
    grams: int


BARE = Schema("stone", (StoneRow,))
WEIGHED = Schema(
    "stone",
    (StoneRow,),
    (
        "alter table stone add column grams integer generated always as (body ->> '$.grams') virtual",
        "create index stone_grams on stone (grams)",
    ),
)


def put(tx: Tx) -> None:
    tx.record("stone.found", "a", cause="a test")
    tx.put(StoneRow(id="a", grams=7))


def open_store(path: Path, *schemas: Schema) -> Store:
    return Store.open(path, virtual_host(), schemas=schemas)


async def a_database(path: Path, *schemas: Schema) -> None:
    store = open_store(path, *schemas)
    await store.submit(put)
    await store.close()


async def test_the_rows_of_a_kind_have_a_table_and_are_replayed_with_the_log(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    await a_database(path, BARE)
    assert verify(path).faults == []
    with apsw.Connection(str(path)) as db:
        db.execute("delete from stone")
    assert verify(path).faults == ["table stone: row a of the log is missing"]
    assert verify(path, rebuild=True).rebuilt
    assert verify(path).faults == []


async def test_each_script_of_a_kind_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    await a_database(path, BARE)
    for _ in range(2):
        store = open_store(path, WEIGHED)
        assert store.read.query("select id from stone where grams = 7") == [("a",)]
        await store.close()


async def test_a_database_is_not_opened_without_a_kind_that_it_has_things_of(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    await a_database(path, WEIGHED)
    with pytest.raises(StoreError, match="things of the kind stone, which is not installed: install it again"):
        open_store(path)
    with pytest.raises(StoreError, match="has version 2 of stone; version 0 is installed: upgrade it"):
        open_store(path, BARE)


async def test_rows_of_a_kind_stay_when_the_beginning_of_the_log_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    store = open_store(path, BARE)
    await store.submit(put)
    for number in range(20):
        await store.submit(lambda tx, number=number: tx.record("noise", str(number), cause="a test"))  # type: ignore[misc]
    compaction = Compaction(store, "ord-1", Kept(records=0, seconds=0.0), lambda tx, rows: (), batch=8)
    await store.submit(compaction.step)
    await store.close()
    report = verify(path)
    assert (report.faults, report.cut) == ([], 8)

"""SQL for people: one statement that reads, within limits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hawker.errors import Invalid
from hawker.host import Host
from hawker.store.db import Store
from hawker.store.sql import ROWS_MAX, read, run_query

COUNTING = "with recursive c(n) as (select 1 union all select n + 1 from c)"


@pytest.fixture
async def path(tmp_path: Path) -> str:
    path = tmp_path / "worker.db"
    await Store.open(path, Host(lambda: 1.0, random.Random(1))).close()
    return str(path)


def test_a_query_gives_its_columns_and_rows(path: str) -> None:
    assert run_query(path, "select 1 as one, x'ff' as bytes") == (["one", "bytes"], [[1, "ff"]])


@pytest.mark.parametrize(
    ("query", "remedy"),
    [
        ("select 1; select 2", "one statement at a time"),
        ("select 1; delete from machine", "not authorized"),
        ("delete from machine", "not authorized"),
        ("attach 'other.db' as other", "not authorized"),
        ("pragma query_only = off", "not authorized"),
        ("select colour", "no such column"),
        (
            f"with recursive c(n) as (select 1 union all select n + 1 from c) select n from c limit {ROWS_MAX + 1}",
            "limit",
        ),
    ],
)
def test_what_is_refused_says_why(path: str, query: str, remedy: str) -> None:
    with pytest.raises(Invalid, match=remedy):
        run_query(path, query)


def test_a_query_without_end_is_ended(path: str) -> None:
    with pytest.raises(Invalid, match=r"took longer than 0\.1 s"):
        read(path, f"{COUNTING} select count(*) from c", seconds_max=0.1)

"""What readers of a replica see: SQL over all that owners have published."""

from __future__ import annotations

import random
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.catalog.versions import NOW_MS, A, Clock, begun, origin, version
from tests.kit.tiers import costly

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.tables.ingest import BULK_LEAST
from hawker.catalog.tables.schema import TABLES
from hawker.catalog.view import Changed
from hawker.core import hlc
from hawker.host import Host
from hawker.model.catalog import (
    Numbered,
    Range,
    Values,
)


def test_a_column_that_is_missing_reads_as_its_default(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1, ("machines", "m", {"app": None}))])
    assert replica.rows("select worker, id, app, cpus, cordoned from machines") == [("a", "m", "", 0, 0)]
    assert replica.log_rows(A) == [Numbered(1, "machines", "m", {})]


def test_of_one_machine_on_several_workers_the_highest_generation_counts(replica: Replica) -> None:
    shown = {
        "a": {"generation": 1, "created_at_ms": 1},
        "b": {"generation": 2, "created_at_ms": 9},
        "c": {"generation": 2, "created_at_ms": 5},
        "d": {"generation": 2, "created_at_ms": 5},
    }
    for owner, values in shown.items():
        begun(replica, owner)
        replica.receive([version(1, ("machines", "m", values), owner=owner)])
    assert replica.rows("select worker from machines") == [("c",)]  # then the older, then the smaller name
    assert len(replica.rows("select worker from machines_all")) == 4


STAMPED = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 4), st.booleans()), max_size=12
)


@given(writes=STAMPED)
@settings(max_examples=costly(8), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_of_an_app_the_newest_stamp_counts_in_whatever_order_it_came(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, str, int, bool]]
) -> None:
    replica = Replica.open(tmp_path_factory.mktemp("c") / "c.db", Host(lambda: NOW_MS / 1000, random.Random(1)))
    numbers: dict[str, int] = {}
    held: dict[tuple[str, str], Values] = {}
    for owner in "abc":
        begun(replica, owner, "global")
    for owner, key, stamp, deleted in writes:
        numbers[owner] = numbers.get(owner, 0) + 1
        held[key, owner] = {"org": owner, "stamp": stamp, "deleted": deleted}
        replica.receive([version(numbers[owner], ("apps", key, held[key, owner]), owner=owner, tier="global")])
    newest = {
        key: hlc.newest((values["stamp"], owner, values) for (k, owner), values in held.items() if k == key)
        for key in sorted({key for key, _ in held})
    }
    wanted = [(key, values["org"]) for key, values in newest.items() if values and not values["deleted"]]
    assert replica.rows("select id, org from apps order by id") == wanted
    replica.close()


def test_a_deleted_app_is_gone_though_others_still_have_it(replica: Replica) -> None:
    for owner, stamp, deleted in (("a", 5, False), ("b", 6, True), ("c", 4, False)):
        begun(replica, owner, "global")
        values = {"org": owner, "stamp": stamp, "deleted": deleted}
        replica.receive([version(1, ("apps", "web", values), owner=owner, tier="global")])
    assert replica.rows("select * from apps") == []
    replica.receive([version(2, ("apps", "web", {"org": "c", "stamp": 6}), owner="c", tier="global")])
    assert replica.rows("select id, org, worker from apps") == [("web", "c", "c")]  # of equal stamps the greater owner
    assert replica.newest_stamp() == 6


def test_a_stamp_too_far_ahead_is_taken_once_its_time_has_come(replica: Replica, clock: Clock) -> None:
    begun(replica, tier="global")
    values = {"stamp": hlc.stamp(NOW_MS + 2_000)}
    replica.receive([version(1, ("apps", "web", values), tier="global")])
    assert replica.rows("select id from apps") == []
    assert replica.newest_stamp() == 0
    assert replica.recheck() == 0
    clock.ms += 1_500
    assert replica.recheck() == 1
    assert replica.rows("select id from apps") == [("web",)]
    assert replica.recheck() == 0


def test_where_an_app_is_counts_workers_by_region(replica: Replica) -> None:
    for owner, region, count in (("a", "ord", 1), ("b", "ord", 1), ("c", "ams", 1), ("d", "ams", 0)):
        begun(replica, owner, "global")
        row = ("app_regions", "web", {"region": region, "machines": count})
        replica.receive([version(1, row, owner=owner, tier="global")])
    assert replica.rows("select * from app_regions order by region") == [("web", "ams", 1), ("web", "ord", 2)]


def test_a_worker_speaks_for_itself_only(replica: Replica) -> None:
    begun(replica, tier="global")
    replica.receive([version(1, ("workers", "a", {"region": "ord"}), ("workers", "b", {}), tier="global")])
    assert replica.rows("select name, region, capacity from workers") == [("a", "ord", "{}")]


def test_readers_are_told_which_tables_may_have_changed(replica: Replica) -> None:
    hints: list[tuple[str, ...]] = []
    replica.on_applied.append(hints.append)
    begun(replica)
    hints.clear()
    replica.receive([version(1), version(2, ("services", "s", {}), ("nix", "k", {}))])
    replica.receive([version(2)])
    assert hints == [("machines", "services")]


def test_readers_that_keep_rows_are_told_which_may_have_changed(replica: Replica) -> None:
    told: list[Changed] = []
    begun(replica)
    replica.on_rows.append(told.append)
    replica.receive([version(1), version(2, ("services", "s", {}), ("nix", "k", {}))])
    replica.receive([version(2)])
    replica.receive([version(3, ("services", "s", None), ("machines", "bad", {"name": 7}))])
    assert told == [{"machines": {"m1"}, "services": {"s"}}, {"machines": {"bad"}, "services": {"s"}}]


def test_after_a_snapshot_any_row_of_its_tier_may_have_changed(replica: Replica) -> None:
    told: list[Changed] = []
    begun(replica)
    replica.on_rows.append(told.append)
    replica.merge([Range(origin(1, epoch=8), 0, (Numbered(1, "machines", "m1", {}),), True)])
    replica.forget("a")
    assert [(each["machines"], each["services"], "apps" in each) for each in told] == [(None, None, False)] * 2


def test_of_very_many_rows_at_once_none_is_named(replica: Replica) -> None:
    told: list[Changed] = []
    begun(replica)
    replica.on_rows.append(told.append)
    rows = tuple(Numbered(1, "capacity", f"w{n}", {}) for n in range(BULK_LEAST))
    replica.merge([Range(origin(1), 0, rows, False)])
    assert told == [{"capacity": None}]


def test_another_process_reads_while_this_one_writes(replica: Replica, path: Path) -> None:
    begun(replica)
    replica.receive([version(1)])
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    assert list(reader.execute("select id from machines")) == [("m1",)]
    reader.close()


def test_a_large_snapshot_into_an_empty_table_has_its_indexes(replica: Replica) -> None:
    count = BULK_LEAST + 1
    rows = tuple(Numbered(n, "machines", f"{n * 7919 % count:05d}", {"app": f"a{n % 10}"}) for n in range(1, count + 1))
    replica.merge([Range(origin(count), 0, rows, True)])
    made = replica.rows(
        "select name from sqlite_schema where type = 'index' and tbl_name = 'machines_of' order by name"
    )
    assert [name for (name,) in made if name.startswith("machines_of")] == ["machines_of_app_name", "machines_of_id"]
    of_a3 = sum(row.values == {"app": "a3"} for row in rows)
    assert replica.rows("select count(*) from machines where app = 'a3'") == [(of_a3,)]
    assert replica.rows("pragma integrity_check") == [("ok",)]


def test_every_table_has_a_view_of_its_name_and_every_view_reads(replica: Replica) -> None:
    views = [name for (name,) in replica.rows("select name from sqlite_schema where type = 'view'")]
    assert {table.name for table in TABLES} <= set(views)
    for view in views:
        assert replica.rows(f"select * from {view}") == []


@pytest.mark.parametrize(
    "query",
    ["machines where id = 'm'", "machines where app = 'web'", "services where machine = 'm'", "apps where id = 'a'"],
)
def test_readers_find_rows_by_index(replica: Replica, query: str) -> None:
    plan = [detail for *_, detail in replica.rows(f"explain query plan select * from {query}")]
    assert not any(detail.startswith("SCAN") for detail in plan), plan

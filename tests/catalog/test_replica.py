"""The replica: an owner's versions in order, ranges whole, rows that cannot be taken put aside, and SQL over it all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawker.catalog.ingest import BULK_LEAST
from hawker.catalog.replica import Outcome, Replica
from hawker.catalog.schema import TABLES, Columns, Count, Table, Text
from hawker.catalog.view import Changed
from hawker.core import hlc
from hawker.core.ownerlog import REORDER_MOST
from hawker.errors import DiskFull, StoreError
from hawker.host import Host
from hawker.model.catalog import (
    NOTHING,
    RAISED_FLOOR,
    Change,
    LogId,
    Numbered,
    Origin,
    Position,
    Range,
    Tier,
    Values,
    Version,
)
from hawker.sim.platform.disk import CrashDisk

NOW_MS = 1_700_000_000_000


class Clock:
    ms = NOW_MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host(clock: Clock) -> Host:
    return Host(lambda: clock.ms / 1000, random.Random(1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def replica(path: Path, host: Host) -> Iterator[Replica]:
    replica = Replica.open(path, host)
    yield replica
    replica.close()


A = LogId("a", "region")


def version(
    number: int,
    *changes: tuple[str, str, Values | None],
    owner: str = "a",
    epoch: int = 7,
    tier: Tier = "region",
    floor: int = 0,
) -> Version:
    made = tuple(Change(*each) for each in changes) or (Change("machines", f"m{number}", {"app": "web"}),)
    return Version(owner, tier, epoch, number, made, floor)


def origin(head: int, floor: int = 0, owner: str = "a", epoch: int = 7, tier: Tier = "region") -> Origin:
    return Origin(owner, tier, epoch, head, floor)


def begun(replica: Replica, owner: str = "a", tier: Tier = "region", epoch: int = 7) -> None:
    """The replica knows that the log is empty."""
    replica.merge([Range(origin(0, owner=owner, tier=tier, epoch=epoch), 0, (), True)])


def machines(replica: Replica) -> list[str]:
    return [key for (key,) in replica.rows("select id from machines order by id")]


# --- in order, or not at all ---


def test_versions_are_applied_in_their_order_only(replica: Replica) -> None:
    begun(replica)
    outcome = replica.receive([version(2), version(3)])
    assert (outcome.applied, outcome.missing) == ([], [A])
    assert machines(replica) == []
    outcome = replica.receive([version(1)])
    assert [each.number for each in outcome.applied] == [1, 2, 3]
    assert machines(replica) == ["m1", "m2", "m3"]
    assert replica.position(A) == Position(7, 3)
    assert replica.waiting == 0


def test_a_version_that_comes_again_is_dropped_and_not_passed_on(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1)])
    assert replica.receive([version(1)]) == Outcome()


def test_a_log_that_nothing_is_known_of_is_asked_for(replica: Replica) -> None:
    assert replica.receive([version(5)]).missing == [A]
    assert replica.position(A) == NOTHING
    replica.merge([Range(origin(4), 0, (Numbered(4, "machines", "m4", {}),), True)])
    assert replica.position(A) == Position(7, 5)  # what waited was applied on top
    assert machines(replica) == ["m4", "m5"]


def test_a_version_without_changes_only_tells_how_far_a_log_is(replica: Replica) -> None:
    begun(replica)
    told = Version("a", "region", 7, 1, ())
    assert replica.receive([told]).missing == [A]
    assert replica.receive([version(1), told]).missing == []
    assert replica.receive([Version("b", "region", 7, 1, ())]).missing == [LogId("b", "region")]
    assert replica.waiting == 0


def test_a_version_of_a_past_epoch_tells_that_its_owner_is_behind(replica: Replica) -> None:
    begun(replica, epoch=9)
    assert replica.receive([version(1, epoch=7)]).ahead == [A]
    assert replica.position(A) == Position(9, 0)


def test_what_waits_is_bounded(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(number) for number in range(2, 500)])
    assert replica.waiting == REORDER_MOST


def test_what_waits_in_vain_is_given_up(replica: Replica, clock: Clock) -> None:
    begun(replica)
    replica.receive([version(2)])
    clock.ms += 60_000
    replica.recheck()
    assert replica.waiting == 0


# --- ranges ---


def test_a_range_that_does_not_begin_where_we_stand_is_refused_whole(replica: Replica) -> None:
    begun(replica)
    rows = (Numbered(3, "machines", "m3", {}),)
    assert replica.merge([Range(origin(3), 2, rows)]).missing == [A]
    assert machines(replica) == []
    assert replica.merge([Range(origin(3), 0, rows)]).merged == [A]
    assert machines(replica) == ["m3"]


def test_a_range_may_bring_what_is_here_already(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1), version(2)])
    rows = tuple(Numbered(number, "machines", f"m{number}", {"app": "web"}) for number in (1, 2, 3))
    assert replica.merge([Range(origin(3), 0, rows)]).merged == [A]
    assert machines(replica) == ["m1", "m2", "m3"]


def test_a_snapshot_takes_the_place_of_everything(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1), version(2, ("machines", "m2", {"app": 3}), ("nix", "k", {}))])
    replica.merge([Range(origin(1, epoch=8), 0, (Numbered(1, "machines", "m9", {}),), True)])
    assert machines(replica) == ["m9"]
    assert replica.rows("select * from quarantine union all select *, 0 from unknown") == []


def test_a_snapshot_of_the_past_is_not_taken(replica: Replica) -> None:
    begun(replica, epoch=8)
    assert replica.merge([Range(origin(5), 0, (), True)]).ahead == [A]
    assert replica.position(A) == Position(8, 0)


def test_tombstones_go_with_the_floor_and_whoever_is_below_it_gets_a_snapshot(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1), version(2), version(3, ("machines", "m1", None))])
    found = replica.answer(A, Position(7, 2))
    assert found
    assert found.rows == (Numbered(3, "machines", "m1", None),)
    replica.receive([Version("a", "region", 7, 4, (RAISED_FLOOR,), 3)])
    found = replica.answer(A, Position(7, 2))
    assert found
    assert found.snapshot
    assert [row.key for row in found.rows] == ["m2"]
    assert found.origin == origin(4, 3)


def test_the_floor_outlives_a_restart(replica: Replica, path: Path, host: Host) -> None:
    begun(replica)
    replica.receive([version(1), Version("a", "region", 7, 2, (RAISED_FLOOR,), 1)])
    replica.close()
    again = Replica.open(path, host)
    assert again.origins("region") == {"a": origin(2, 1)}
    again.close()


def test_an_answer_is_what_another_replica_becomes_equal_by(replica: Replica, tmp_path: Path, host: Host) -> None:
    begun(replica)
    replica.receive(
        [
            version(1, ("machines", "m1", {"app": "web", "cordoned": True, "newer": "kept", "cpus": 2})),
            version(2, ("machines", "m2", {"app": 7}), ("nix", "k", {"x": [1, 2]})),
            version(3, ("machines", "m3", {})),
            version(4, ("machines", "m3", None)),
        ]
    )
    other = Replica.open(tmp_path / "other.db", host)
    for step in (1, 4):
        at = other.position(A)
        given_range = replica.answer(A, at) if step > 1 else Range(origin(1), 0, tuple(replica.log_rows(A))[:1], True)
        assert given_range
        other.merge([msgspec.msgpack.decode(msgspec.msgpack.encode(given_range), type=Range)])
    assert other.log_rows(A) == replica.log_rows(A)
    assert other.digest("region") == replica.digest("region")
    assert replica.answer(A, other.position(A)) is None
    assert replica.answer(LogId("nobody", "region"), NOTHING) is None
    other.close()


def test_only_logs_that_differ_are_compared(replica: Replica, tmp_path: Path, host: Host) -> None:
    other = Replica.open(tmp_path / "other.db", host)
    for owner in ("a", "b", "c"):
        begun(replica, owner)
        begun(other, owner)
    other.receive([version(1, owner="b")])
    assert list(replica.differing("region", other.digest("region"))) == ["b"]
    other.close()


# --- rows that cannot be taken ---


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"app": 3}, "Expected `str"),
        ({"cpus": "2"}, "Expected `int"),
        ({"cpus": -1}, ">= 0"),
        ({"cpus": 1 << 63}, "<= "),
        ({"cordoned": 1}, "Expected `bool"),
        ({"app": "x" * 4097}, "length <= 4096"),
        ({"newer": [1]}, "of no type"),
        ({"newer": {"a": 1}}, "of no type"),
        ({"newer": 1 << 63}, "of no type"),
        ({"newer": float("nan")}, "of no type"),
        ({"newer": "x" * 4097}, "too long"),
        ({f"newer{n}": "x" * 4000 for n in range(20)}, "bytes"),
    ],
)
def test_a_row_that_fails_its_checks_goes_to_quarantine_and_the_log_goes_on(
    replica: Replica, values: Values, why: str
) -> None:
    begun(replica)
    outcome = replica.receive([version(1, ("machines", "m1", values), ("machines", "m2", {})), version(2)])
    assert (len(outcome.applied), outcome.put_aside) == (2, 1)
    assert machines(replica) == ["m2"]
    [(owner, table, key, number, raw, reason)] = replica.rows(
        "select owner, tbl, key, number, raw, why from quarantine"
    )
    assert (owner, table, key, number) == ("a", "machines", "m1", 1)
    assert why in reason
    assert repr(msgspec.msgpack.decode(raw)) == repr(values)


def test_a_row_of_the_other_tier_goes_to_quarantine(replica: Replica) -> None:
    begun(replica, tier="global")
    assert replica.receive([version(1, tier="global")]).put_aside == 1


@pytest.mark.parametrize("key", ["", "k" * 257, "a\0b"])
@pytest.mark.parametrize("values", [{}, None])
def test_a_bad_key_goes_to_quarantine(replica: Replica, key: str, values: Values | None) -> None:
    begun(replica)
    assert replica.receive([version(1, ("machines", key, values))]).put_aside == 1
    assert replica.log_rows(A) == [Numbered(1, "machines", key, values)]


@pytest.mark.parametrize(
    "ports", ["", "{}", "[1", "null", "[" * 2000 + "]" * 2000, "[" * 101 + "]" * 101], ids=lambda text: text[:8]
)
def test_a_column_of_json_is_json(replica: Replica, ports: str) -> None:
    begun(replica)
    replica.receive([version(1, ("services", "s1", {"ports": ports}), ("services", "s2", {"ports": '[{"port": 80}]'}))])
    assert replica.rows("select id, ports ->> '$[0].port' from services") == [("s2", 80)]


def test_a_good_row_takes_the_place_of_one_in_quarantine_and_the_other_way_round(replica: Replica) -> None:
    begun(replica)
    replica.receive([version(1, ("machines", "m", {"app": 3}))])
    replica.receive([version(2, ("machines", "m", {"app": "web"}))])
    assert (machines(replica), replica.rows("select 1 from quarantine")) == (["m"], [])
    replica.receive([version(3, ("machines", "m", {"app": 3}))])
    assert (machines(replica), replica.rows("select number from quarantine")) == ([], [(3,)])
    replica.receive([version(4, ("machines", "m", None))])
    assert (machines(replica), replica.rows("select 1 from quarantine")) == ([], [])


def test_of_several_rows_of_one_key_in_one_commit_the_last_counts(replica: Replica) -> None:
    begun(replica)
    apps: list[Any] = ["one", 2, "three", 4, "five"]
    replica.receive([version(n + 1, ("machines", "m", {"app": app})) for n, app in enumerate(apps)])
    assert replica.rows("select app from machines") == [("five",)]
    assert replica.rows("select 1 from quarantine") == []


@pytest.mark.parametrize(
    "nonsense",
    [
        version(0),
        version(-1),
        version(1, epoch=0),
        version(1, epoch=1 << 63),
        version(1 << 63),
        version(1, owner=""),
        version(1, owner="x" * 257),
        version(1, floor=2),
        version(1, floor=-1),
    ],
    ids=lambda v: f"{v.owner[:3]}-{v.epoch}-{v.number}-{v.floor}",
)
def test_a_version_that_makes_no_sense_is_refused(replica: Replica, nonsense: Version) -> None:
    begun(replica)
    before = replica.origins("region")
    assert replica.receive([nonsense]) == Outcome(refused=1)
    assert replica.origins("region") == before


@pytest.mark.parametrize(
    "nonsense",
    [
        Range(origin(3), 0, (Numbered(4, "machines", "m", {}),), True),
        Range(origin(3), 2, (Numbered(2, "machines", "m", {}),)),
        Range(origin(3), 4, ()),
        Range(origin(3, 4), 0, (), True),
        Range(origin(-1), 0, (), True),
        Range(Origin("b", "region", 7, 3, 0, (Position(8, 1),)), 0, (), True),
        Range(Origin("b", "region", 7, 3, 0, (Position(6, 4),)), 0, (), True),
    ],
    ids=repr,
)
def test_a_range_that_makes_no_sense_is_refused(replica: Replica, nonsense: Range) -> None:
    assert replica.merge([nonsense]) == Outcome(refused=1)
    assert replica.origins("region") == {}


# --- other versions of Hawker ---


class Fruit(Columns, frozen=True):
    color: Text | None = None


class NewFruit(Columns, frozen=True):
    color: Text | None = None
    seeds: Count | None = None


def test_what_an_older_hawker_did_not_know_is_in_its_place_after_an_upgrade(path: Path, host: Host) -> None:
    old = Replica.open(path, host, tables=(Table(name="fruit", tier="region", columns=Fruit),))
    begun(old)
    old.receive([version(1, ("fruit", "f", {"color": "red", "seeds": 3}), ("tools", "t", {"color": "blue"}))])
    before = old.log_rows(A)
    assert old.rows("select * from fruit") == [("a", "f", "red")]
    assert old.rows("select tbl, key from unknown") == [("tools", "t")]
    old.close()

    both = (
        Table(name="fruit", tier="region", columns=NewFruit, indexes=(("color",),)),
        Table(name="tools", tier="region", columns=Fruit),
    )
    new = Replica.open(path, host, tables=both)
    assert new.resets == 0
    assert new.rows("select * from fruit") == [("a", "f", "red", 3)]
    assert new.rows("select * from tools") == [("a", "t", "blue")]
    assert new.rows("select * from unknown") == []
    assert new.log_rows(A) == before
    new.close()

    back = Replica.open(path, host, tables=(Table(name="fruit", tier="region", columns=Fruit),))
    assert back.log_rows(A) == before
    back.close()


def test_a_muted_table_shows_nothing_and_is_passed_on(replica: Replica, path: Path, host: Host) -> None:
    begun(replica)
    replica.receive([version(1)])
    replica.mute("machines")
    replica.receive([version(2)])
    assert machines(replica) == []
    assert [row.key for row in replica.log_rows(A)] == ["m1", "m2"]
    replica.close()
    again = Replica.open(path, host)
    assert machines(again) == []
    again.unmute("machines")
    assert machines(again) == ["m1", "m2"]
    assert again.log_rows(A) == [Numbered(n, "machines", f"m{n}", {"app": "web"}) for n in (1, 2)]
    again.close()


# --- what readers see ---


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
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
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


# --- nodes that go, and files that are damaged ---


def test_a_node_that_was_removed_stays_away_until_a_later_epoch(replica: Replica, path: Path, host: Host) -> None:
    begun(replica)
    replica.receive([version(1)])
    replica.forget("a")
    assert (machines(replica), replica.origins("region")) == ([], {})
    replica.close()
    again = Replica.open(path, host)
    assert again.merge([Range(origin(1), 0, (Numbered(1, "machines", "m1", {}),), True)]).merged == []
    assert again.receive([version(2)]).missing == []
    begun(again, epoch=8)
    assert again.position(A) == Position(8, 0)
    again.close()


def test_members_are_this_nodes_own(replica: Replica) -> None:
    replica.keep_member("a", region="ord", host="h", port=1, status="alive")
    replica.keep_member("a", region="ord", host="h", port=2, status="suspect")
    assert replica.rows("select name, port, status from members") == [("a", 2, "suspect")]
    replica.drop_member("a")
    assert replica.rows("select * from members") == []


@pytest.mark.parametrize("damage", [b"not a database, and long enough to be read as one" * 100, b"x", bytes(8192)])
def test_a_damaged_file_is_begun_anew(path: Path, host: Host, damage: bytes) -> None:
    path.write_bytes(damage)
    replica = Replica.open(path, host)
    begun(replica)
    assert replica.receive([version(1)]).applied
    replica.close()


def test_damage_found_while_writing_is_answered_by_beginning_anew(path: Path, host: Host) -> None:
    replica = Replica.open(path, host)
    begun(replica)
    replica.receive([version(number) for number in range(1, 400)])
    replica.close()
    raw = bytearray(path.read_bytes())
    raw[8192:] = b"\xff" * (len(raw) - 8192)  # the schema stays
    path.write_bytes(raw)
    replica = Replica.open(path, host)
    for number in range(400, 420):
        replica.receive([version(number)])
    assert replica.resets == 1
    assert replica.position(A) == NOTHING
    begun(replica, epoch=8)
    assert machines(replica) == []
    replica.close()


def test_damage_found_while_reading_is_told_once(path: Path, host: Host) -> None:
    replica = Replica.open(path, host)
    begun(replica)
    replica.receive([version(number) for number in range(1, 400)])
    replica.close()
    raw = bytearray(path.read_bytes())
    raw[8192:] = b"\xff" * (len(raw) - 8192)
    path.write_bytes(raw)
    replica = Replica.open(path, host)
    if not replica.resets:  # opening it may have found it already
        with pytest.raises(StoreError):
            replica.answer(A, Position(7, 1))
    assert replica.resets == 1
    assert replica.answer(A, Position(7, 1)) is None
    assert machines(replica) == []
    replica.close()


def test_a_disk_that_refuses_is_told_and_nothing_is_taken(replica: Replica, path: Path) -> None:
    begun(replica)
    other = apsw.Connection(str(path))
    other.execute("begin immediate")
    replica._db.set_busy_timeout(0)
    with pytest.raises(StoreError):
        replica.receive([version(1)])
    other.execute("rollback")
    other.close()
    assert replica.position(A) == Position(7, 0)
    assert replica.receive([version(1)]).applied


def test_a_full_disk_is_told_and_what_was_taken_stays(host: Host) -> None:
    with CrashDisk(seed=1) as disk:
        replica = Replica.open("catalog.db", host, vfs=disk.name)
        begun(replica)
        replica.receive([version(1)])
        disk.room = disk.used()
        with pytest.raises(DiskFull):
            replica.receive([version(number) for number in range(2, 300)])
        disk.room = None
        assert (replica.position(A), machines(replica)) == (Position(7, 1), ["m1"])
        assert len(replica.receive([version(number) for number in range(2, 300)]).applied) == 298
        replica.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_takes_back_whole_commits_at_most(host: Host, seed: int) -> None:
    with CrashDisk(seed=seed) as disk:
        replica = Replica.open("catalog.db", host, vfs=disk.name)
        begun(replica)
        for number in range(1, 60, 3):
            replica.receive([version(number), version(number + 1), version(number + 2)])
        disk.off = True
        replica.abandon()
        disk.power_on()
        again = Replica.open("catalog.db", host, vfs=disk.name)
        head = again.position(A).head
        assert head % 3 == 0
        assert sorted(machines(again)) == sorted(f"m{number}" for number in range(1, head + 1))
        again.close()


def test_a_file_of_another_format_is_begun_anew(path: Path, host: Host) -> None:
    replica = Replica.open(path, host)
    begun(replica)
    replica._db.execute("pragma user_version = 99")
    replica.close()
    again = Replica.open(path, host)
    assert again.position(A) == NOTHING
    assert again.resets == 0
    again.close()


def test_a_large_snapshot_into_an_empty_table_has_its_indexes(replica: Replica) -> None:
    count = BULK_LEAST + 1
    rows = tuple(Numbered(n, "machines", f"{n * 7919 % count:05d}", {"app": f"a{n % 10}"}) for n in range(1, count + 1))
    replica.merge([Range(origin(count), 0, rows, True)])
    made = replica.rows(
        "select name from sqlite_schema where type = 'index' and tbl_name = 'machines_of' order by name"
    )
    assert [name for (name,) in made if name.startswith("machines_of")] == ["machines_of_app", "machines_of_id"]
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

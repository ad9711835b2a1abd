"""Rows that a replica cannot take, or does not know yet: they are put aside or passed on, and the log goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.catalog.versions import A, begun, machines, origin, version

from hawker.catalog.gossip.replica import Outcome, Replica
from hawker.catalog.tables.schema import Columns, Count, Table, Text
from hawker.host import Host
from hawker.model.catalog import (
    Numbered,
    Origin,
    Position,
    Range,
    Values,
    Version,
)

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

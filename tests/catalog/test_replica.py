"""The replica: an owner's versions in order, and ranges whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.catalog.versions import A, Clock, begun, machines, origin, version

from hawker.catalog.gossip.replica import Outcome, Replica
from hawker.core.ownerlog import REORDER_MOST
from hawker.host import Host
from hawker.model.catalog import (
    NOTHING,
    RAISED_FLOOR,
    LogId,
    Numbered,
    Position,
    Range,
    Version,
)

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

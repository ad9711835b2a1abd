"""Replicas whose owners go, whose files are damaged, and whose disks refuse or lose what was written."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from tests.catalog.versions import A, begun, machines, origin, version

from hawker.catalog.gossip.replica import Replica
from hawker.errors import DiskFull, StoreError
from hawker.host import Host
from hawker.model.catalog import (
    NOTHING,
    Numbered,
    Position,
    Range,
)
from hawker.sim.platform.disk import CrashDisk


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

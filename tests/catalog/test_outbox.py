"""The outbox: what a node publishes is in the commit of the change that it shows, numbered, once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish import owner_log
from hawker.catalog.publish.outbox import Outbox, Projected, Projection, published
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.core.ownerlog import COALESCE_MS, Budget
from hawker.errors import Conflict
from hawker.host import Host
from hawker.model.catalog import NOTHING, RAISED_FLOOR, Change, LogId, Numbered, Origin, Position, Version
from hawker.model.rows import LeaseRow, LogHeadRow, PublishedRow, Row, TallyRow
from hawker.store.db import Store
from hawker.store.tx import Reads, Tx
from hawker.store.verify import verify


def lease(reads: Reads, key: str, row: LeaseRow | None) -> Iterable[Projected]:
    """Readers wait for a lease; its owner is a row of the other tier."""
    values = {"nonce": row.nonce, "note": row.description or None} if row else None
    yield "region", Change("leases", key, values), True


def tally(reads: Reads, key: str, row: TallyRow | None) -> Iterable[Projected]:
    yield "global", Change("tallies", key, {"machines": row.machines} if row else None), False


def put_name(node: Node, tx: Tx) -> None:
    tx.record("name.put", "k", cause="test")
    node.outbox.put(tx, "global", Change("names", "k", {}))


class Node:
    """An outbox over a real store. `told` is what it published, `due` how long it said that the rest would wait."""

    def __init__(self, path: Path, budget: Budget | None = None) -> None:
        self.now_ms = 1_000_000
        self.path = path
        self.host = Host(lambda: self.now_ms / 1000, random.Random(1))
        self.told: list[Version] = []
        self.due: list[int] = []
        self.store = Store.open(path, self.host)
        self.publish({LeaseRow: lease, TallyRow: tally}, budget=budget)

    def publish(self, projections: Mapping[type[Row], Projection], **how: Any) -> None:
        """From now on by an outbox of these projections."""
        self.log = OwnerLog(self.host, "me")
        self.outbox = Outbox(self.host, self.log, projections, **how)
        self.log.on_version.append(self.told.append)
        self.outbox.on_due.append(self.due.append)
        self.store.on_change[:] = [self.outbox.on_change]

    async def take(self, machine: str, nonce: str = "n", expires_at_ms: int = 0) -> None:
        def change(tx: Tx) -> None:
            tx.record("lease.taken", machine, cause="test")
            row = LeaseRow(machine=machine, nonce=nonce, owner="o", description="", expires_at_ms=expires_at_ms)
            tx.put(row)

        await self.store.submit(change)

    async def free(self, machine: str) -> None:
        def change(tx: Tx) -> None:
            tx.record("lease.freed", machine, cause="test")
            tx.delete(LeaseRow, machine)

        await self.store.submit(change)

    async def count(self, app: str, machines: int) -> None:
        def change(tx: Tx) -> None:
            tx.record("counted", app, cause="test")
            tx.put(TallyRow(app=app, machines=machines))

        await self.store.submit(change)

    async def do(self, change: Callable[[Tx], Any]) -> Any:
        return await self.store.submit(change)

    def since(self, tier: Any, at: Position) -> Any:
        return self.log.since(self.store.read, tier, at)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path / "worker.db")
    await node.do(node.outbox.open)
    yield node
    await node.store.close()
    assert verify(node.path).faults == []


async def test_a_change_that_readers_wait_for_is_published_in_its_commit(node: Node) -> None:
    await node.take("m1", "n1")
    [version] = node.told
    assert version.number == 1
    assert version.changes == (Change("leases", "m1", {"nonce": "n1"}),)
    [record] = node.store.read.query("select kind, resource from log order by seq desc limit 1")
    assert record == ("catalog.published", "me")


async def test_a_change_that_fails_publishes_nothing(node: Node) -> None:
    def change(tx: Tx) -> None:
        tx.record("lease.taken", "m1", cause="test")
        tx.put(LeaseRow(machine="m1", nonce="n", owner="o", description="", expires_at_ms=0))
        node.outbox.put(tx, "global", Change("names", "k", {}))
        raise Conflict("no")

    with pytest.raises(Conflict):
        await node.do(change)
    await node.take("m2")
    assert [(version.number, version.changes) for version in node.told] == [
        (1, (Change("leases", "m2", {"nonce": "n"}),))
    ]


async def test_a_change_of_nothing_that_is_published_publishes_nothing(node: Node) -> None:
    await node.take("m1")
    await node.take("m1", expires_at_ms=99)
    await node.free("m2")
    assert [version.number for version in node.told] == [1]
    assert node.log.origin(node.store.read, "region").head == 1


async def test_changes_of_one_commit_are_versions_of_their_own(node: Node) -> None:
    await asyncio.gather(*(node.take(f"m{n}") for n in range(5)))
    assert [version.number for version in node.told] == [1, 2, 3, 4, 5]
    assert node.store.commits <= 3


async def test_a_deleted_row_leaves_a_tombstone_with_a_number(node: Node) -> None:
    await node.take("m1")
    await node.take("m2")
    await node.free("m1")
    assert node.since("region", NOTHING).rows == (
        Numbered(2, "leases", "m2", {"nonce": "n"}),
        Numbered(3, "leases", "m1", None),
    )
    assert published(node.store.read, "region", "leases") == ["m2"]
    assert published(node.store.read, "region", "leases", "m1") == []


async def test_what_nobody_waits_for_waits_for_more_of_the_same_row(node: Node) -> None:
    await node.count("web", 1)
    assert node.due == [COALESCE_MS]
    node.now_ms += COALESCE_MS // 2
    await node.count("web", 2)
    await node.do(node.outbox.flush)
    assert node.told == []
    node.now_ms += COALESCE_MS // 2
    await node.do(node.outbox.flush)
    [version] = node.told
    assert (version.tier, version.changes) == ("global", (Change("tallies", "web", {"machines": 2}),))
    assert node.outbox.waiting == []


async def test_what_waits_and_is_taken_back_is_never_published(node: Node) -> None:
    await node.count("web", 1)
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    await node.count("web", 2)
    await node.count("web", 1)
    assert node.outbox.waiting == []
    assert len(node.told) == 1


async def test_what_waits_costs_no_write(node: Node) -> None:
    """A machine of a second was written down as waiting, and taken back, seven times."""
    await node.count("web", 1)
    assert node.outbox.waiting == ["web"]
    assert [kind for (kind,) in node.store.read.query("select kind from log where kind <> 'catalog.opened'")] == [
        "counted"
    ]


async def test_what_is_flushed_is_as_the_changes_before_it_in_its_commit_left_it(node: Node) -> None:
    await node.count("web", 1)
    node.now_ms += COALESCE_MS
    await asyncio.gather(node.count("web", 2), node.do(node.outbox.flush))
    assert [version.changes for version in node.told] == [(Change("tallies", "web", {"machines": 2}),)]
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    assert len(node.told) == 1
    assert node.outbox.waiting == []


async def test_what_waits_survives_a_restart(node: Node, tmp_path: Path) -> None:
    await node.count("web", 1)
    await node.store.close()
    again = Node(node.path)
    again.now_ms = node.now_ms + 1000
    await again.do(again.outbox.open)
    await again.do(again.outbox.refresh)
    again.now_ms += COALESCE_MS
    await again.do(again.outbox.flush)
    assert [version.changes for version in again.told] == [(Change("tallies", "web", {"machines": 1}),)]
    await again.store.close()


async def test_over_its_budget_a_node_publishes_late_and_everything(tmp_path: Path) -> None:
    node = Node(tmp_path / "worker.db", Budget(versions_per_s=1, versions_at_once=2))
    await node.do(node.outbox.open)
    for n in range(10):
        await node.take(f"m{n}")
    assert len(node.told) == 2
    await node.do(node.outbox.flush)
    assert len(node.told) == 2
    node.now_ms += node.due[-1]
    await node.do(node.outbox.flush)
    assert len(node.told) == 3
    assert published(node.store.read, "region", "leases") == [f"m{n}" for n in range(10)]
    assert node.outbox.waiting == []
    await node.store.close()


async def test_what_comes_later_waits_behind_what_is_over_budget_and_all_of_it_is_told_at_once(tmp_path: Path) -> None:
    """Once each change that came took the budget that there was, and what had come before waited on: for seconds where
    hundreds of apps were made."""
    node = Node(tmp_path / "worker.db", Budget(versions_per_s=20, versions_at_once=2))
    await node.do(node.outbox.open)
    for n in range(4):
        await node.take(f"m{n}")
    assert len(node.told) == 2
    assert node.due[-1] <= 51, "no longer than the budget takes: nobody waits for more of the same row"
    node.now_ms += node.due[-1]
    await node.take("m4")
    assert len(node.told) == 2
    await node.do(node.outbox.flush)
    assert [change.key for change in node.told[2].changes] == ["m2", "m3", "m4"]
    node.now_ms += 1000
    await node.take("m5")
    assert len(node.told) == 4, "with budget again at once"
    await node.store.close()


async def test_what_waited_of_both_logs_goes_out_together(tmp_path: Path) -> None:
    """Once they went by turns, and an app that was just made was known when both had had theirs."""
    node = Node(tmp_path / "worker.db", Budget(versions_per_s=10, versions_at_once=1))
    await node.do(node.outbox.open)
    await node.take("m0")
    await node.count("web", 1)
    await node.take("m1")
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    assert [(version.tier, len(version.changes)) for version in node.told[1:]] == [("region", 1), ("global", 1)]
    await node.take("m2")
    assert len(node.told) == 3, "nothing is left of the budget"
    node.now_ms += 100
    await node.do(node.outbox.flush)
    assert [change.key for change in node.told[-1].changes] == ["m2"], "and nothing is owed"
    await node.store.close()


async def test_each_opening_begins_an_epoch_and_remembers_where_the_last_one_ended(node: Node) -> None:
    await node.take("m1")
    before = node.log.origin(node.store.read, "region")
    [after, _] = await node.do(node.outbox.open)
    assert after.epoch > before.epoch
    assert (after.head, after.lineage) == (1, (before.position,))
    assert node.since("region", before.position) == type(node.since("region", NOTHING))(after, 1, (), False)


async def test_an_opening_is_above_what_the_own_replica_holds(node: Node) -> None:
    above = node.log.origin(node.store.read, "region").epoch + (1 << 40)
    [region, _] = await node.do(lambda tx: node.outbox.open(tx, {"region": above}))
    assert region.epoch > above


async def test_a_node_that_came_back_from_the_past_raises_its_epoch_once(node: Node) -> None:
    await node.take("m1")
    now = node.log.origin(node.store.read, "region")
    raised: Origin = await node.do(lambda tx: node.log.raise_epoch(tx, "region", now.epoch + (5 << 30)))
    assert raised.epoch > now.epoch + (5 << 30)
    assert await node.do(lambda tx: node.log.raise_epoch(tx, "region", now.epoch)) == raised


async def test_old_tombstones_go_and_the_floor_rises_over_them(node: Node) -> None:
    for machine in ("m1", "m2", "m3"):
        await node.take(machine)
    await node.free("m1")
    node.now_ms += 1000
    await node.free("m2")
    origin: Origin = await node.do(lambda tx: node.log.purge(tx, "region", node.now_ms))
    assert (origin.floor, origin.head) == (4, 6)
    assert (node.told[-1].floor, node.told[-1].changes) == (4, (RAISED_FLOOR,))
    assert [row.key for row in node.since("region", NOTHING).rows] == ["m3", "m2"]
    assert node.since("region", Position(origin.epoch, 3)).snapshot
    assert await node.do(lambda tx: node.log.purge(tx, "region", node.now_ms)) == origin


def tombstones(node: Node) -> list[str]:
    return [row.key for row in node.since("region", NOTHING).rows if row.values is None]


async def come_and_go(node: Node, machines: Iterable[int]) -> None:
    for n in machines:
        await node.take(f"m{n}")
        await node.free(f"m{n}")


async def test_of_tombstones_that_are_all_young_the_newest_stay(node: Node) -> None:
    await come_and_go(node, range(10))
    before = node.log.origin(node.store.read, "region")
    assert await node.do(lambda tx: node.log.purge(tx, "region", 0, kept=8)) == before
    await come_and_go(node, range(10, 11))
    after = await node.do(lambda tx: node.log.purge(tx, "region", 0, kept=8))
    assert tombstones(node) == [f"m{n}" for n in range(3, 11)]
    assert after.floor == 6
    assert node.told[-1].floor == 6


async def test_many_tombstones_go_a_few_in_a_commit_until_the_floor_stays(node: Node) -> None:
    machines = [f"m{n}" for n in range(3 * owner_log.PURGE_MOST)]

    def all_come(tx: Tx) -> None:
        tx.record("leases.taken", "all", cause="test")
        for machine in machines:
            tx.put(LeaseRow(machine=machine, nonce="n", owner="o", description="", expires_at_ms=0))

    await node.do(all_come)
    for machine in machines:
        await node.free(machine)
        node.now_ms += 20  # within the budget
    floors, left = [0], [len(machines)]
    while True:
        origin = await node.do(lambda tx: node.log.purge(tx, "region", 0, kept=10))
        if origin.floor == floors[-1]:
            break
        floors.append(origin.floor)
        left.append(len(tombstones(node)))
    assert left[-1] == 10
    assert [before - after for before, after in pairwise(left)][:-1] == [owner_log.PURGE_MOST] * (len(left) - 2)


async def test_who_was_away_for_more_tombstones_than_are_kept_is_equal_afterwards(node: Node, tmp_path: Path) -> None:
    """One that lacks fewer takes what it lacks; one that lacks more takes a snapshot, also from another replica, and
    has none of the rows whose tombstones it never saw."""
    log, kept = LogId("me", "region"), 8
    near, away, other = (Replica.open(tmp_path / f"{name}.db", node.host) for name in ("near", "away", "other"))
    await come_and_go(node, range(4))
    await node.take("gone")
    await node.take("stays")
    for replica in (near, away):
        replica.merge([node.since("region", replica.position(log))])
    other_at = away.position(log)
    await node.free("gone")
    await come_and_go(node, range(10, 14))
    near.merge([node.since("region", near.position(log))])
    for n in range(20, 60):
        await come_and_go(node, [n])
        await node.do(lambda tx: node.log.purge(tx, "region", 0, kept=kept))
        lacked = node.since("region", near.position(log))
        assert not lacked.snapshot
        near.merge([lacked])
    given = near.answer(log, other_at)
    assert given
    assert given.snapshot
    assert len(given.rows) <= 1 + kept * 5 // 4
    assert [row.key for row in near.log_rows(log) if row.values is not None] == ["stays"]
    for replica in (away, other):
        assert replica.merge([given]).merged == [log]
        assert replica.log_rows(log) == near.log_rows(log)
        assert replica.digest("region") == near.digest("region")
    for replica in (near, away, other):
        replica.close()


async def test_a_row_that_is_put_is_a_version_of_its_own_and_stays(node: Node) -> None:
    def change(tx: Tx) -> None:
        tx.record("lease.taken", "m1", cause="test")
        tx.put(LeaseRow(machine="m1", nonce="n", owner="o", description="", expires_at_ms=0))
        node.outbox.put(tx, "global", Change("names", "k", {"to": "a"}))

    await node.do(change)
    await node.do(node.outbox.refresh)
    assert {(version.tier, *(change.table for change in version.changes)) for version in node.told} == {
        ("region", "leases"),
        ("global", "names"),
    }
    assert published(node.store.read, "global", "names") == ["k"]


async def test_a_refresh_publishes_what_differs_and_nothing_else(node: Node) -> None:
    node.store.on_change.clear()  # as it was before there was a catalog
    await node.take("m1")
    await node.take("m2")
    node.store.on_change[:] = [node.outbox.on_change]
    await node.take("m3")
    await node.do(lambda tx: put_name(node, tx))
    node.store.on_change.clear()
    await node.free("m3")
    node.store.on_change[:] = [node.outbox.on_change]
    await node.do(node.outbox.refresh)
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    assert published(node.store.read, "region", "leases") == ["m1", "m2"]
    assert published(node.store.read, "global", "names") == ["k"]
    head = node.store.read.get(LogHeadRow, "region")
    await node.do(node.outbox.refresh)
    assert node.store.read.get(LogHeadRow, "region") == head


async def test_a_start_compares_all_rows_unless_the_end_before_it_left_nothing_waiting(tmp_path: Path) -> None:
    def delete(tx: Tx) -> None:
        tx.record("deleted", "behind", cause="test")
        tx.delete(TallyRow, "behind")

    async def compares(node: Node, projections_id: str) -> bool:
        """Whether a start finds a row that was written behind the outbox's back."""
        node.store.on_change.clear()
        await node.count("behind", 1)
        node.publish({LeaseRow: lease, TallyRow: tally}, projections_id=projections_id)
        await node.do(node.outbox.open)
        await node.do(node.outbox.catch_up)
        found = "behind" in node.outbox.waiting
        node.now_ms += COALESCE_MS
        await node.do(node.outbox.flush)
        await node.do(delete)
        node.now_ms += COALESCE_MS
        await node.do(node.outbox.flush)
        return found

    node = Node(tmp_path / "worker.db")
    assert await compares(node, "first"), "its first start"
    assert await compares(node, "first"), "it was killed"
    await node.do(node.outbox.close)
    assert not await compares(node, "first")
    await node.do(node.outbox.close)
    assert await compares(node, "second"), "another program"
    await node.count("waits", 1)
    await node.do(node.outbox.close)
    assert await compares(node, "second"), "what waited is lost"
    await node.do(node.outbox.close)
    await node.count("late", 1)
    assert await compares(node, "second"), "something changed after the end"
    await node.do(node.outbox.close)
    assert await compares(node, ""), "projections without a name"
    await node.store.close()


async def test_a_row_that_nobody_waits_for_is_not_looked_at_before_its_time_has_come(node: Node) -> None:
    looked: list[int] = []

    def look(reads: Reads, key: str, row: TallyRow | None) -> Iterable[Projected]:
        looked.append(row.machines if row else 0)
        return tally(reads, key, row)

    node.publish({TallyRow: look}, projections_id="a", unhurried=(TallyRow,))
    for n in range(50):
        await node.count("web", n)
    assert (looked, node.told, node.due) == ([], [], [COALESCE_MS])
    await node.do(node.outbox.flush)
    assert node.told == []
    node.now_ms += COALESCE_MS
    await asyncio.gather(node.count("web", 50), node.do(node.outbox.flush), node.count("web", 51))
    assert [version.changes for version in node.told] == [(Change("tallies", "web", {"machines": 50}),)]
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    assert [version.changes[0].values for version in node.told] == [{"machines": 50}, {"machines": 51}]
    looked.clear()
    await node.do(node.outbox.flush)
    assert looked == [], "nothing was changed"
    await node.count("web", 52)
    await node.count("web", 51)
    await node.do(node.outbox.close)
    node.publish({TallyRow: look}, projections_id="a", unhurried=(TallyRow,))
    looked.clear()
    await node.do(node.outbox.open)
    await node.do(node.outbox.catch_up)
    assert looked == [], "all was published at the end"


async def test_a_row_that_waits_since_a_start_waits_no_longer_for_being_changed_again(node: Node) -> None:
    """Once the outbox asked to be flushed at once, again and again, until the later change was due. Found by the
    simulator, seed 2."""
    node.publish({TallyRow: tally}, unhurried=(TallyRow,))
    await node.count("web", 1)
    node.store.on_change[:] = [node.outbox.on_change]
    await node.do(node.outbox.refresh)
    node.now_ms += COALESCE_MS - 1
    await node.count("web", 2)
    node.now_ms += 1
    node.due.clear()
    await node.do(node.outbox.flush)
    assert [version.changes[0].values for version in node.told] == [{"machines": 2}]
    await node.do(node.outbox.flush)
    node.due.clear()
    await node.do(node.outbox.flush)
    assert (node.outbox.waiting, node.due) == ([], [])


async def test_a_row_that_nobody_waits_for_and_that_shows_nothing_is_looked_at_once(node: Node) -> None:
    def shows_nothing(reads: Reads, key: str, row: TallyRow | None) -> Iterable[Projected]:
        return ()

    node.publish({TallyRow: shows_nothing}, unhurried=(TallyRow,))
    await node.count("web", 1)
    assert node.due == [COALESCE_MS]
    node.now_ms += COALESCE_MS
    await node.do(node.outbox.flush)
    assert node.due == [COALESCE_MS], "nothing waits any more"


async def test_what_is_published_is_in_the_log_of_the_worker(node: Node) -> None:
    await node.take("m1")
    before = node.store.read.select(PublishedRow)
    await node.store.close()
    verify(node.path, rebuild=True)
    again = Node(node.path)
    assert again.store.read.select(PublishedRow) == before
    await again.store.close()


async def test_a_projection_that_fails_refuses_its_change_alone(tmp_path: Path) -> None:
    def broken(reads: Reads, key: str, row: LeaseRow | None) -> Iterable[Projected]:
        if key == "bad":
            raise Conflict("no such row")
        return lease(reads, key, row)

    node = Node(tmp_path / "worker.db")
    node.publish({LeaseRow: broken})
    await node.do(node.outbox.open)
    outcomes = await asyncio.gather(node.take("m1"), node.take("bad"), node.take("m2"), return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), Conflict, type(None)]
    assert [row.machine for row in node.store.read.select(LeaseRow, "true order by id")] == ["m1", "m2"]
    assert [version.number for version in node.told] == [1, 2]
    await node.store.close()
    assert verify(node.path).ok


async def test_a_row_published_twice_in_one_change_is_published_once(node: Node) -> None:
    def change(tx: Tx) -> None:
        tx.record("lease.taken", "m1", cause="test")
        tx.put(LeaseRow(machine="m1", nonce="first", owner="o", description="", expires_at_ms=0))
        tx.record("lease.taken", "m1", cause="test")
        tx.put(LeaseRow(machine="m1", nonce="last", owner="o", description="", expires_at_ms=0))

    await node.do(change)
    assert [version.changes for version in node.told] == [(Change("leases", "m1", {"nonce": "last"}),)]

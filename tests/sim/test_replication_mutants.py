"""The simulation of replication has teeth: with one rule broken, some seed of a few dozen finds it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.kit.tiers import full
from tests.sim.replication.node import Kinds
from tests.sim.replication.runs import campaign, run

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.outbox import Outbox, Projected, RowId
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.catalog.tables.ingest import Batch
from hawker.catalog.tables.layout import Layout
from hawker.core import hlc, ownerlog
from hawker.core.ownerlog import Fit, Verdict
from hawker.model.catalog import Change, LogId, Origin, Position, Tier, Values, Version
from hawker.model.rows import LogHeadRow, PublishedRow, published_key
from hawker.store.tx import Tx

SEEDS_MOST = 40


class OutOfOrder(Replica):
    """What comes too early is applied at once."""

    @staticmethod
    def judge(at: Position, version: Version) -> Verdict:
        verdict = ownerlog.judge(at, version)
        return "next" if verdict == "hole" else verdict


class NoFloor(Replica):
    """Who stands below the floor gets a range, without the tombstones that are gone."""

    @staticmethod
    def fits(at: Position, origin: Origin) -> Fit:
        return ownerlog.fits(at, replace(origin, floor=0))


class NoEpoch(Replica):
    """Numbers alone count."""

    @staticmethod
    def judge(at: Position, version: Version) -> Verdict:
        return ownerlog.judge(Position(version.epoch, at.head), version) if at.epoch else "other_epoch"

    @staticmethod
    def fits(at: Position, origin: Origin) -> Fit:
        return ownerlog.fits(Position(origin.epoch, at.head), origin) if at.epoch else "snapshot"


class NoLineage(Replica):
    """Each restart of an owner costs everybody a snapshot."""

    @staticmethod
    def fits(at: Position, origin: Origin) -> Fit:
        return ownerlog.fits(at, replace(origin, lineage=()))


class TrustedLineage(Replica):
    """Who was in an epoch of the lineage holds a prefix, however far it went there."""

    @staticmethod
    def fits(at: Position, origin: Origin) -> Fit:
        lineage = tuple(Position(epoch, 1 << 60) for epoch, _ in origin.lineage)
        return ownerlog.fits(at, replace(origin, lineage=lineage))


class AddingBatch(Batch):
    def clear(self, log: LogId) -> None:
        return None


class SnapshotAdds(Replica):
    """A snapshot is put on top of what is there."""

    batch_of = AddingBatch


class SilentPurge(OwnerLog):
    """Tombstones go, and the floor stays."""

    def purge(self, tx: Tx, tier: Tier, before_ms: int, kept: int = 0) -> Origin:
        old = tx.select(PublishedRow, "tier = ? and gone and at_ms < ?", (tier, before_ms))
        if old:
            tx.record("catalog.purged", self.owner, cause="age")
            for row in old:
                tx.delete(PublishedRow, row.key)
        return self.origin(tx, tier)


class FloorNotStored(Replica):
    """The floor is forgotten when the replica is opened again."""

    @staticmethod
    def log_row(origin: Origin) -> tuple[Any, ...]:
        return Replica.log_row(replace(origin, floor=0))


class KeptTombstones(Batch):
    def purge(self, log: LogId, floor: int) -> None:
        return None


class FloorNotFollowed(Replica):
    """Tombstones are kept for ever."""

    batch_of = KeptTombstones


class StoppedByPoison(Replica):
    """A version with a row that cannot be taken is not taken."""

    def receive(self, versions: Sequence[Version]) -> Any:
        good = [v for v in versions if not any(c.values and c.values.get("color") == 3 for c in v.changes)]
        return super().receive(good)

    def merge(self, ranges: Sequence[Any]) -> Any:
        return super().merge([r for r in ranges if not any(c.values and c.values.get("color") == 3 for c in r.rows)])


class DroppingBatch(Batch):
    def _put_aside(self, *args: Any, **more: Any) -> None:
        return None


class PoisonDropped(Replica):
    """A row that cannot be taken, or is of an unknown table, is forgotten."""

    batch_of = DroppingBatch


class EchoingOutbox(Outbox):
    """What is published already is published again."""

    def _publish(self, tx: Tx, wanted: Mapping[RowId, Iterable[Projected]], gone: Collection[Projected] = ()) -> None:
        super()._publish(tx, wanted, gone)
        for tier, change, _ in (each for projected in wanted.values() for each in projected):
            there = tx.get(PublishedRow, published_key(tier, change.table, change.key))
            if there and there.values:
                tx.record("catalog.published", self.log.owner, cause="change")
                self.log.append(tx, tier, [Change(change.table, change.key, there.values)])


class ForgetfulLayout(Layout):
    def extra(self, values: Values) -> str | None:
        return None


class ColumnsDropped(Replica):
    """Columns that this version does not know are not passed on."""

    layout_of = ForgetfulLayout


class TrustingBatch(Batch):
    @staticmethod
    def must_wait(stamp: int, now_ms: int) -> bool:
        return False


class NoGuard(Replica):
    """Every stamp is taken."""

    batch_of = TrustingBatch


class Arrival(Layout):
    def newest(self) -> str:
        return super().newest().replace("coalesce(o.stamp, 0)", "1").replace("m.stamp", "1")


class MergedByOwner(Replica):
    """Of merged rows the greatest owner's counts, whatever its stamp."""

    layout_of = Arrival


class StealingBatch(Batch):
    def add(self, owner: str, tier: Tier, number: int, table: str, key: str, values: Values | None) -> None:
        if table == "names":
            self._db.execute("delete from names_of where id = ?", (key,))
        super().add(owner, tier, number, table, key, values)


class MergedByArrival(Replica):
    """Of merged rows the one that came last takes the place of the others."""

    batch_of = StealingBatch


class SameEpoch(OwnerLog):
    """A database goes on in the epoch in which it was closed."""

    def _begin(self, tx: Tx, tier: Tier, above: int) -> Origin:
        head = tx.get(LogHeadRow, tier)
        return self.origin(tx, tier) if head else super()._begin(tx, tier, above)


class NeverRaised(OwnerLog):
    """Who is ahead of its owner is not believed."""

    def open(self, tx: Tx, above: Mapping[Tier, int] | None = None) -> list[Origin]:
        return super().open(tx)

    def raise_epoch(self, tx: Tx, tier: Tier, above: int) -> Origin:
        return self.origin(tx, tier)


def clock_only(last: int, now_ms: int) -> int:
    """A stamp is the time, whatever was read from others."""
    return hlc.stamp(now_ms)


class NeverDrained(Replica):
    """What waits for a hole to be filled is not looked at again."""

    def _drain(self, *args: Any) -> None:
        return None


MUTANTS = (
    Kinds(replica=OutOfOrder),
    Kinds(replica=NoFloor),
    Kinds(replica=NoEpoch),
    Kinds(replica=NoLineage),
    Kinds(replica=TrustedLineage),
    Kinds(replica=SnapshotAdds),
    Kinds(log=SilentPurge),
    Kinds(replica=FloorNotStored),
    Kinds(replica=FloorNotFollowed),
    Kinds(replica=StoppedByPoison),
    Kinds(replica=PoisonDropped),
    Kinds(outbox=EchoingOutbox),
    Kinds(replica=ColumnsDropped),
    Kinds(replica=NoGuard),
    Kinds(replica=MergedByOwner),
    Kinds(replica=MergedByArrival),
    Kinds(log=SameEpoch),
    Kinds(log=NeverRaised),
    Kinds(tick=clock_only),
)


def changed(kinds: Kinds) -> str:
    """The name of the mutant among them."""
    mine, usual = kinds._asdict(), Kinds()._asdict()
    return next(str(each.__name__) for field, each in mine.items() if each is not usual[field])


BY_NAME = {changed(kinds): kinds for kinds in MUTANTS}
NAMES = list(BY_NAME)


@pytest.mark.parametrize("mutant", [*NAMES[:2], *full(*NAMES[2:])])
def test_a_node_with_one_rule_broken_is_found(mutant: str) -> None:
    assert any(run(seed, BY_NAME[mutant]).wrong for seed in range(SEEDS_MOST))


@pytest.mark.full
def test_a_rule_that_only_spares_work_is_missed_as_a_path_never_taken() -> None:
    table = campaign(range(6), Kinds(replica=NeverDrained))
    assert "versions that waited were applied" in table.never
    assert "versions that waited were applied" not in campaign(range(6)).never

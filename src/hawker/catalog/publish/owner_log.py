"""The numbered log of what this worker publishes: the newest version of each key, tombstones included.

The published rows are the log. Each version has the next number, and `since` gives what lies above a position. That is
all that any engine of the catalog needs: it keeps the position up to which it has taken the log beside what it took,
and asks from there.

A position is an epoch and a number. Numbers go on across epochs; each opening of the database begins a new epoch
(`core.ownerlog.next_epoch`). So a database that was brought back from a backup never gives a number that an engine has
seen with other rows: the engine's position then is of an epoch that this log does not remember, and it gets a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from hawker.core import ownerlog
from hawker.host import Host
from hawker.model.catalog import RAISED_FLOOR, TIERS, Change, Numbered, Origin, Position, Range, Tier, Version
from hawker.model.rows import LogHeadRow, PublishedRow
from hawker.store.tx import Reads, Tx

TOMBSTONES_KEPT = 5000
"""The newest tombstones of each tier that are kept. A reader that lacks more of them than that stands below the floor
and takes a snapshot, which has hardly more rows than what the reader lacks."""
PURGE_MOST = 256
"""One commit drops at most so many tombstones, and the rest of the last one's version."""
_NUMBER_MOST = 1 << 62


class OwnerLog:
    """`owner` is this node's name. Each of `on_version` is called after the commit of a version, in the order of their
    numbers."""

    def __init__(self, host: Host, owner: str) -> None:
        self.owner = owner
        self.on_version: list[Callable[[Version], None]] = []
        self._host = host

    def open(self, tx: Tx, above: Mapping[Tier, int] | None = None) -> list[Origin]:
        """Begin a new epoch of each tier. `above` are the newest epochs of this owner that anybody has seen."""
        return [self._begin(tx, tier, (above or {}).get(tier, 0)) for tier in TIERS]

    def raise_epoch(self, tx: Tx, tier: Tier, above: int) -> Origin:
        """Begin an epoch above that of somebody who holds more of this log than this database does: the database came
        back from the past. What it publishes takes the place of what they hold."""
        if self.head(tx, tier).epoch > above:
            return self.origin(tx, tier)
        tx.record("catalog.epoch_raised", self.owner, cause="a replica was ahead", data={"tier": tier, "above": above})
        return self._begin(tx, tier, above)

    def _begin(self, tx: Tx, tier: Tier, above: int) -> Origin:
        head = tx.get(LogHeadRow, tier) or LogHeadRow(tier=tier, epoch=0, head=0)
        draw = self._host.rng.getrandbits(ownerlog.EPOCH_BITS)
        epoch = ownerlog.next_epoch(head.epoch, above, tx.now_ms, draw)
        lineage = ownerlog.lineage_after(head.lineage, Position(head.epoch, head.head))
        tx.put(replace(head, epoch=epoch, lineage=lineage, projections=""))
        return self.origin(tx, tier)

    def head(self, reads: Reads, tier: Tier) -> LogHeadRow:
        head = reads.get(LogHeadRow, tier)
        if head is None:
            raise AssertionError(f"{self.owner}: the {tier} log was not opened")
        return head

    def origin(self, reads: Reads, tier: Tier) -> Origin:
        head = self.head(reads, tier)
        return Origin(self.owner, tier, head.epoch, head.head, head.floor, head.lineage)

    def since(self, reads: Reads, tier: Tier, at: Position) -> Range:
        """What brings a reader from `at` to the head of this log. A reader that is ahead gets a snapshot, which it
        takes once the epoch was raised above its own."""
        origin = self.origin(reads, tier)
        snapshot = ownerlog.fits(at, origin) in ("snapshot", "ahead")
        after = 0 if snapshot else at.head
        rows = reads.select(PublishedRow, "tier = ? and number > ? order by number, id", (tier, after))
        return Range(origin, after, tuple(Numbered(r.number, r.of, r.id, r.values) for r in rows), snapshot)

    def append(self, tx: Tx, tier: Tier, changes: Sequence[Change], *, merged: bool = False) -> None:
        """Publish one version. `merged` rows stay published although no row of the worker's shows them."""
        head = self.head(tx, tier)
        for each in changes:
            values, number = each.values, head.head + 1
            tx.put(
                PublishedRow(
                    tier=tier, of=each.table, id=each.key, number=number, values=values, at_ms=tx.now_ms, merged=merged
                )
            )
        self._append(tx, head, tuple(changes))

    def _append(self, tx: Tx, head: LogHeadRow, changes: tuple[Change, ...]) -> None:
        tx.put(replace(head, head=head.head + 1))
        version = Version(self.owner, head.tier, head.epoch, head.head + 1, changes, head.floor)
        tx.after_commit(lambda: self.tell(version))

    def tell(self, version: Version) -> None:
        for told in self.on_version:
            told(version)

    def purge(self, tx: Tx, tier: Tier, before_ms: int, kept: int = TOMBSTONES_KEPT) -> Origin:
        """Drop the tombstones older than `before_ms`, and once there are a quarter more than `kept` also all but the
        newest, and raise the floor over them, in a version by which all replicas learn it. One call drops a few of the
        oldest: the floor that it returns tells whether there were any. It writes nothing when there is none."""
        gone = "from published where tier = ? and gone"
        [[young]] = tx.query(f"select min(number) {gone} and at_ms >= ?", (tier, before_ms))
        through = young - 1 if young is not None else _NUMBER_MOST
        newest_first = f"select number {gone} order by number desc limit 1 offset ?"
        if tx.query(newest_first, (tier, kept + kept // 4)):
            [[beyond]] = tx.query(newest_first, (tier, kept))
            through = max(through, beyond)
        few = tx.query(f"select number {gone} order by number limit 1 offset ?", (tier, PURGE_MOST - 1))
        through = min(through, *(number for (number,) in few), _NUMBER_MOST)
        old = tx.select(PublishedRow, "tier = ? and gone and number <= ? order by number", (tier, through))
        if old:
            tx.record("catalog.purged", self.owner, cause="local rule: tombstones are kept for a time, and so many")
            for row in old:
                tx.delete(PublishedRow, row.key)
            self._append(tx, replace(self.head(tx, tier), floor=old[-1].number), (RAISED_FLOOR,))
        return self.origin(tx, tier)

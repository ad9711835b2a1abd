"""What this node publishes: its own log of each tier, written in the commit of the change that it shows.

`on_change` is the store's hook. It turns the rows that a change wrote into rows of the catalog (projections), drops
those that are published like that already, and writes the rest as one numbered version, in the same transaction: the
catalog never shows what is not durable, and misses nothing that is. The published rows are the log: the newest version
of each key, tombstones included, is all that anybody is ever sent (`since`).

A change that readers wait for goes out with its commit (urgent). Any other waits `COALESCE_MS` for more of the same
row, and whatever is over the node's budget waits for that: call `flush` in a change of its own when `on_due` says so.
What is over budget goes out together, many rows in one version, and what comes later waits behind it: a node that
changes much is told of in few versions, each a moment late, not in many, some of them seconds late. What waits is kept
in memory alone, so it costs no writes: a node that is killed finds it again at its next start, where `refresh` compares
what should be published with what is. One that ends in order says whether anything waited. Rows that nobody waits for
and that change all the time are not even looked at before their time has come (`unhurried`).

Numbers go on across epochs; each opening of the database begins a new epoch (`core.ownerlog.next_epoch`), so a database
brought back from a backup never gives a number that others have seen with other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.core import hlc, ownerlog
from hawker.core.ownerlog import Budget
from hawker.host import Host
from hawker.model.catalog import RAISED_FLOOR, TIERS, Change, Numbered, Origin, Position, Range, Tier, Values, Version
from hawker.model.rows import DueRow, LogHeadRow, PublishedRow, Row, published_key
from hawker.store.tx import Known, Reads, Tx

Projected = tuple[Tier, Change, bool]
"""A row of the catalog, its tier, and whether readers wait for it."""
Projection = Callable[[Reads, str, Any], Iterable[Projected]]
"""(reads, key, row or None): what a changed row of the worker's looks like in the catalog."""

FLUSH_MOST = 256
"""Rows in one version made of what waited."""
TOMBSTONES_KEPT = 5000
"""Of each tier, the newest. Who lacks more of them than are kept stands below the floor and takes a snapshot, which has
hardly more rows than what it lacks."""
PURGE_MOST = 256
"""Tombstones dropped in one commit, and the rest of the last one's version."""
_NUMBER_MOST = 1 << 62

_encode = msgspec.msgpack.Encoder().encode

Source = tuple[type[Row], str]
"""The worker's row that a row of the catalog is made of: its type and key."""


class _Waiting(msgspec.Struct, frozen=True):
    """A row of the catalog that waits to be published, since `since_ms`: for others like it, or for budget."""

    tier: Tier
    change: Change
    source: Source | None  # None: it is of no row any more
    since_ms: int


def published(reads: Reads, tier: Tier, table: str, prefix: str = "") -> list[str]:
    """The keys beginning with `prefix` that are published and not tombstones. For projections of one row to many."""
    first = published_key(tier, table, prefix)
    found = reads.query("select id from published where id >= ? and id < ? and not gone", (first, first + "\U0010ffff"))
    return [key.split("/", 2)[2] for (key,) in found]


class Outbox:
    """`owner` is this node's name. `on_published` is called after the commit of each version, in the order of their
    numbers; `on_due` when a commit left rows that wait, with the ms until the first of them may go.

    `newest_stamp` gives the greatest stamp that this node has read from others: a merged row written here wins over
    whatever was known here before.
    """

    def __init__(
        self,
        host: Host,
        owner: str,
        projections: Mapping[type[Row], Projection],
        budget: Budget | None = None,
        *,
        projections_id: str = "",
        always: Collection[type[Row]] = (),
        unhurried: Collection[type[Row]] = (),
    ) -> None:
        self.owner = owner
        self._projections_id = projections_id
        self._always = always
        self._unhurried = frozenset(unhurried)
        self._left_by = ""  # whose `close` found nothing waiting, before this opening
        self._closed = False
        self.on_published: Callable[[Version], None] | None = None
        self.on_due: Callable[[int], None] | None = None
        self.newest_stamp: Callable[[], int] = lambda: 0
        self._host = host
        self._projections = projections
        self._budget = budget or Budget()
        self._bucket = ownerlog.full(self._budget, host.now_ms())
        self._staged: dict[tuple[Tier, str, str], Values] = {}  # merged rows written by the change in progress
        self._staged_by: Tx | None = None
        self._short = False  # urgent changes wait for budget: those that come wait, too
        self._waiting: dict[str, _Waiting] = {}  # of changes that are committed; at most the rows of the catalog
        self._unseen: dict[Source, int] = {}  # unhurried rows that were changed, and since when

    @property
    def waiting(self) -> list[str]:
        """The keys of what waits to be published, but for rows that were not looked at yet."""
        return sorted(self._waiting)

    # --- the log ---

    def open(self, tx: Tx, above: Mapping[Tier, int] | None = None) -> list[Origin]:
        """Begin a new epoch of each tier. `above`: epochs of this node's that its own replica, or anybody, has seen."""
        tx.record("catalog.opened", self.owner, cause="start")
        for row in tx.select(DueRow):
            tx.delete(DueRow, row.key)  # an older Hawker kept there what waited; `refresh` finds it
        region = tx.get(LogHeadRow, "region")
        self._left_by = region.projections if region else ""
        return [self._begin(tx, tier, (above or {}).get(tier, 0)) for tier in TIERS]

    def raise_epoch(self, tx: Tx, tier: Tier, above: int) -> Origin:
        """Begin an epoch above that of somebody who holds more of this node's log than it has itself: it came back from
        the past. What is published counts again, in the place of what they hold."""
        if self._head(tx, tier).epoch > above:
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

    def origin(self, reads: Reads, tier: Tier) -> Origin:
        head = self._head(reads, tier)
        return Origin(self.owner, tier, head.epoch, head.head, head.floor, head.lineage)

    def since(self, reads: Reads, tier: Tier, at: Position) -> Range:
        """What brings a replica from `at` to the head of this log. One that is ahead gets a snapshot, which it takes
        once the epoch was raised above its own."""
        origin = self.origin(reads, tier)
        snapshot = ownerlog.fits(at, origin) in ("snapshot", "ahead")
        after = 0 if snapshot else at.head
        rows = reads.select(PublishedRow, "tier = ? and number > ? order by number, id", (tier, after))
        return Range(origin, after, tuple(Numbered(r.number, r.of, r.id, r.values) for r in rows), snapshot)

    def purge(self, tx: Tx, tier: Tier, before_ms: int, kept: int = TOMBSTONES_KEPT) -> Origin:
        """Drop the tombstones older than `before_ms`, and once there are a quarter more than `kept` those but the
        newest, and raise the floor over them, in a version by which all replicas learn it. Of many, the oldest few:
        the floor that it gives tells whether there were any. Nothing is written when there is none."""
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
            head = self._head(tx, tier)
            self._append(tx, replace(head, floor=old[-1].number), (RAISED_FLOOR,))
        return self.origin(tx, tier)

    # --- what is published ---

    def on_change(self, tx: Tx, changed: Known) -> None:
        """The store's hook: publish what a change made of the rows it wrote."""
        wanted: list[tuple[Projected, Source | None]] = []
        for (kind, key), row in changed.items():
            if kind in self._unhurried:
                tx.after_commit(partial(self._look_later, (kind, key), tx.now_ms))
                continue
            projection = self._projections.get(kind)
            if projection is not None:
                wanted += [(projected, (kind, key)) for projected in projection(tx, key, row)]
        merged = self._take_staged(tx)
        if wanted or merged:
            self._publish(tx, wanted, merged)

    def catch_up(self, tx: Tx) -> None:
        """After `open`: `refresh`, unless these very projections were closed in order with nothing waiting, so that all
        is published. To compare 10,000 machines takes longer than the rest of a start."""
        if self._projections_id and self._left_by == self._projections_id:
            few = ((kind, row) for kind in self._always for row in tx.select(kind))
            self._publish(
                tx,
                [(each, (kind, row.key)) for kind, row in few for each in self._projections[kind](tx, row.key, row)],
                {},
            )
        else:
            self.refresh(tx)

    def close(self, tx: Tx) -> None:
        """Nothing changes any more: say whether all is published, for `catch_up` at the next start."""
        if self._projections_id and not self._as_they_are(tx, self._all_waiting(tx)):
            tx.record("catalog.closed", self.owner, cause="stop")
            tx.put(replace(self._head(tx, "region"), projections=self._projections_id))
            self._closed = True

    def refresh(self, tx: Tx) -> None:
        """Compare everything that is projected with everything that is published, and publish the difference: at the
        start of a database that was never published, or whose projections were different then."""
        wanted: dict[str, tuple[Projected, Source | None]] = {}
        for kind, projection in self._projections.items():
            for row in tx.select(kind, "true order by id"):
                for each in projection(tx, row.key, row):
                    wanted[published_key(each[0], each[1].table, each[1].key)] = each, (kind, row.key)
        for old in tx.select(PublishedRow, "not gone order by id"):
            if old.key not in wanted and not old.merged:
                wanted[old.key] = (old.tier, Change(old.of, old.id, None), False), None
        self._publish(tx, list(wanted.values()), {})

    def put_merged(self, tx: Tx, table: str, key: str, values: Values, *, tier: Tier = "global") -> None:
        """Write a row of a table that many nodes write: the newest stamp wins. Its version is that of the change."""
        head = self._head(tx, tier)
        if self._staged_by is not tx:
            self._staged, self._staged_by = {}, tx
        last = max([head.stamp, self.newest_stamp(), *(row["stamp"] for row in self._staged.values())])
        self._staged[tier, table, key] = {**values, "stamp": hlc.tick(last, tx.now_ms)}
        tx.after_commit(lambda: self._check_taken(tx))

    def delete_merged(self, tx: Tx, table: str, key: str, values: Values, *, tier: Tier = "global") -> None:
        """Write that a merged row is no more. A tombstone would only drop what this node wrote; this wins over what
        others wrote."""
        self.put_merged(tx, table, key, {**values, "deleted": True}, tier=tier)

    def keep_merged(self, tx: Tx, table: str, key: str, values: Values, *, tier: Tier = "global") -> None:
        """Publish a merged row that somebody else wrote, stamp and all, so that it outlives the disk of its writer.
        Nothing changes for readers; one that is older than what this node publishes already is dropped."""
        there = tx.get(PublishedRow, published_key(tier, table, key))
        if there and there.values and there.values["stamp"] >= values["stamp"]:
            return
        if self._staged_by is not tx:
            self._staged, self._staged_by = {}, tx
        staged = self._staged.get((tier, table, key))
        if staged is None or staged["stamp"] < values["stamp"]:
            self._staged[tier, table, key] = dict(values)
            tx.after_commit(lambda: self._check_taken(tx))

    def flush(self, tx: Tx) -> None:
        """Publish what has waited long enough, within the budget: one version per tier. They count as one: a change
        often has rows of both, which are of no use in halves, and they are told in one packet and asked for together.
        To be submitted to the store as a change of its own."""
        left, may, cost = False, None, 1
        waiting = self._all_waiting(tx)
        for tier in TIERS:
            waits = sorted((w.since_ms, key) for key, w in waiting.items() if w.tier == tier)[:FLUSH_MOST]
            due = [key for since_ms, key in waits if ownerlog.is_due(since_ms, tx.now_ms)]
            if not due:
                continue
            may = self._affords(tx.now_ms) if may is None else may
            if not may:
                left = True
                break
            left |= len(due) == FLUSH_MOST
            flushed = {key: waiting[key] for key in due}
            tx.after_commit(partial(self._flushed, flushed))
            if changes := self._as_they_are(tx, flushed):
                tx.record("catalog.published", self.owner, cause="due")
                self._write(tx, tier, changes, {}, cost)
                cost = 0
        self._short = left
        tx.after_commit(lambda: self._tell_due(tx.now_ms))

    def _as_they_are(self, tx: Tx, flushed: Mapping[str, _Waiting]) -> list[Change]:
        """What to publish of rows that waited. They are projected once more: a change before this one, in the same
        commit, may have changed them."""
        changes = []
        for key, waiting in flushed.items():
            values = waiting.change.values
            if waiting.source is not None:
                kind, row_key = waiting.source
                for tier, change, _ in self._projections[kind](tx, row_key, tx.get(kind, row_key)):
                    if published_key(tier, change.table, change.key) == key:
                        values = _without_none(change.values)
            there = tx.get(PublishedRow, key)
            if (there.values if there else None) != values:
                changes.append(replace(waiting.change, values=values))
        return changes

    def _flushed(self, flushed: Mapping[str, _Waiting]) -> None:
        for key, waiting in flushed.items():
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
            elif waiting.source:
                self._seen(waiting.source)

    def _seen(self, source: Source) -> None:
        self._unseen.pop(source, None)

    def _all_waiting(self, tx: Tx) -> dict[str, _Waiting]:
        waiting = dict(self._waiting)
        for (kind, row_key), since_ms in self._unseen.items():
            projected = list(self._projections[kind](tx, row_key, tx.get(kind, row_key)))
            if not projected:
                tx.after_commit(partial(self._seen, (kind, row_key)))
            for tier, change, _ in projected:
                key = published_key(tier, change.table, change.key)
                first_ms = min(since_ms, waiting[key].since_ms) if key in waiting else since_ms
                waiting[key] = _Waiting(tier, change, (kind, row_key), first_ms)
        return waiting

    def _look_later(self, source: Source, now_ms: int) -> None:
        if source not in self._unseen:
            self._unseen[source] = now_ms
            if self.on_due:
                self.on_due(ownerlog.COALESCE_MS)

    # --- helpers ---

    def _head(self, reads: Reads, tier: Tier) -> LogHeadRow:
        head = reads.get(LogHeadRow, tier)
        if head is None:
            raise AssertionError(f"{self.owner}: the {tier} log was not opened")
        return head

    def _take_staged(self, tx: Tx) -> dict[tuple[Tier, str, str], Values]:
        if self._staged_by is not tx:
            return {}  # what a change staged that failed goes with it
        staged, self._staged, self._staged_by = self._staged, {}, None
        return staged

    def _check_taken(self, tx: Tx) -> None:
        if self._staged_by is tx:
            raise AssertionError("a merged row was not published: Store.on_change is not set")

    def _publish(
        self,
        tx: Tx,
        wanted: Sequence[tuple[Projected, Source | None]],
        merged: Mapping[tuple[Tier, str, str], Values],
    ) -> None:
        """Sort what changed into what goes out now and what waits. Opens a record when there is something to write."""
        now: dict[Tier, list[Change]] = {}
        wait: dict[str, _Waiting | None] = {}  # None: it need not wait any more
        may: bool | None = None  # asked for once something differs: most changes of the ledger publish nothing
        soon = False
        for (tier, change, urgent), source in _last(wanted):
            key = published_key(tier, change.table, change.key)
            there = tx.get(PublishedRow, key)
            values = _without_none(change.values)
            wait[key] = None
            if (there.values if there else None) == values:
                continue
            change = Change(change.table, change.key, values)
            may = not self._short and self._affords(tx.now_ms) if may is None else may
            if urgent and may:
                now.setdefault(tier, []).append(change)
            else:
                soon |= urgent
                since_ms = ownerlog.due_at_once(tx.now_ms) if urgent else tx.now_ms
                wait[key] = _Waiting(tier, change, source, since_ms)
        if wait:
            tx.after_commit(partial(self._wait, wait))
        if may is None and not merged:
            return
        if self._closed and any(wait.values()):
            self._closed = False
            tx.record("catalog.opened", self.owner, cause="a change after its end")
            tx.put(replace(self._head(tx, "region"), projections=""))
        if now or merged:
            tx.record("catalog.published", self.owner, cause="change")
        for tier in TIERS:
            stamped = {(table, key): values for (t, table, key), values in merged.items() if t == tier}
            if tier in now or stamped:
                self._write(tx, tier, now.get(tier, []), stamped)
        self._short |= soon
        if any(wait.values()):  # what waits for longer is due earlier, and was told of when it began to
            wait_ms = max(ownerlog.wait_ms(self._budget, self._bucket), 0 if soon else ownerlog.COALESCE_MS)
            tx.after_commit(lambda: self.on_due(wait_ms) if self.on_due else None)

    def _wait(self, wait: Mapping[str, _Waiting | None]) -> None:
        """After the commit: what its change left waiting, or took back."""
        for key, waiting in wait.items():
            before = self._waiting.pop(key, None)
            if waiting and before:
                waiting = replace(waiting, since_ms=min(waiting.since_ms, before.since_ms))
            if waiting:
                self._waiting[key] = waiting

    def _write(
        self, tx: Tx, tier: Tier, changes: list[Change], merged: Mapping[tuple[str, str], Values], cost: int = 1
    ) -> None:
        """One version, its rows and the head; `cost` is what it counts as in the budget."""
        head = self._head(tx, tier)
        number = head.head + 1
        for change in changes:
            tx.put(
                PublishedRow(
                    tier=tier, of=change.table, id=change.key, number=number, values=change.values, at_ms=tx.now_ms
                )
            )
        all_changes = list(changes)
        for (table, key), given in merged.items():
            values = _without_none(given) or {}
            all_changes.append(Change(table, key, values))
            head = replace(head, stamp=max(head.stamp, values["stamp"]))
            tx.put(
                PublishedRow(tier=tier, of=table, id=key, number=number, values=values, at_ms=tx.now_ms, merged=True)
            )
        self._bucket = ownerlog.spent(self._bucket, len(_encode(all_changes)), cost)
        self._append(tx, head, tuple(all_changes))

    def _append(self, tx: Tx, head: LogHeadRow, changes: tuple[Change, ...]) -> None:
        tx.put(replace(head, head=head.head + 1))
        version = Version(self.owner, head.tier, head.epoch, head.head + 1, changes, head.floor)
        tx.after_commit(lambda: self.on_published(version) if self.on_published else None)

    def _affords(self, now_ms: int) -> bool:
        self._bucket = ownerlog.refilled(self._budget, self._bucket, now_ms)
        return ownerlog.affords(self._bucket)

    def _tell_due(self, now_ms: int) -> None:
        """Tell when to flush next, if anything waits."""
        since_ms = [*(waiting.since_ms for waiting in self._waiting.values()), *self._unseen.values()]
        if not since_ms or self.on_due is None:
            return
        first = min(since_ms)
        wait_ms = max(ownerlog.wait_ms(self._budget, self._bucket), first + ownerlog.COALESCE_MS - now_ms, 0)
        self.on_due(min(wait_ms, max(ownerlog.COALESCE_MS, ownerlog.wait_ms(self._budget, self._bucket))))


def _last(wanted: Sequence[tuple[Projected, Source | None]]) -> list[tuple[Projected, Source | None]]:
    """Of several for one key the last, which is as the change leaves it; urgent when any was."""
    if len(wanted) < 2:
        return list(wanted)
    found: dict[str, tuple[Projected, Source | None]] = {}
    for (tier, change, urgent), source in wanted:
        key = published_key(tier, change.table, change.key)
        found[key] = (tier, change, urgent or (key in found and found[key][0][2])), source
    return list(found.values())


def _without_none(values: Values | None) -> Values | None:
    if values is None:
        return None
    return {name: value for name, value in values.items() if value is not None}

"""What a worker publishes: it compares its rows as the fleet sees them with what is published, in the change's commit.

`on_change` is the store's hook. It turns the rows that a change wrote into rows of the catalog (projections), drops
those that are published like that already, and appends the rest to the owner's log as one version, in the same
transaction: the catalog never shows what is not durable, and misses nothing that is.

A change that readers wait for goes out with its commit (urgent). Any other change waits `COALESCE_MS` for more changes
of the same row, and so does whatever exceeds the node's budget: call `flush` in a change of its own when `on_due` says
so. What exceeds the budget goes out together, many rows in one version, and later changes wait behind it: a node that
changes much publishes few versions, each a moment late, instead of many, some of them seconds late. The outbox keeps
what waits in memory alone, so it costs no writes: a node that was killed finds it again at its next start, where
`refresh` compares what should be published with what is. A node that ends in order writes down whether anything waited.
Projections of rows that change all the time and that nobody waits for run only when they are due (`unhurried`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.catalog.publish.owner_log import OwnerLog
from hawker.core import ownerlog
from hawker.core.ownerlog import Budget
from hawker.host import Host
from hawker.model.catalog import TIERS, Change, Origin, Tier, Values
from hawker.model.rows import DueRow, LogHeadRow, PublishedRow, Row, published_key
from hawker.store.tx import Known, Reads, Tx

Projected = tuple[Tier, Change, bool]
"""A row of the catalog, its tier, and whether readers wait for it."""
Projection = Callable[[Reads, str, Any], Iterable[Projected]]
"""(reads, key, row or None): what a changed row of the worker's looks like in the catalog."""
RowId = tuple[type[Row], str]
"""The worker's row that rows of the catalog are made of: its type and key."""

FLUSH_MOST = 256
"""Rows of the worker's that one flush publishes."""

_encode = msgspec.msgpack.Encoder().encode


def published(reads: Reads, tier: Tier, table: str, prefix: str = "") -> list[str]:
    """The keys beginning with `prefix` that are published and not tombstones. For projections of one row to many."""
    first = published_key(tier, table, prefix)
    found = reads.query("select id from published where id >= ? and id < ? and not gone", (first, first + "\U0010ffff"))
    return [key.split("/", 2)[2] for (key,) in found]


class Outbox:
    """Publishes rows into `log`. Each of `on_due` is called when a commit left rows that wait, with the ms until the
    first of them may go."""

    def __init__(
        self,
        host: Host,
        log: OwnerLog,
        projections: Mapping[type[Row], Projection],
        budget: Budget | None = None,
        *,
        projections_id: str = "",
        always: Collection[type[Row]] = (),
        unhurried: Collection[type[Row]] = (),
    ) -> None:
        self.log = log
        self.on_due: list[Callable[[int], None]] = []
        self._projections_id = projections_id
        self._always = always
        self._unhurried = frozenset(unhurried)
        self._left_by = ""  # whose `close` found nothing waiting, before this opening
        self._closed = False
        self._projections = projections
        self._budget = budget or Budget()
        self._bucket = ownerlog.full(self._budget, host.now_ms())
        self._short = False  # urgent changes wait for budget: those that come wait, too
        self._waiting: dict[RowId, int] = {}  # rows whose projections are to be published, and since when they wait

    @property
    def waiting(self) -> list[str]:
        """The keys of the worker's rows that wait to be published."""
        return sorted(key for _, key in self._waiting)

    def open(self, tx: Tx, above: Mapping[Tier, int] | None = None) -> list[Origin]:
        """Begin a new epoch of each tier's log. `above` are the newest epochs of this node that anybody has seen."""
        tx.record("catalog.opened", self.log.owner, cause="start")
        for row in tx.select(DueRow):
            tx.delete(DueRow, row.key)  # an older Hawker kept there what waited; `refresh` finds it
        region = tx.get(LogHeadRow, "region")
        self._left_by = region.projections if region else ""
        return self.log.open(tx, above)

    def catch_up(self, tx: Tx) -> None:
        """After `open`: `refresh`, unless these very projections were closed in order with nothing waiting, so that all
        is published. To compare 10,000 machines takes longer than the rest of a start."""
        if self._projections_id and self._left_by == self._projections_id:
            few = [(kind, row.key) for kind in self._always for row in tx.select(kind)]
            self._publish(tx, {row_id: self._project(tx, row_id) for row_id in few})
        else:
            self.refresh(tx)

    def refresh(self, tx: Tx) -> None:
        """Compare everything that is projected with everything that is published, and publish the difference: at the
        start of a database that was never published, or whose projections were different then."""
        wanted: dict[RowId, list[Projected]] = {}
        shown: set[str] = set()
        for kind, projection in self._projections.items():
            for row in tx.select(kind, "true order by id"):
                wanted[kind, row.key] = projected = list(projection(tx, row.key, row))
                shown.update(published_key(tier, change.table, change.key) for tier, change, _ in projected)
        old = (row for row in tx.select(PublishedRow, "not gone order by id") if not row.merged)
        gone = [(row.tier, Change(row.of, row.id, None), True) for row in old if row.key not in shown]
        self._publish(tx, wanted, gone)

    def close(self, tx: Tx) -> None:
        """Nothing changes any more: write down whether all is published, for `catch_up` at the next start."""
        left = any(self._differing(tx, self._project(tx, row_id)) for row_id in self._waiting)
        if self._projections_id and not left:
            tx.record("catalog.closed", self.log.owner, cause="stop")
            tx.put(replace(self.log.head(tx, "region"), projections=self._projections_id))
            self._closed = True

    def on_change(self, tx: Tx, changed: Known) -> None:
        """The store's hook: publish what a change made of the rows it wrote."""
        wanted: dict[RowId, list[Projected]] = {}
        for row_id, row in changed.items():
            kind, key = row_id
            if kind in self._unhurried:
                tx.after_commit(partial(self._look_later, row_id, tx.now_ms))
            elif projection := self._projections.get(kind):
                wanted[row_id] = list(projection(tx, key, row))
        if wanted:
            self._publish(tx, wanted)

    def put(self, tx: Tx, tier: Tier, change: Change) -> None:
        """Publish a row that no row of the worker's shows, as a version of its own. It stays until it is put again."""
        self._append(tx, tier, [change], merged=True)

    def flush(self, tx: Tx) -> None:
        """Publish what has waited long enough, within the budget: one version per tier. The two count as one: a change
        often has rows of both tiers, which are of no use in halves, and they travel in one packet and are fetched
        together. Submit it to the store as a change of its own."""
        waits = sorted((since_ms, kind.table, key, kind) for (kind, key), since_ms in self._waiting.items())
        due = [(kind, key) for since_ms, _, key, kind in waits if ownerlog.is_due(since_ms, tx.now_ms)][:FLUSH_MOST]
        self._short = bool(due) and not self._affords(tx.now_ms)
        if due and not self._short:
            self._short = len(due) == FLUSH_MOST
            found: dict[str, Projected] = {}
            for row_id in due:
                found |= self._differing(tx, self._project(tx, row_id))
            tx.after_commit(partial(self._wait, dict.fromkeys(due)))
            if found:
                tx.record("catalog.published", self.log.owner, cause="due")
            cost = 1
            for tier, changes in _by_tier(found.values()):
                self._append(tx, tier, changes, cost=cost)
                cost = 0
        tx.after_commit(lambda: self._tell_due(tx.now_ms))

    # --- helpers ---

    def _project(self, tx: Tx, row_id: RowId) -> list[Projected]:
        """As the row is now: a change before this one, in the same commit, may have changed it."""
        kind, key = row_id
        return list(self._projections[kind](tx, key, tx.get(kind, key)))

    def _differing(self, tx: Tx, projected: Iterable[Projected]) -> dict[str, Projected]:
        """Those that are not published like that already, by key. If several have one key, the last counts, because it
        is as the change leaves the row."""
        found = {}
        for tier, change, urgent in projected:
            key, values = published_key(tier, change.table, change.key), _without_none(change.values)
            there = tx.get(PublishedRow, key)
            if (there.values if there else None) != values:
                found[key] = tier, Change(change.table, change.key, values), urgent
        return found

    def _publish(self, tx: Tx, wanted: Mapping[RowId, Iterable[Projected]], gone: Collection[Projected] = ()) -> None:
        """Sort what changed into what goes out now and what waits. Opens a record when there is something to write.
        `gone` goes out in any case: no row of the worker's is left by which it could be found again."""
        now: dict[str, Projected] = {}
        wait: dict[RowId, int | None] = {}  # None: it need not wait any more
        may: bool | None = None  # asked for once something differs: most changes of the ledger publish nothing
        soon = False
        for row_id, projected in wanted.items():
            wait[row_id] = None
            for key, each in self._differing(tx, projected).items():
                may = not self._short and self._affords(tx.now_ms) if may is None else may
                urgent = each[2]
                if urgent and may:
                    now[key] = each
                else:
                    soon |= urgent
                    since_ms = ownerlog.due_at_once(tx.now_ms) if urgent else tx.now_ms
                    wait[row_id] = min(since_ms, wait[row_id] or since_ms)
        tx.after_commit(partial(self._wait, wait))
        if may is None and not gone:
            return
        waits = any(since_ms is not None for since_ms in wait.values())
        if self._closed and waits:
            self._closed = False
            tx.record("catalog.opened", self.log.owner, cause="a change after its end")
            tx.put(replace(self.log.head(tx, "region"), projections=""))
        if now or gone:
            tx.record("catalog.published", self.log.owner, cause="change")
        for tier, changes in _by_tier([*now.values(), *gone]):
            self._append(tx, tier, changes)
        self._short |= soon
        if waits:  # what waits for longer is due earlier, and was told of when it began to
            wait_ms = max(ownerlog.wait_ms(self._budget, self._bucket), 0 if soon else ownerlog.COALESCE_MS)
            tx.after_commit(lambda: self._due_in(wait_ms))

    def _wait(self, wait: Mapping[RowId, int | None]) -> None:
        """After the commit: what its change left waiting, or took back."""
        for row_id, since_ms in wait.items():
            before = self._waiting.pop(row_id, since_ms)
            if since_ms is not None:
                self._waiting[row_id] = since_ms if before is None else min(since_ms, before)

    def _look_later(self, row_id: RowId, now_ms: int) -> None:
        if row_id not in self._waiting:
            self._waiting[row_id] = now_ms
            self._due_in(ownerlog.COALESCE_MS)

    def _append(self, tx: Tx, tier: Tier, changes: list[Change], *, cost: int = 1, merged: bool = False) -> None:
        """One version; `cost` is what it counts as in the budget."""
        self._bucket = ownerlog.spent(self._bucket, len(_encode(changes)), cost)
        self.log.append(tx, tier, changes, merged=merged)

    def _affords(self, now_ms: int) -> bool:
        self._bucket = ownerlog.refilled(self._budget, self._bucket, now_ms)
        return ownerlog.affords(self._bucket)

    def _tell_due(self, now_ms: int) -> None:
        """Tell when to flush next, if anything waits."""
        if self._waiting:
            least_ms = ownerlog.wait_ms(self._budget, self._bucket)
            wait_ms = max(least_ms, min(self._waiting.values()) + ownerlog.COALESCE_MS - now_ms, 0)
            self._due_in(min(wait_ms, max(ownerlog.COALESCE_MS, least_ms)))

    def _due_in(self, ms: int) -> None:
        for told in self.on_due:
            told(ms)


def _by_tier(projected: Collection[Projected]) -> Iterator[tuple[Tier, list[Change]]]:
    for tier in TIERS:
        if changes := [change for each, change, _ in projected if each == tier]:
            yield tier, changes


def _without_none(values: Values | None) -> Values | None:
    if values is None:
        return None
    return {name: value for name, value in values.items() if value is not None}

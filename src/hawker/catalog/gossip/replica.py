"""What this node knows of everybody's log, as tables in one SQLite file, `catalog.db`.

`receive` takes versions as they are spread, `merge` takes ranges that were asked for; each call is one commit. One
owner's versions are applied in their order only (`core.ownerlog`), so the rows of an owner are always exactly what it
had committed at the position that `position` tells. `answer` serves other replicas from the same rows, whoever owns
them. Readers use SQL on the views (`catalog.tables.schema`), also from another process.

The file is written without waiting for the disk: a power cut may take the last commits back, each of them whole, and
what is missing then is fetched again. Damage is answered by starting empty (`catalog.tables.tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import msgspec
from msgspec.structs import replace

from hawker.catalog.tables.ingest import BULK_LEAST, Batch
from hawker.catalog.tables.schema import Table
from hawker.catalog.tables.tables import Tables
from hawker.core import ownerlog
from hawker.host import Host
from hawker.model.catalog import NOTHING, LogId, Origin, Position, Range, Tier, Version

BUFFERED_MOST = 8192
"""So many versions of all logs wait for holes to be filled. Further ones are dropped, and the range that is fetched
brings them."""
_NUMBER_MOST = 1 << 62
_OWNER_MOST = 256


class Outcome(msgspec.Struct, kw_only=True):
    """What became of versions or ranges.

    `applied`: versions that were new here, in the order they were applied, to be passed on. `merged`: logs that a range
    brought forward. `missing`: logs with a hole, to be asked for at whoever sent this. `behind`: those among them that
    were told of by their positions, since their rows are too many: they are not late, but wait to be asked for.
    `ahead`: logs of which we hold more than the sender does; if it is their owner it has come back from the past and
    must raise its epoch. `refused`: versions and ranges that make no sense.
    """

    applied: list[Version] = []
    merged: list[LogId] = []
    missing: list[LogId] = []
    behind: list[LogId] = []
    ahead: list[LogId] = []
    refused: int = 0
    put_aside: int = 0


class Replica(Tables):
    """Open it with `Replica.open`. The rules that it decides by are attributes of the class, so that a test can break
    one and see that it is needed."""

    judge = staticmethod(ownerlog.judge)
    fits = staticmethod(ownerlog.fits)

    def __init__(self, path: str, host: Host, vfs: str | None, tables: Sequence[Table]) -> None:
        self._reorder: dict[LogId, ownerlog.Reorder] = {}
        super().__init__(path, host, vfs, tables)

    # --- what is known ---

    def digest(self, tier: Tier) -> bytes:
        return ownerlog.digest({owner: origin.position for owner, origin in self.origins(tier).items()})

    def differing(self, tier: Tier, theirs: bytes) -> dict[str, Origin]:
        """Our logs in the buckets in which another replica's digest differs. It may know others in them, too:
        `ownerlog.differing` names the buckets."""
        origins = self.origins(tier)
        buckets = ownerlog.differing(self.digest(tier), theirs)
        return {owner: origins[owner] for owner in ownerlog.in_buckets(origins, buckets)}

    def answer(self, log: LogId, at: Position) -> Range | None:
        """What brings another replica from `at` to where this one stands. None when this one has nothing newer."""
        origin = self._origins.get(log)
        if origin is None:
            return None
        fit = self.fits(at, origin)
        if fit not in ("range", "snapshot"):
            return None
        after = at.head if fit == "range" else 0
        return Range(origin, after, tuple(self.log_rows(log, after)), fit == "snapshot")

    @property
    def waiting(self) -> int:
        """How many versions wait for a hole to be filled."""
        return sum(len(each) for each in self._reorder.values())

    # --- what is told ---

    def receive(self, versions: Sequence[Version]) -> Outcome:
        """Take versions as they are spread, in any order and as often as they come, in one commit.

        This node's own versions come from its own log alone. When others have versions that the own log does not have,
        the worker's database came back from the past (`OwnerLog.raise_epoch`); such versions must not be taken here,
        nor in `merge`.
        """
        sensible = [version for version in versions if _sensible(version)]
        outcome = Outcome(refused=len(versions) - len(sensible))
        new = [version for version in sensible if self.judge(self.position(version.log), version) != "old"]
        if not new:  # each version comes several times: the second time costs no transaction
            return outcome
        holes: dict[LogId, None] = {}
        behind: dict[LogId, Position] = {}  # logs whose position was told, without what is in them

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for version in new:
                log = version.log
                at = self._at(origins, log)
                match self.judge(at, version):
                    case "next" | "hole" if not version.changes:
                        behind[log] = version.position
                    case "next":
                        self._apply(batch, origins, version, outcome)
                        self._drain(batch, origins, log, outcome)
                    case "hole":
                        self._hold(version)
                        holes[log] = None
                    case "other_epoch" if version.epoch > max(at.epoch, self._forgotten.get(log, 0)):
                        if version.changes:
                            self._hold(version)
                            holes[log] = None
                        else:
                            behind[log] = version.position
                    case "other_epoch" if version.epoch < at.epoch:
                        outcome.ahead.append(log)

        self._commit(change, outcome)
        outcome.missing = [log for log in holes if len(self._reorder.get(log, ()))]
        outcome.behind = [log for log in behind if self.position(log) < behind[log]]
        outcome.missing += [log for log in outcome.behind if log not in outcome.missing]
        return outcome

    def merge(self, ranges: Sequence[Range]) -> Outcome:
        """Take ranges and snapshots, each whole or not at all, in one commit."""
        outcome = Outcome()

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for given in ranges:
                if not _sensible_range(given):
                    outcome.refused += 1
                elif given.origin.epoch > self._forgotten.get(given.origin.log, 0):
                    self._merge(batch, origins, given, outcome)

        with self.bulk() if sum(len(each.rows) for each in ranges) >= BULK_LEAST else nullcontext():
            self._commit(change, outcome)
        return outcome

    def gave_up(self, log: LogId, at: Position) -> bool:
        """Whether this part of a log is of a node that was forgotten."""
        epoch: int = self._forgotten.get(log, 0)
        return at.epoch <= epoch

    def forget(self, owner: str) -> None:
        """Drop all that is known of a node that an operator gave up. It may come back in a later epoch."""

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for log in [log for log in self._origins if log.owner == owner]:
                batch.clear(log)
                self._db.execute("insert or replace into _forgotten values (?,?,?)", (*log, self._origins[log].epoch))
                self._db.execute("delete from _log where owner = ? and tier = ?", log)

        self.write(change)
        self._load()
        for log in [log for log in self._reorder if log.owner == owner]:
            del self._reorder[log]

    def recheck(self) -> int:
        """Put rows where they belong whose time has come, or whose tables are known and shown now, and return how many.
        Drop versions that wait in vain. Call it every second or so."""
        now_ms = self._host.now_ms()
        for log in [log for log, held in self._reorder.items() if held.in_vain(now_ms)]:
            del self._reorder[log]
        return super().recheck()

    # --- helpers ---

    def _commit(self, change: Callable[[Batch, dict[LogId, Origin]], None], outcome: Outcome) -> None:
        batch = self.write(change)
        if batch is None:
            outcome.applied, outcome.merged = [], []
        else:
            outcome.put_aside = batch.put_aside

    def _undone(self) -> None:
        self._reorder.clear()

    def _at(self, origins: dict[LogId, Origin], log: LogId) -> Position:
        origin = origins.get(log) or self._origins.get(log)
        return origin.position if origin else NOTHING

    def _apply(self, batch: Batch, origins: dict[LogId, Origin], version: Version, outcome: Outcome) -> None:
        """Apply the version that follows what is here."""
        log = version.log
        origin = origins.get(log) or self._origins[log]
        for change in version.changes:
            batch.add(version.owner, version.tier, version.number, change.table, change.key, change.values)
        floor = max(origin.floor, min(version.floor, version.number))
        if floor > origin.floor:
            batch.purge(log, floor)
        origins[log] = replace(origin, head=version.number, floor=floor)
        outcome.applied.append(version)

    def _drain(self, batch: Batch, origins: dict[LogId, Origin], log: LogId, outcome: Outcome) -> None:
        """Apply the versions that waited for the position where the log stands now."""
        waiting = self._reorder.get(log)
        if waiting is None:
            return
        for version in waiting.ready(self._at(origins, log)):
            self._apply(batch, origins, version, outcome)
        if not len(waiting):
            del self._reorder[log]

    def _hold(self, version: Version) -> None:
        if version.log not in self._reorder:
            if self.waiting >= BUFFERED_MOST:
                return
            self._reorder[version.log] = ownerlog.Reorder(self._host.now_ms())
        self._reorder[version.log].hold(version)

    def _merge(self, batch: Batch, origins: dict[LogId, Origin], given: Range, outcome: Outcome) -> None:
        log, ours = given.origin.log, origins.get(given.origin.log) or self._origins.get(given.origin.log)
        at = ours.position if ours else NOTHING
        fit = self.fits(at, given.origin)
        floor = given.origin.floor
        match fit:
            case "current":
                return
            case "ahead":
                outcome.ahead.append(log)
                return
            case "range" if not given.snapshot and given.after <= at.head:
                floor = max(floor, ours.floor if ours else 0)
                batch.add_all(log, given.rows)
                if ours and floor > ours.floor:
                    batch.purge(log, floor)
            case _ if given.snapshot:
                batch.clear(log)
                batch.add_all(log, given.rows)
            case _:
                outcome.missing.append(log)  # it does not begin where we are
                return
        origins[log] = replace(given.origin, floor=floor)
        outcome.merged.append(log)
        self._drain(batch, origins, log, outcome)


def _sensible(version: Version) -> bool:
    return (
        0 < len(version.owner) <= _OWNER_MOST
        and 0 < version.epoch < _NUMBER_MOST
        and 0 < version.number < _NUMBER_MOST
        and 0 <= version.floor <= version.number
    )


def _sensible_range(given: Range) -> bool:
    origin, low = given.origin, 0 if given.snapshot else given.after
    return (
        0 < len(origin.owner) <= _OWNER_MOST
        and 0 < origin.epoch < _NUMBER_MOST
        and 0 <= origin.floor <= origin.head < _NUMBER_MOST
        and 0 <= given.after <= origin.head
        and len(origin.lineage) <= ownerlog.LINEAGE_MOST
        and all(0 <= epoch < origin.epoch and 0 <= end <= origin.head for epoch, end in origin.lineage)
        and all(low < row.number <= origin.head for row in given.rows)
    )

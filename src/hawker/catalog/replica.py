"""What this node knows of everybody's log, as tables in one SQLite file, `catalog.db`.

`receive` takes versions as they are spread, `merge` takes ranges that were asked for; each call is one commit. One
owner's versions are applied in their order only (`core.ownerlog`), so the rows of an owner are always exactly what it
had committed at the position that `position` tells. `answer` serves other replicas from the same rows, whoever owns
them. Readers use SQL on the views (`catalog.schema`), also from another process.

The file is written without waiting for the disk: a power cut may take the last commits back, each of them whole, and
what is missing then is fetched again. Damage is answered by starting empty, `resets` counts that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec
from msgspec.structs import replace

from hawker.catalog import file
from hawker.catalog.ingest import BULK_LEAST, AsideOf, Batch
from hawker.catalog.schema import TABLES, Layout, Table
from hawker.core import ownerlog
from hawker.host import Host
from hawker.model.catalog import NOTHING, LogId, Numbered, Origin, Position, Range, Tier, Version
from hawker.store.connection import rows, translated
from hawker.store.sql import TEXT_MAX, Found, read, read_on

BUFFERED_MOST = 8192
"""Versions of all logs that wait for a hole to be filled. Beyond it they are dropped, and the range brings them."""
_NUMBER_MOST = 1 << 62
_OWNER_MOST = 256
_INSERT_LOG = "insert or replace into _log values (?,?,?,?,?,?)"
_unpack = msgspec.msgpack.Decoder().decode


class Outcome(msgspec.Struct, kw_only=True):
    """What became of versions or ranges.

    `applied`: versions that were new here, in the order they were applied, to be passed on. `merged`: logs that a range
    brought forward. `missing`: logs with a hole, to be asked for at whoever sent this. `ahead`: logs of which we hold
    more than the sender does; if it is their owner it has come back from the past and must raise its epoch. `refused`:
    versions and ranges that make no sense.
    """

    applied: list[Version] = []
    merged: list[LogId] = []
    missing: list[LogId] = []
    ahead: list[LogId] = []
    refused: int = 0
    put_aside: int = 0


class Replica:
    """Open with `Replica.open`. `on_applied` are called after a commit with the names of the tables that may have
    changed: hints, for subscriptions.

    What it decides by is a part of the class, so that a test can see that each rule is needed.
    """

    judge = staticmethod(ownerlog.judge)
    fits = staticmethod(ownerlog.fits)
    batch_of: type[Batch] = Batch
    layout_of: type[Layout] = Layout

    def __init__(self, path: str, host: Host, vfs: str | None, tables: Sequence[Table]) -> None:
        self.on_applied: list[Callable[[tuple[str, ...]], None]] = []
        self.resets = 0
        self._path = path
        self._vfs = vfs
        self._host = host
        self._layouts = {table.name: self.layout_of(table) for table in tables}
        self._reorder: dict[LogId, ownerlog.Reorder] = {}
        self._stamp = 0
        self._connect()

    @classmethod
    def open(cls, path: Path | str, host: Host, *, vfs: str | None = None, tables: Sequence[Table] = TABLES) -> Replica:
        """Open or make the file at `path`. A damaged one begins empty. Raises `StoreError` when the disk refuses."""
        try:
            return cls(str(path), host, vfs, tables)
        except apsw.Error as error:
            raise translated(error, str(path)) from error

    def close(self) -> None:
        for db in (self._reader, self._db):
            with suppress(apsw.Error):
                db.close(True)

    def abandon(self) -> None:
        """Close as a killed process would. For crash tests."""
        self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.close()

    # --- what is known ---

    def position(self, log: LogId) -> Position:
        origin = self._origins.get(log)
        return origin.position if origin else NOTHING

    def origin(self, log: LogId) -> Origin | None:
        return self._origins.get(log)

    def origins(self, tier: Tier) -> dict[str, Origin]:
        """Every log known of a tier, by owner."""
        return {log.owner: origin for log, origin in sorted(self._origins.items()) if log.tier == tier}

    def digest(self, tier: Tier) -> bytes:
        return ownerlog.digest({owner: origin.position for owner, origin in self.origins(tier).items()})

    def differing(self, tier: Tier, theirs: bytes) -> dict[str, Origin]:
        """Our logs in the buckets in which another replica's digest differs. It may know others in them, too:
        `ownerlog.differing` names the buckets."""
        origins = self.origins(tier)
        buckets = ownerlog.differing(self.digest(tier), theirs)
        return {owner: origins[owner] for owner in ownerlog.in_buckets(origins, buckets)}

    def answer(self, log: LogId, at: Position) -> Range | None:
        """What brings another replica from `at` to where we stand. None when we have nothing newer."""
        origin = self._origins.get(log)
        if origin is None:
            return None
        fit = self.fits(at, origin)
        if fit not in ("range", "snapshot"):
            return None
        after = at.head if fit == "range" else 0
        return Range(origin, after, tuple(self.log_rows(log, after)), fit == "snapshot")

    def log_rows(self, log: LogId, after: int = 0) -> list[Numbered]:
        """An owner's rows above a number, as they came, tombstones and rows put aside included, by number and key."""
        found: list[Numbered] = []
        for name, layout in self._layouts.items():
            if layout.tier == log.tier:
                sql = f"{layout.read} and _number > ?"
                for key, number, deleted, extra, *columns in self.rows(sql, (log.owner, after)):
                    values = None if deleted else layout.values(extra, columns)
                    found.append(Numbered(number, name, key, values))
        aside = "select number, tbl, key, raw from _aside where owner = ? and tier = ? and number > ?"
        found += [Numbered(n, t, k, _unpack(raw)) for n, t, k, raw in self.rows(aside, (*log, after))]
        return sorted(found, key=lambda row: (row.number, row.table, row.key))

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read what is committed. For our own queries: nothing limits what they cost. Raises `StoreError`; damage is
        answered by beginning anew, and the next call finds an empty catalog."""
        try:
            return rows(self._reader, sql, values)
        except (apsw.CorruptError, apsw.NotADBError) as error:
            self._reset()
            raise translated(error, self._path) from error
        except apsw.IOError as error:
            raise translated(error, self._path) from error

    def newest_stamp(self) -> int:
        """The greatest stamp of the merged rows that are here."""
        return self._stamp

    def ask(self, query: str, text_max: int = TEXT_MAX) -> Found:
        """Read for people: one statement, read-only, within limits. On a real disk also from another thread. Raises
        `Invalid`, `StoreError`."""
        if self._vfs is None:
            return read(self._path, query, text_max)
        return read_on(self._reader, query, text_max)

    @property
    def waiting(self) -> int:
        """Versions that wait for a hole to be filled."""
        return sum(len(each) for each in self._reorder.values())

    # --- what is told ---

    def receive(self, versions: Sequence[Version]) -> Outcome:
        """Take versions as they are spread, in any order and as often as they come. One commit for all.

        This node's own come from its outbox only: one that others have and the outbox has not shows that it came back
        from the past (`Outbox.raise_epoch`), and must not be taken here, nor in `merge`.
        """
        outcome = Outcome()
        holes: dict[LogId, None] = {}
        behind: dict[LogId, Position] = {}  # told where the log is, not what is in it

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for version in versions:
                if not _sensible(version):
                    outcome.refused += 1
                    continue
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

        self._write(change, outcome)
        outcome.missing = [log for log in holes if len(self._reorder.get(log, ()))]
        outcome.missing += [log for log in behind if self.position(log) < behind[log] and log not in outcome.missing]
        return outcome

    def merge(self, ranges: Sequence[Range]) -> Outcome:
        """Take ranges and snapshots, each whole or not at all. One commit for all."""
        outcome = Outcome()

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for given in ranges:
                if not _sensible_range(given):
                    outcome.refused += 1
                elif given.origin.epoch > self._forgotten.get(given.origin.log, 0):
                    self._merge(batch, origins, given, outcome)

        with _no_collection() if sum(len(each.rows) for each in ranges) >= BULK_LEAST else nullcontext():
            self._write(change, outcome)
        return outcome

    def keep_member(self, name: str, **columns: str | int) -> None:
        """Write what membership says of a node into the table `members`, which is this node's own and goes nowhere."""
        names = ", ".join(("name", *columns))
        sql = f"insert or replace into members ({names}) values ({', '.join('?' * (1 + len(columns)))})"
        self._write(lambda batch, origins: self._execute(sql, name, *columns.values()), Outcome())

    def drop_member(self, name: str) -> None:
        self._write(lambda batch, origins: self._execute("delete from members where name = ?", name), Outcome())

    def forget(self, owner: str) -> None:
        """Drop all that is known of a node that an operator removed. It may come back in a later epoch."""

        def change(batch: Batch, origins: dict[LogId, Origin]) -> None:
            for log in [log for log in self._origins if log.owner == owner]:
                batch.clear(log)
                self._db.execute("insert or replace into _forgotten values (?,?,?)", (*log, self._origins[log].epoch))
                self._db.execute("delete from _log where owner = ? and tier = ?", log)

        self._write(change, Outcome())
        self._load()
        for log in [log for log in self._reorder if log.owner == owner]:
            del self._reorder[log]

    def recheck(self) -> int:
        """Put rows whose time has come, and rows of tables that are known and shown now, where they belong. Tells how
        many. Drop versions that wait in vain. To be called every second or so."""
        now_ms = self._host.now_ms()
        for log in [log for log, held in self._reorder.items() if held.in_vain(now_ms)]:
            del self._reorder[log]
        known = [name for name in self._layouts if name not in self._muted]
        found = self.rows(
            "select owner, tier, number, tbl, key, raw from _aside where kind = 'ahead' and until_ms <= ? "
            f"or kind in ('unknown', 'muted') and tbl in ({','.join('?' * len(known))})",
            (now_ms, *known),
        )
        if found:
            kept = [file.Kept(o, t, n, table, key, _unpack(raw)) for o, t, n, table, key, raw in found]
            self._write(lambda batch, origins: _add(batch, kept), Outcome())
        return len(found)

    def mute(self, table: str) -> None:
        """Keep a table's rows, pass them on, and show none of them: a new kind of row that readers trip over."""
        self._set_muted("insert or ignore into muted values (?)", table)
        layout = self._layouts.get(table)
        if layout is not None:
            kept = [
                file.Kept(log.owner, log.tier, row.number, table, row.key, row.values)
                for log in sorted(self._origins)
                if log.tier == layout.tier
                for row in self.log_rows(log)
                if row.table == table
            ]
            self._write(lambda batch, origins: _add(batch, kept), Outcome())

    def unmute(self, table: str) -> None:
        self._set_muted("delete from muted where name = ?", table)
        self.recheck()

    # --- helpers ---

    def _set_muted(self, sql: str, table: str) -> None:
        self._write(lambda batch, origins: self._execute(sql, table), Outcome())
        self._load()

    def _execute(self, sql: str, *values: Any) -> None:
        self._db.execute(sql, values)

    def _at(self, origins: dict[LogId, Origin], log: LogId) -> Position:
        origin = origins.get(log) or self._origins.get(log)
        return origin.position if origin else NOTHING

    def _apply(self, batch: Batch, origins: dict[LogId, Origin], version: Version, outcome: Outcome) -> None:
        """The version that follows what we have."""
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
        """Apply what waited for the place where we stand now."""
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

    def _write(self, change: Callable[[Batch, dict[LogId, Origin]], None], outcome: Outcome) -> None:
        """One transaction. On damage, begin empty. Raises `StoreError` when the disk refuses: nothing was changed."""
        batch = self.batch_of(self._db, self._layouts, self._muted, self._aside, self._host.now_ms())
        origins: dict[LogId, Origin] = {}
        try:
            self._db.execute("begin immediate")
            change(batch, origins)
            batch.write()
            self._db.executemany(_INSERT_LOG, [self.log_row(origin) for origin in origins.values()])
            self._db.execute("commit")
        except (apsw.CorruptError, apsw.NotADBError):
            outcome.applied, outcome.merged = [], []
            self._reset()
            return
        except BaseException as error:
            self._roll_back()
            if isinstance(error, apsw.Error):
                raise translated(error, self._path) from error
            raise
        self._origins.update(origins)
        self._stamp = max(self._stamp, batch.stamp)
        outcome.put_aside = batch.put_aside
        if batch.tables:
            hint = tuple(sorted(batch.tables))
            for call in self.on_applied:
                call(hint)

    @staticmethod
    def log_row(origin: Origin) -> tuple[Any, ...]:
        """A log as it is stored."""
        lineage = msgspec.json.encode(origin.lineage).decode()
        return (origin.owner, origin.tier, origin.epoch, origin.head, origin.floor, lineage)

    def _roll_back(self) -> None:
        self._reorder.clear()
        with suppress(apsw.Error):
            if not self._db.get_autocommit():
                self._db.execute("rollback")

    def _connect(self) -> None:
        try:
            self._open_file()
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, msgspec.DecodeError, IndexError):
            self._reset()

    def _open_file(self) -> None:
        self._db, self._reader = file.connect(self._path, self._vfs)
        try:
            self._aside: set[AsideOf] = set()
            self._db.execute("begin immediate")
            kept = file.lay_out(self._db, list(self._layouts.values()))
            self._muted = frozenset(name for (name,) in rows(self._db, "select name from muted"))
            batch = self.batch_of(self._db, self._layouts, self._muted, self._aside, self._host.now_ms())
            _add(batch, kept)
            batch.write()
            self._db.execute("commit")
            file.prepare_all(self._db, list(self._layouts.values()))
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Read what is kept in memory, too."""
        db = self._db
        self._muted = frozenset(name for (name,) in rows(db, "select name from muted"))
        self._aside = set(rows(db, "select distinct owner, tier, tbl from _aside"))
        merged = [layout.physical for layout in self._layouts.values() if layout.merged]
        self._stamp = max([0, *(rows(db, f"select max(stamp) from {name}")[0][0] or 0 for name in merged)])
        self._forgotten = {LogId(o, t): e for o, t, e in rows(db, "select owner, tier, epoch from _forgotten")}
        self._origins = {
            LogId(owner, tier): Origin(owner, tier, epoch, head, floor, _lineage(lineage))
            for owner, tier, epoch, head, floor, lineage in rows(
                db, "select owner, tier, epoch, head, floor, lineage from _log"
            )
        }

    def _reset(self) -> None:
        """Begin empty: the file is damaged."""
        with suppress(AttributeError):  # it may have failed before there was a connection
            self.close()
        self.resets += 1
        self._reorder.clear()
        file.remove(self._path, self._vfs)
        self._open_file()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A hundred thousand rows are no garbage, and looking through them again and again takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _add(batch: Batch, kept: Iterable[file.Kept]) -> None:
    for row in kept:
        batch.add(*row)


def _lineage(text: str) -> tuple[Position, ...]:
    return msgspec.json.decode(text, type=tuple[Position, ...])


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

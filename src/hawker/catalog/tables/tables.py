"""A node's tables as one thing: opened, read, written in transactions, and restarted empty when they are damaged.

The engine decides what belongs into them, such as `catalog.gossip.replica`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import apsw
import msgspec

from hawker.catalog.tables import file
from hawker.catalog.tables.checkpoints import Checkpoints
from hawker.catalog.tables.ingest import AsideOf, Batch
from hawker.catalog.tables.layout import Layout
from hawker.catalog.tables.schema import TABLES, Table
from hawker.catalog.view import Changed
from hawker.host import Host
from hawker.model.catalog import NOTHING, LogId, Numbered, Origin, Position, Tier
from hawker.store.connection import rows, translated
from hawker.store.sql import TEXT_MAX, Found, read, read_on
from hawker.telemetry import get_logger

_INSERT_LOG = "insert or replace into _log values (?,?,?,?,?,?)"
_unpack = msgspec.msgpack.Decoder().decode


class Tables:
    """After a commit, each of `on_applied` is called with the names of the tables that may have changed, as a hint for
    subscriptions, and each of `on_rows` with the keys of the rows, for readers that keep what they read. `resets`
    counts how often the file was damaged and began empty; then the table `members`, which this node wrote
    itself, are empty, too."""

    batch_of: type[Batch] = Batch
    layout_of: type[Layout] = Layout

    def __init__(self, path: str, host: Host, vfs: str | None, tables: Sequence[Table]) -> None:
        self.on_applied: list[Callable[[tuple[str, ...]], None]] = []
        self.on_rows: list[Callable[[Changed], None]] = []
        self.resets = 0
        self._path = path
        self._vfs = vfs
        self._host = host
        self._layouts = {table.name: self.layout_of(table) for table in tables}
        self._stamp = 0
        self._checkpoints: Checkpoints | None = None
        self._connect()

    @classmethod
    def open(cls, path: Path | str, host: Host, *, vfs: str | None = None, tables: Sequence[Table] = TABLES) -> Self:
        """Open or make the file at `path`. A damaged one begins empty. Raises `StoreError` when the disk refuses."""
        try:
            return cls(str(path), host, vfs, tables)
        except apsw.Error as error:
            raise translated(error, str(path)) from error

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        for db in (self._reader, self._db):
            with suppress(apsw.Error):
                db.close(True)

    def abandon(self) -> None:
        """Close as a killed process would. Crash tests call it."""
        self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.close()

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
        """Read what is committed, for Hawker's own queries: nothing limits what they cost. Raises `StoreError`. A
        damaged file begins empty, and the next call finds an empty catalog."""
        try:
            return rows(self._reader, sql, values)
        except (apsw.CorruptError, apsw.NotADBError) as error:
            self._reset()
            raise translated(error, self._path) from error
        except apsw.IOError as error:
            raise translated(error, self._path) from error

    @property
    def held_up(self) -> bool:
        """Whether a commit would wait for the disk now. That passes in a moment."""
        return self._checkpoints is not None and self._checkpoints.holding

    def newest_stamp(self) -> int:
        """The greatest stamp of the merged rows that are here."""
        return self._stamp

    def ask(self, query: str, text_max: int = TEXT_MAX) -> Found:
        """Read for people: one read-only statement, within limits. On a real disk another thread may call it, too.
        Raises `Invalid`, `StoreError`."""
        if self._vfs is None:
            return read(self._path, query, text_max)
        return read_on(self._reader, query, text_max)

    def position(self, log: LogId) -> Position:
        origin = self._origins.get(log)
        return origin.position if origin else NOTHING

    def origin(self, log: LogId) -> Origin | None:
        return self._origins.get(log)

    def origins(self, tier: Tier) -> dict[str, Origin]:
        """Every known log of a tier, by owner."""
        return {log.owner: origin for log, origin in sorted(self._origins.items()) if log.tier == tier}

    def write(self, change: Callable[[Batch, dict[LogId, Origin]], object]) -> Batch | None:
        """One transaction, for engines: `change` writes rows into the batch, and into the map the logs that moved on.
        Readers see all of it or nothing. Returns None when the file turned out to be damaged and was begun anew. Raises
        `StoreError` when the disk refuses: nothing was changed."""
        batch = self.batch_of(self._db, self._layouts, self._aside, self._host.now_ms())
        origins: dict[LogId, Origin] = {}
        try:
            self._db.execute("begin immediate")
            change(batch, origins)
            batch.write()
            self._db.executemany(_INSERT_LOG, [self.log_row(origin) for origin in origins.values()])
            self._db.execute("commit")
        except (apsw.CorruptError, apsw.NotADBError):
            self._reset()
            return None
        except BaseException as error:
            self._roll_back()
            if isinstance(error, apsw.Error):
                raise translated(error, self._path) from error
            raise
        self._origins.update(origins)
        self._stamp = max(self._stamp, batch.stamp)
        if batch.tables:
            hint = tuple(sorted(batch.tables))
            calls = [partial(told, hint) for told in self.on_applied]
            for call in [*calls, *(partial(told, batch.changed) for told in self.on_rows)]:
                try:
                    call()
                except Exception:  # it is committed: whoever applied it must hear that, and the others theirs
                    _logger.exception("catalog.listener_failed", tables=hint, cause="a commit")
        return batch

    def keep_member(self, name: str, **columns: str | int) -> None:
        """Write what membership says of a node into the table `members`, which is this node's own and goes nowhere."""
        names = ", ".join(("name", *columns))
        sql = f"insert or replace into members ({names}) values ({', '.join('?' * (1 + len(columns)))})"
        self.write(lambda batch, origins: self._of_member(batch, name, sql, name, *columns.values()))

    def drop_member(self, name: str) -> None:
        sql = "delete from members where name = ?"
        self.write(lambda batch, origins: self._of_member(batch, name, sql, name))

    def recheck(self) -> int:
        """Put rows where they belong whose time has come, or whose tables are known and shown now. Returns how many.
        Call it every second or so."""
        found = self.rows(
            "select owner, tier, number, tbl, key, raw from _aside where kind = 'ahead' and until_ms <= ? "
            f"or kind = 'unknown' and tbl in ({','.join('?' * len(self._layouts))})",
            (self._host.now_ms(), *self._layouts),
        )
        if found:
            kept = [file.Kept(o, t, n, table, key, _unpack(raw)) for o, t, n, table, key, raw in found]
            self.write(lambda batch, origins: _add(batch, kept))
        return len(found)

    # --- helpers ---

    def _of_member(self, batch: Batch, name: str, sql: str, *values: Any) -> None:
        self._execute(sql, *values)
        batch.tables.add("members")
        batch.changed["members"] = {name}

    def _execute(self, sql: str, *values: Any) -> None:
        self._db.execute(sql, values)

    @contextmanager
    def bulk(self) -> Iterator[None]:
        """Prepare for many rows at once. Python's garbage collector would look through them again and again, which
        takes a sixth of the time, and SQLite would write pages twice that do not fit into its memory."""
        enabled = gc.isenabled()
        gc.disable()
        file.cache(self._db, bulk=True)
        try:
            yield
        finally:
            file.cache(self._db, bulk=False)
            if enabled:
                gc.enable()

    @staticmethod
    def log_row(origin: Origin) -> tuple[Any, ...]:
        """A log as it is stored."""
        lineage = msgspec.json.encode(origin.lineage).decode()
        return (origin.owner, origin.tier, origin.epoch, origin.head, origin.floor, lineage)

    def _undone(self) -> None:
        """Forget what was noted beside a transaction that was undone."""

    def _roll_back(self) -> None:
        self._undone()
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
        if self._vfs is None:  # a simulated disk belongs to one thread
            self._checkpoints = Checkpoints(self._path, self._db)
        try:
            self._aside: set[AsideOf] = set()
            self._db.execute("begin immediate")
            kept = file.lay_out(self._db, list(self._layouts.values()))
            batch = self.batch_of(self._db, self._layouts, self._aside, self._host.now_ms())
            _add(batch, kept)
            batch.write()
            self._db.execute("commit")
            file.prepare_all(self._db, list(self._layouts.values()))
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Read what memory keeps besides."""
        db = self._db
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
        """Begin empty, because the file is damaged."""
        with suppress(AttributeError):  # it may have failed before there was a connection
            self.close()
        self.resets += 1
        self._undone()
        file.remove(self._path, self._vfs)
        self._open_file()


def _add(batch: Batch, kept: Iterable[file.Kept]) -> None:
    for row in kept:
        batch.add(*row)


def _lineage(text: str) -> tuple[Position, ...]:
    return msgspec.json.decode(text, type=tuple[Position, ...])


_logger = get_logger()

"""The catalog's database file: opens it, lays out its tables, and takes along what an older Hawker put there.

Everything in it can be fetched again, so a damaged file begins empty. An upgrade is no damage: the rows that are here
are laid out anew, without asking anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import msgspec

from hawker.catalog.tables.checkpoints import PAGES
from hawker.catalog.tables.layout import Described, Layout
from hawker.errors import StoreError
from hawker.model.catalog import Tier, Values
from hawker.store.connection import BUSY_MS, make_private, rows

_FORMAT = 1
"""The version of the tables below. A file of another version is not read: it begins empty."""

_CACHE_KIB = 16_000
_CACHE_KIB_BULK = 64_000
_WAL_BYTES_KEPT = 64 << 20

_OWN_TABLES = """
create table _meta (name text primary key, value text not null) strict, without rowid;

-- What is known of each owner's log: `model.catalog.Origin`.
create table _log (
  owner text not null, tier text not null, epoch integer not null, head integer not null, floor integer not null,
  lineage text not null, primary key (owner, tier)
) strict, without rowid;

-- Owners that an operator removed, with the epochs that must not come back.
create table _forgotten (owner text not null, tier text not null, epoch integer not null, primary key (owner, tier))
  strict, without rowid;

-- What membership says of every node, as this one sees it. Not replicated: each node has its own.
create table members (
  name text primary key, region text not null default '', host text not null default '',
  port integer not null default 0, roles text not null default '', status text not null default '',
  incarnation integer not null default 0, born_ms integer not null default 0, changed_ms integer not null default 0
) strict, without rowid;

-- Rows that are not in their tables, kept raw (MessagePack; nil is a tombstone) and passed on like the others.
create table _aside (
  owner text not null, tier text not null, tbl text not null, key text not null, number integer not null,
  deleted integer not null, raw blob not null, kind text not null,  -- poison, ahead, unknown
  why text not null, at_ms integer not null, until_ms integer not null, primary key (owner, tier, tbl, key)
) strict, without rowid;
create index _aside_until on _aside (until_ms) where kind = 'ahead';
create view quarantine as select owner, tier, tbl, key, number, raw, why, at_ms from _aside
  where kind in ('poison', 'ahead');
create view unknown as select owner, tier, tbl, key, number, raw, at_ms from _aside where kind = 'unknown';
"""


class Kept(NamedTuple):
    """A row as it came, on its way from one layout to another."""

    owner: str
    tier: Tier
    number: int
    table: str
    key: str
    values: Values | None


def connect(path: str, vfs: str | None) -> tuple[apsw.Connection, apsw.Connection]:
    """The writer and the reader. A simulated disk has no shared memory: there one connection does both."""
    if vfs is None:
        make_private(path)
    writer = apsw.Connection(path, vfs=vfs)
    try:
        writer.set_busy_timeout(BUSY_MS)
        if vfs is not None:
            writer.execute("pragma locking_mode = exclusive")
        mode = rows(writer, "pragma journal_mode = wal")[0][0]
        if mode != "wal":
            raise StoreError(f"SQLite cannot use a write-ahead log at {path} ({mode}); use a local file system")
        writer.execute("pragma synchronous = normal")
        cache(writer, bulk=False)
        writer.execute(f"pragma wal_autocheckpoint = {PAGES}")
        writer.execute(f"pragma journal_size_limit = {_WAL_BYTES_KEPT}")
        if vfs is not None:
            return writer, writer
        rows(writer, "select count(*) from sqlite_schema")
        reader = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        reader.set_busy_timeout(BUSY_MS)
    except BaseException:
        with suppress(apsw.Error):
            writer.close(True)
        raise
    return writer, reader


def cache(db: apsw.Connection, *, bulk: bool) -> None:
    """Set how much memory pages may take: more while one transaction writes many rows."""
    with suppress(apsw.Error):  # the file may be damaged, or closed for that; the cache matters to speed only
        db.execute(f"pragma cache_size = -{_CACHE_KIB_BULK if bulk else _CACHE_KIB}")
        if not bulk:
            db.execute("pragma shrink_memory")


def lay_out(db: apsw.Connection, layouts: Sequence[Layout]) -> list[Kept]:
    """Make the tables, inside the caller's transaction. Returns the rows of tables that were laid out differently; the
    caller puts them where they belong now."""
    wanted = msgspec.json.encode([layout.describe() for layout in layouts]).decode()
    version = rows(db, "pragma user_version")[0][0]
    kept: list[Kept] = []
    if version == _FORMAT:
        found = rows(db, "select value from _meta where name = 'layout'")[0][0]
        if found == wanted:
            return []
        described = msgspec.json.decode(found, type=list[Described])
        for each in described:
            kept += _rows_of(db, each)
        kept += _aside(db)
        for view in [name for (name,) in db.execute("select name from sqlite_schema where type = 'view'")]:
            if view not in ("quarantine", "unknown"):
                db.execute(f'drop view "{view}"')
        for each in described:
            db.execute(f"drop table {each.name}_of")
        db.execute("delete from _aside")
    else:
        clear(db)
        db.execute(_OWN_TABLES)
        db.execute(f"pragma user_version = {_FORMAT}")
    for layout in layouts:
        for statement in layout.ddl():
            db.execute(statement)
    db.execute("insert or replace into _meta values ('layout', ?)", (wanted,))
    return kept


def clear(db: apsw.Connection) -> None:
    """Drop everything there is."""
    for kind in ("view", "table"):
        for (name,) in rows(db, "select name from sqlite_schema where type = ? and name not like 'sqlite_%'", (kind,)):
            db.execute(f'drop {kind} "{name}"')


def remove(path: str, vfs: str | None) -> None:
    """Make an empty database of a damaged one."""
    if vfs is None:
        for suffix in ("", "-wal", "-shm"):
            Path(path + suffix).unlink(missing_ok=True)
        return
    db = apsw.Connection(path, vfs=vfs)
    try:
        db.execute("pragma locking_mode = exclusive")
        db.config(apsw.SQLITE_DBCONFIG_RESET_DATABASE, 1)
        db.execute("vacuum")
        db.config(apsw.SQLITE_DBCONFIG_RESET_DATABASE, 0)
    finally:
        db.close(True)


def prepare_all(db: apsw.Connection, layouts: Sequence[Layout]) -> None:
    """Prepare a query of every view: a fault of the schema shows when the node starts, not when somebody reads."""
    views = [name for (name,) in db.execute("select name from sqlite_schema where type = 'view' order by name")]
    for view in views:
        rows(db, f'select * from "{view}" limit 0')
    for layout in layouts:
        rows(db, f"explain {layout.read}", ("",))
        rows(db, f"explain {layout.insert}", (None,) * layout.insert.count("?"))


def _rows_of(db: apsw.Connection, table: Described) -> Iterator[Kept]:
    names = ", ".join(f'"{name}"' for name in table.names)
    flags = frozenset(table.flags)
    for owner, key, number, deleted, extra, *columns in db.execute(
        f"select _owner, id, _number, _deleted, _extra, {names} from {table.name}_of"
    ):
        values: dict[str, Any] | None = None
        if not deleted:
            values = {
                name: bool(value) if name in flags else value
                for name, value in zip(table.names, columns, strict=True)
                if value is not None
            }
            values.update(msgspec.json.decode(extra) if extra else {})
        yield Kept(owner, table.tier, number, table.name, key, values)


def _aside(db: apsw.Connection) -> Iterator[Kept]:
    for owner, tier, number, table, key, raw in db.execute("select owner, tier, number, tbl, key, raw from _aside"):
        yield Kept(owner, tier, number, table, key, msgspec.msgpack.decode(raw))

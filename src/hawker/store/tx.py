"""What a change sees and writes: rows by type and key, in a transaction of `store.db`.

Every change opens a record (`Tx.record`); rows put or deleted after it are kept in the record's images and written to
their tables, in one transaction. The tables get them at the end of the commit (`Commit`), each row once however many
changes wrote it, unless something is read that may be among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import apsw
import msgspec

from hawker.errors import Corrupt
from hawker.model.rows import Row
from hawker.store import log
from hawker.store.connection import INCREMENTAL, rows, translated

R = TypeVar("R", bound=Row)

Known = dict[tuple[type[Row], str], Row | None]
"""Rows by type and key as a transaction has left them so far; None: not there."""

Bodies = dict[tuple[type[Row], str], bytes | None]
"""The same rows as JSON, as their tables are to have them."""

_UNREADABLE = apsw.CorruptError, apsw.NotADBError, apsw.IOError
"""SQLite raises these when the disk gives back something else than was written, or nothing."""

_encode = msgspec.json.Encoder().encode
_decoders: dict[type[Row], msgspec.json.Decoder[Any]] = {}


def _decode(kind: type[R], body: str) -> R:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        row: R = decoder.decode(body)
    except msgspec.DecodeError as error:
        raise _unreadable(kind, error) from error
    return row


def _bodies(db: apsw.Connection, kind: type[Row], where: str, values: Sequence[Any]) -> list[str]:
    try:
        return [body for (body,) in rows(db, f"select body from {kind.table} where {where}", values)]
    except _UNREADABLE as error:
        raise translated(error) from error
    except UnicodeDecodeError as error:  # SQLite has no checksums: only a reader sees damage within a text
        raise _unreadable(kind, error) from error


def _unreadable(kind: type[Row], error: Exception) -> Corrupt:
    return Corrupt(f"table {kind.table}: a row does not read as {kind.__name__}: {error}")


class Reads:
    """Typed reads of one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def get(self, kind: type[R], key: str) -> R | None:
        found = _bodies(self._db, kind, "id = ?", (key,))
        return _decode(kind, found[0]) if found else None

    def ahead(self, *names: tuple[type[Row], str]) -> Reads:
        """Read these rows with one statement, as they were at one moment. The returned `Reads` has them already."""
        asked = ", ".join([f"(select body from {kind.table} where id = ?)" for kind, _ in names])
        try:
            [bodies] = rows(self._db, f"select {asked}", [key for _, key in names])
        except _UNREADABLE as error:
            raise translated(error) from error
        except UnicodeDecodeError:  # whoever reads the damaged row alone gets its error
            return self
        return _Ahead(
            self._db, {name: body and _decode(name[0], body) for name, body in zip(names, bodies, strict=True)}
        )

    def select(self, kind: type[R], where: str = "true", values: Sequence[Any] = ()) -> list[R]:
        """Rows matching `where`, which may end with `order by` and `limit`."""
        return [_decode(kind, body) for body in _bodies(self._db, kind, where, values)]

    def body(self, kind: type[Row], key: str) -> bytes | None:
        """The body of a row as its table has it, not decoded."""
        found = self.query(f"select cast(body as blob) from {kind.table} where id = ?", (key,))
        return found[0][0] if found else None

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return rows(self._db, sql, values)
        except _UNREADABLE as error:
            raise translated(error) from error


class _Ahead(Reads):
    def __init__(self, db: apsw.Connection, known: Known) -> None:
        super().__init__(db)
        self._rows = known

    def get(self, kind: type[R], key: str) -> R | None:
        name = kind, key
        return cast("R | None", self._rows[name]) if name in self._rows else super().get(kind, key)


class Commit:
    """What the changes of one commit have written so far. `known` are rows as they left them, or as they are in their
    tables. `refused`: a table does not take one of the rows, whichever change it is from."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self.known: Known = {}
        self.refused = False
        self._bodies: Bodies = {}
        self._records: list[tuple[Any, ...]] = []

    def add(self, changed: Known, bodies: Bodies, records: list[tuple[Any, ...]]) -> None:
        """Add what a finished change has written."""
        self.known |= changed
        self._bodies |= bodies
        self._records += records

    def write(self, kind: type[Row] | None = None) -> None:
        """Write to the tables what they lack; only rows of `kind`, if one is given."""
        try:
            if bodies := _taken(self._bodies, kind):
                _write(self._db, bodies)
            if self._records and kind is None:
                records, self._records = self._records, []
                self._db.executemany(log.INSERT, records)
        except apsw.ConstraintError:
            self.refused = True
            raise


class Tx(Reads):
    """A change in progress. Sees its own writes and those of earlier changes in the same commit.

    A row written several times under one record is logged once, as that record left it.

    Ends with its change: writing to it afterwards is a bug and raises. `now_ms` and `steady_ms` are the host's clocks
    when it began.
    """

    def __init__(self, db: apsw.Connection, now_ms: int, steady_ms: int, commit: Commit) -> None:
        super().__init__(db)
        self.now_ms = now_ms
        self.steady_ms = steady_ms
        self.records: list[log.Record] = []
        self.after: list[Callable[[], None]] = []
        self._open = True
        self._saved = False
        self._held: Known = {}  # written under the open record
        self._changed: Known = {}  # written under records before it
        self._bodies: Bodies = {}  # logged, and not yet in their tables
        self._commit = commit

    def record(self, kind: str, resource: str, *, cause: str, **fields: Any) -> None:
        """Open the record that the writes after it belong to. Fields are those of `store.log.Record`."""
        self._close_record()
        self.records.append(log.Record(kind=kind, resource=resource, cause=cause, **fields))

    def put(self, row: Row) -> None:
        """Write a new or changed row. The change fails if a unique index of the table forbids the row."""
        key = row.key
        self._check(row.table, key)
        self._held[type(row), key] = row

    def delete(self, kind: type[Row], key: str) -> None:
        self._check(kind.table, key)
        self._held[kind, key] = None

    def write_again(self, kind: type[Row], key: str, body: bytes) -> None:
        """Bring the image of a row that stays as it is into the open record. `body` is what `body` gives."""
        self._check(kind.table, key)
        self.records[-1].writes.append(log.write_image(kind.table, key, body))

    def cut_log(self, through: int) -> None:
        """Delete the log's records up to this one. Every row has an image in those that are left."""
        self._check("log", str(through))
        self._save()
        self._db.execute("delete from log where seq <= ?", (through,))

    def give_back(self, pages: int, *, above: int) -> bool:
        """Return so many free pages to the disk, if more are free than `above` and a quarter of all. Returns whether
        that was so. The pages at the end of the file take the places of free ones."""
        [[free]], [[count]] = self.query("pragma freelist_count"), self.query("pragma page_count")
        if free <= max(above, count // 4) + pages or self.query("pragma auto_vacuum") != [(INCREMENTAL,)]:
            return False
        self._save()
        self.query(f"pragma incremental_vacuum({pages})")
        return True

    def get(self, kind: type[R], key: str) -> R | None:
        name = kind, key
        for rows_by_name in (self._held, self._changed, self._commit.known):
            if name in rows_by_name:
                return cast(
                    "R | None", rows_by_name[name]
                )  # as text, since to build the type takes longer than to read
        found = self._commit.known[name] = super().get(kind, key)
        return found

    def select(self, kind: type[R], where: str = "true", values: Sequence[Any] = ()) -> list[R]:
        """Like `Reads.select`, but `where` may look at no other table."""
        self.flush(kind)
        return super().select(kind, where, values)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        self.flush()
        return super().query(sql, values)

    def flush(self, kind: type[Row] | None = None) -> None:
        """Bring what is held into the open record, and what this change and those before it wrote into the tables; of
        this kind of row alone, if one is given. Raises `apsw.ConstraintError`."""
        self._close_record()
        self._commit.write(kind)
        if bodies := _taken(self._bodies, kind):
            self._check("held rows", "")
            self._save()
            _write(self._db, bodies)

    def done(self, seq: int, checksum: bytes) -> tuple[int, bytes]:
        """The change is kept. `seq` and `checksum` are of the record before its own; returns those of its last."""
        self._close_record()
        records: list[tuple[Any, ...]] = []
        for record in self.records:
            seq += 1
            records.append(record.values(seq, self.now_ms, checksum))
            checksum = records[-1][-1]
        self._commit.add(self._changed, self._bodies, records)
        return seq, checksum

    def undo(self) -> None:
        """The change is not kept: take what it wrote out of the tables."""
        if self._saved:
            self._db.execute("rollback to change")
            self._db.execute("release change")

    def _save(self) -> None:
        """Set a savepoint, before the first write to a table that this change makes while it may still fail."""
        if not self._saved:
            self._commit.write()  # everything, because what is written from now on may be undone
            self._db.execute("savepoint change")
            self._saved = True

    def _close_record(self) -> None:
        """Bring what is held into the open record."""
        if not self._held:
            return
        self._check("held rows", "")
        held, self._held = self._held, {}
        self._changed |= held
        writes = self.records[-1].writes
        for (kind, key), row in held.items():
            body = self._bodies[kind, key] = None if row is None else _encode(row)
            writes.append(log.write_image(kind.table, key, body))

    def changed(self) -> Known:
        """Every row written since the change began, as it is now. Closes the open record."""
        self._close_record()
        return self._changed

    def end(self) -> None:
        """The change is over."""
        self._open = False

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call once this change is on disk, before `submit` returns to its caller. What it raises is logged."""
        self.after.append(call)

    def _check(self, table: str, key: str) -> None:
        """Raises when a write would stand alone, outside a record and its transaction."""
        if not self.records:
            raise AssertionError(f"{table} {key}: written without a record")
        if not self._open:
            raise AssertionError(f"{table} {key}: written after its change had ended")
        if self._db.get_autocommit():
            raise apsw.AbortError(f"{table} {key}: SQLite has rolled the transaction back")


def _taken(bodies: Bodies, kind: type[Row] | None) -> Bodies:
    """Take the rows of a kind, or all rows, out of `bodies` and return them."""
    taken = {name: bodies[name] for name in bodies if kind is None or name[0] is kind}
    for name in taken:
        del bodies[name]
    return taken


def _write(db: apsw.Connection, bodies: Mapping[tuple[type[Row], str], bytes | None]) -> None:
    for (kind, key), body in bodies.items():
        if body is None:
            db.execute(f"delete from {kind.table} where id = ?", (key,))
        else:
            db.execute(_put(kind), (key, body.decode()))


@cache
def _put(kind: type[Row]) -> str:
    """Not "insert or replace", which would delete the row that a unique index protects."""
    return f"insert into {kind.table} (id, body) values (?, ?) on conflict (id) do update set body = excluded.body"

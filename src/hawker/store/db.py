"""One SQLite database: durable when acknowledged, one writer, commits shared by whoever writes in the same tick.

`Store.submit(change)` runs `change(tx)` inside a transaction together with everything else submitted in the same
tick of the event loop, and returns once that transaction is on disk (WAL, `synchronous=FULL`). A change that raises
is rolled back alone; the others go on. Commits are made on the loop while the disk is quick and in a thread once it
is slow: a fsync of 0.1 ms is cheaper than waking a thread, one of 10 ms must not stop the loop.

Every change opens a record (`Tx.record`); rows put or deleted after it are kept in the record's images and written to
their tables, in one transaction. Reads outside a change go to a second connection and see what is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import apsw
import msgspec

from hawker.errors import Broken, Corrupt, DiskFull, StoreError
from hawker.host import Host
from hawker.model.rows import Row
from hawker.store import log

T = TypeVar("T")
R = TypeVar("R", bound=Row)

SLOW_COMMIT_S = 0.002
_WAL_PAGES_BEFORE_CHECKPOINT = 2000  # 8 MiB

_encode = msgspec.json.Encoder().encode
_decoders: dict[type[Row], msgspec.json.Decoder[Any]] = {}


def _decode(kind: type[R], body: str) -> R:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        row: R = decoder.decode(body)
    except msgspec.DecodeError as error:
        raise Corrupt(f"table {kind.table}: a row does not read as {kind.__name__}: {error}") from error
    return row


def rows(db: apsw.Connection, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query. Their types are the caller's knowledge of the schema."""
    return list(db.execute(sql, values))


class Reads:
    """Typed reads of one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def get(self, kind: type[R], key: str) -> R | None:
        found = rows(self._db, f"select body from {kind.table} where id = ?", (key,))
        return _decode(kind, found[0][0]) if found else None

    def select(self, kind: type[R], where: str = "true", values: Sequence[Any] = ()) -> list[R]:
        """Rows matching `where`, which may end with `order by` and `limit`."""
        found = rows(self._db, f"select body from {kind.table} where {where}", values)
        return [_decode(kind, body) for (body,) in found]

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return rows(self._db, sql, values)


class Tx(Reads):
    """A change in progress. Sees its own writes and those of earlier changes in the same commit."""

    def __init__(self, db: apsw.Connection, now_ms: int) -> None:
        super().__init__(db)
        self.now_ms = now_ms
        self._records: list[log.Record] = []
        self._after: list[Callable[[], None]] = []

    def record(self, kind: str, resource: str, *, cause: str, **fields: Any) -> None:
        """Open the record that the writes after it belong to. Fields are those of `store.log.Record`."""
        self._records.append(log.Record(kind=kind, resource=resource, cause=cause, **fields))

    def put(self, row: Row) -> None:
        body = _encode(row)
        self._write(row.table, row.key, body)
        self._db.execute(f"insert or replace into {row.table} (id, body) values (?, ?)", (row.key, body.decode()))

    def delete(self, kind: type[Row], key: str) -> None:
        self._write(kind.table, key, None)
        self._db.execute(f"delete from {kind.table} where id = ?", (key,))

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call once this change is on disk, before `submit` returns to its caller."""
        self._after.append(call)

    def _write(self, table: str, key: str, body: bytes | None) -> None:
        if not self._records:
            raise AssertionError(f"{table} {key}: written without a record")
        self._records[-1].writes.append(log.write_image(table, key, body))


class _Pending:
    __slots__ = ("change", "future", "tx", "value")

    def __init__(self, change: Callable[[Tx], Any], future: asyncio.Future[Any]) -> None:
        self.change = change
        self.future = future
        self.tx: Tx | None = None
        self.value: Any = None


class Store:
    """Open with `Store.open`. `on_commit` is told "before" and "after" each commit: the crash tests cut there."""

    def __init__(
        self,
        db: apsw.Connection,
        reader: apsw.Connection,
        host: Host,
        on_commit: Callable[[str], None] | None = None,
    ) -> None:
        self._db = db
        self._reader = reader
        self._host = host
        self._on_commit = on_commit
        self._queue: list[_Pending] = []
        self._scheduled = False
        self._committing: asyncio.Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._slow = False
        self._closed = False
        self.read = Reads(reader)
        self.commits = 0
        self.full = False
        last = rows(db, "select seq, checksum from log order by seq desc limit 1")
        self._seq, self._checksum = last[0] if last else (0, log.GENESIS)

    @classmethod
    def open(
        cls,
        path: Path | str,
        host: Host,
        *,
        vfs: str | None = None,
        on_commit: Callable[[str], None] | None = None,
    ) -> Store:
        """Open or make the database at `path`. Raises `Corrupt` when SQLite or the log's end says so, `StoreError` when
        it was written by a newer Hawker."""
        try:
            db = _connect(str(path), vfs)
            _migrate(db)
            _check_tail(db)
            # With a VFS of a simulated disk there is no shared memory, so one connection serves both.
            reader = db if vfs else apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise Corrupt(f"{path}: {error}") from error
        return cls(db, reader, host, on_commit)

    async def submit(self, change: Callable[[Tx], T]) -> T:
        """Run `change` in the next commit and return what it returned, once that is on disk.

        Raises what `change` raises (then nothing of it is kept) and `DiskFull`.
        """
        if self._closed:
            raise StoreError("the database is closed")
        loop = asyncio.get_running_loop()
        pending = _Pending(change, loop.create_future())
        self._queue.append(pending)
        if not self._scheduled and self._committing is None:
            self._scheduled = True
            loop.call_soon(self._flush)
        result: T = await pending.future
        return result

    async def close(self) -> None:
        """Finish what was submitted, then close. The database can be opened again by anyone."""
        self._closed = True
        while self._queue or self._committing:
            if self._committing:
                await asyncio.wait([self._committing])
            else:
                self._flush()
        if self._thread:
            self._thread.shutdown()
        if self._reader is not self._db:
            self._reader.close()
        self._db.close()

    def abandon(self) -> None:
        """Close as a killed process would: what is not committed is gone. For crash tests."""
        self._closed = True
        if self._reader is not self._db:
            self._reader.close(True)
        self._db.close(True)

    def _flush(self) -> None:
        self._scheduled = False
        batch, self._queue = self._queue, []
        if not batch or self._committing:
            self._queue = batch + self._queue
            return
        saved = self._seq, self._checksum
        try:
            self._db.execute("begin immediate")
            for pending in batch:
                self._apply(pending)
            if self._on_commit:
                self._on_commit("before")
            if self._slow:
                self._commit_in_thread(batch, saved)
                return
            started = perf_counter()
            self._db.execute("commit")
        except apsw.Error as error:
            self._failed(batch, saved, error)
            return
        self._slow = perf_counter() - started > SLOW_COMMIT_S
        self._committed(batch)

    def _apply(self, pending: _Pending) -> None:
        """Run one change under its own savepoint."""
        db = self._db
        saved = self._seq, self._checksum
        tx = Tx(db, self._host.now_ms())
        db.execute("savepoint change")
        try:
            pending.value = pending.change(tx)
            for record in tx._records:
                values = record.values(self._seq + 1, tx.now_ms, self._checksum)
                db.execute(log.INSERT, values)
                self._seq, self._checksum = self._seq + 1, values[-1]
        except Exception as error:
            self._seq, self._checksum = saved
            if db.get_autocommit():  # SQLite itself rolled the whole transaction back
                raise
            db.execute("rollback to change")
            db.execute("release change")
            if not pending.future.cancelled():
                pending.future.set_exception(_translated(error))
        else:
            db.execute("release change")
            pending.tx = tx

    def _commit_in_thread(self, batch: list[_Pending], saved: tuple[int, bytes]) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hawker-commit")

        def commit() -> float:
            started = perf_counter()
            self._db.execute("commit")
            return perf_counter() - started

        def done(future: asyncio.Future[float]) -> None:
            self._committing = None
            error = future.exception()
            if isinstance(error, apsw.Error):
                self._failed(batch, saved, error)
            elif error is None:
                self._slow = future.result() > SLOW_COMMIT_S / 2  # half: no flutter around the limit
                self._committed(batch)
            if self._queue and not self._scheduled:
                self._scheduled = True
                loop.call_soon(self._flush)

        committing = loop.run_in_executor(self._thread, commit)
        self._committing = committing  # type: ignore[assignment]  # only waited for
        committing.add_done_callback(done)

    def _committed(self, batch: list[_Pending]) -> None:
        self.commits += 1
        self.full = False
        if self._on_commit:
            self._on_commit("after")
        for pending in batch:
            if pending.tx is None:
                continue
            for call in pending.tx._after:
                call()
            if not pending.future.cancelled():
                pending.future.set_result(pending.value)

    def _failed(self, batch: list[_Pending], saved: tuple[int, bytes], error: apsw.Error) -> None:
        self._seq, self._checksum = saved
        if not self._db.get_autocommit():
            self._db.execute("rollback")
        translated = _translated(error)
        self.full = isinstance(translated, DiskFull)
        for pending in batch:
            if not pending.future.done():
                pending.future.set_exception(translated)


def _translated(error: Exception) -> Exception:
    if isinstance(error, apsw.FullError):
        return DiskFull(f"the worker's disk is full: {error}")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return Corrupt(f"the worker's database is damaged: {error}")
    if isinstance(error, apsw.IOError | apsw.ReadOnlyError | apsw.CantOpenError):
        return StoreError(f"the worker's database cannot be written: {error}")
    if isinstance(error, apsw.Error):
        return Broken(f"{type(error).__name__}: {error}")
    return error


def _connect(path: str, vfs: str | None) -> apsw.Connection:
    db = apsw.Connection(path, vfs=vfs)
    if vfs:
        db.execute("pragma locking_mode = exclusive")
    db.set_busy_timeout(5000)
    mode = rows(db, "pragma journal_mode = wal")[0][0]
    if mode != "wal":
        raise StoreError(f"{path}: SQLite cannot use a write-ahead log here ({mode}); use a local file system")
    db.execute("pragma synchronous = full")
    db.execute(f"pragma wal_autocheckpoint = {_WAL_PAGES_BEFORE_CHECKPOINT}")
    return db


def _migrate(db: apsw.Connection) -> None:
    """Apply the numbered SQL files above the database's version, each in its own transaction."""
    files = sorted((Path(__file__).parent / "migrations").glob("*.sql"))
    version = rows(db, "pragma user_version")[0][0]
    newest = int(files[-1].stem)
    if version > newest:
        raise StoreError(f"this database has version {version}; this Hawker knows up to {newest}: upgrade it")
    for file in files:
        number = int(file.stem)
        if number > version:
            with db:
                db.execute(file.read_text())
                db.execute(f"pragma user_version = {number}")


def _check_tail(db: apsw.Connection, records: int = 100) -> None:
    """Check the last records at start-up; the whole log is `store.verify`'s work."""
    tail = rows(db, f"select {log.COLUMNS} from log order by seq desc limit {records + 1}")
    tail.reverse()
    previous = log.GENESIS if len(tail) <= records else tail.pop(0)[-1]
    for row in tail:
        if log.checksum(previous, row[:-1]) != row[-1]:
            raise Corrupt(f"log record {row[0]}: its checksum does not match its content", seq=row[0])
        previous = row[-1]

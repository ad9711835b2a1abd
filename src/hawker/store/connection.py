"""How a database is opened, and what SQLite's errors mean to us.

Settings, numbered migrations, and a check of the log's end. `store.db` writes through the connection made here,
`store.verify` replays the whole log.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec

from hawker.errors import Broken, Corrupt, DiskFailed, DiskFull, StoreError
from hawker.model.rows import LogFloorRow
from hawker.store import log, schema
from hawker.store.schema import Schema

BUSY_MS = 5000
WAL_PAGES_AT_FIRST = 2000
LOOK = "look at the disk, then start the agent again"
MUCH_FREE = 8192
"""A database with fewer free pages than this is not rewritten."""
INCREMENTAL = 2
"""SQLite's number for databases whose free pages can be given back to the disk bit by bit."""
_WAL_BYTES_AT_FIRST = WAL_PAGES_AT_FIRST * (4096 + 24) + 32  # pages and their headers, and the file's header
_WAL_BYTES_KEPT = 64 << 20  # a reader that stays long makes the write-ahead log grow; afterwards it shrinks to this


def rows(db: apsw.Connection, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query. Their types are the caller's knowledge of the schema."""
    return list(db.execute(sql, values))


def make_private(path: Path | str) -> None:
    """Keep a database on the real file system from everybody but its owner, whatever the umask: machines' environments
    and leases' nonces are in it. To be called before SQLite opens it; what SQLite puts beside it gets its mode.

    One that is there is never opened here: closing it would drop the locks that SQLite holds on it for this process.
    Raises `StoreError`.
    """
    path = os.path.realpath(path)  # as SQLite does: what is beside it is beside the file that a link leads to
    try:
        try:
            made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            for each in (path, f"{path}-wal", f"{path}-shm"):
                with suppress(FileNotFoundError):
                    mode = os.stat(each).st_mode
                    if stat.S_ISREG(mode) and mode & 0o077:
                        os.chmod(each, stat.S_IMODE(mode) & 0o700)
        else:
            try:
                os.fchmod(made, 0o600)  # the umask may have taken more away
            finally:
                os.close(made)
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"{path} cannot be read or written: {error.strerror}") from error


def prepare(db: apsw.Connection, *, exclusive: bool, schemas: Sequence[Schema] = ()) -> None:
    """Make a fresh connection the writer of its database: settings, migrations, check of the log's end. `schemas` are
    the tables that kinds bring.

    `exclusive` does without shared memory, for file systems that have none: no second connection can open the database.
    Raises `Corrupt`, `StoreError`, and what SQLite raises.
    """
    if exclusive:
        db.execute("pragma locking_mode = exclusive")
    db.set_busy_timeout(BUSY_MS)
    db.execute(f"pragma auto_vacuum = {INCREMENTAL}")  # this takes effect on new databases only
    mode = rows(db, "pragma journal_mode = wal")[0][0]
    if mode != "wal":
        raise StoreError(f"SQLite cannot use a write-ahead log here ({mode}); use a local file system")
    db.execute("pragma synchronous = full")
    db.execute("pragma temp_store = memory")  # what undoes a savepoint would be written to a file of its own
    db.execute(f"pragma wal_autocheckpoint = {WAL_PAGES_AT_FIRST}")  # unless `store.checkpoints` does it
    db.execute(f"pragma journal_size_limit = {_WAL_BYTES_KEPT}")
    _migrate(db)
    schema.migrate(db, schemas)
    _check_tail(db)
    if not exclusive:
        _make_smaller(db)
        _lengthen(Path(f"{db.filename}-wal"))


def _make_smaller(db: apsw.Connection) -> None:
    """Write a database anew whose free pages cannot be given back bit by bit, once most of it is free: one that an
    earlier Hawker made. Without room for that it stays as it is."""
    [[free]], [[count]] = rows(db, "pragma freelist_count"), rows(db, "pragma page_count")
    if free > max(MUCH_FREE, count // 2) and rows(db, "pragma auto_vacuum") != [(INCREMENTAL,)]:
        with suppress(apsw.FullError, apsw.BusyError):
            db.execute(f"pragma auto_vacuum = {INCREMENTAL}")
            db.execute("vacuum")


def _lengthen(path: Path) -> None:
    """Fill the write-ahead log's file with zeros up to where it has most likely been checkpointed.

    A commit that makes the file longer has to sync its length, too: 0.27 ms instead of 0.12. Zeros are no frame with
    the right salt, so SQLite reads the log up to them, as it does after a power cut. A disk that is nearly full goes
    without: its last room is for commits.
    """
    with suppress(OSError), path.open("r+b") as file:
        missing = _WAL_BYTES_AT_FIRST - file.seek(0, os.SEEK_END)
        disk = os.fstatvfs(file.fileno())
        if 0 < missing < disk.f_bavail * disk.f_frsize // 2:
            file.write(bytes(missing))
            file.flush()
            os.fsync(file.fileno())


def translated(error: BaseException, what: str = "the worker's database") -> StoreError | Broken:
    """Our error for one of SQLite's, or for any other that ended a commit."""
    ours = _ours(error, what)
    ours.__cause__ = error
    return ours


def _ours(error: BaseException, what: str) -> StoreError | Broken:
    match error:
        case apsw.FullError():
            return DiskFull(
                f"{what}: the disk is full: {error}",
                hint="make room on it; what runs goes on, and machines can be destroyed",
            )
        case apsw.CorruptError() | apsw.NotADBError():
            return Corrupt(
                f"{what} is damaged: {error}",
                hint="stop the agent and run `hawker worker verify` on its directory",
            )
        case apsw.IOError() | apsw.ReadOnlyError() | apsw.CantOpenError():
            return DiskFailed(
                f"{what} cannot be read or written: {error}",
                hint=LOOK,
            )
        case apsw.BusyError() | apsw.LockedError():
            return StoreError(f"{what} is being written by another process: {error}")
        case _:
            return Broken(f"{what}: {type(error).__name__}: {error}")


def _migrate(db: apsw.Connection) -> None:
    """Apply the numbered SQL files above the database's version, all in one transaction."""
    files = sorted((Path(__file__).parent / "migrations").glob("*.sql"))
    version = rows(db, "pragma user_version")[0][0]
    newest = int(files[-1].stem)
    if version > newest:
        raise StoreError(f"this database has version {version}; this Hawker knows up to {newest}: upgrade it")
    if version < newest:
        with db:
            for file in files:
                if int(file.stem) > version:
                    db.execute(file.read_text())
            db.execute(f"pragma user_version = {newest}")


def cut_off(db: apsw.Connection) -> tuple[int, bytes]:
    """The last record of the log that was cut off, 0 if none was, and the checksum that the first one left follows.
    Raises `Corrupt`."""
    found = rows(db, f"select cast(body as blob) from {LogFloorRow.table} where id = ?", (LogFloorRow.KEY,))
    if not found:
        return 0, log.GENESIS
    try:
        floor = msgspec.json.decode(found[0][0], type=LogFloorRow)
        return floor.through, bytes.fromhex(floor.checksum) if floor.through else log.GENESIS
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise Corrupt(f"table {LogFloorRow.table}: it does not say how far the log was cut off: {error}") from error


def _check_tail(db: apsw.Connection, records: int = 100) -> None:
    """Check the last records at start-up; the whole log is `store.verify`'s work."""
    tail = rows(db, f"select {log.BYTES} from log order by seq desc limit {records + 1}")
    tail.reverse()
    previous = cut_off(db)[1] if len(tail) <= records else tail.pop(0)[-1]
    for row in tail:
        if log.checksum(previous, row[:-1]) != row[-1]:
            raise Corrupt(f"log record {row[0]}: its checksum does not match its content", seq=row[0])
        previous = row[-1]

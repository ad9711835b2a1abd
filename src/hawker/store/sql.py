"""Read-only SQL for people: one statement, on a connection that cannot write, with limits on time, rows and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import Any

import apsw
import msgspec

from hawker.errors import Invalid
from hawker.store.connection import translated

ROWS_MAX = 10_000
SECONDS_MAX = 3.0  # below what a broker waits for an answer
TEXT_MAX = 64 << 20
"""Characters of text in an answer, and bytes of the longest value on the way there."""
_STEPS_BETWEEN_LOOKS = 10_000
_LOOKS_MAX = 3_000
"""Where time is a simulation's, work is counted instead: about `SECONDS_MAX` of it."""
BUSY_MS = 1000


class Found(msgspec.Struct, frozen=True):
    """A query's answer. `tables`: the names of what was read, views and the tables below them."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    tables: frozenset[str]


def run_query(path: str, query: str) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows. Blobs come as hexadecimal text. Raises `Invalid` with SQLite's own words."""
    found = read(path, query)
    return found.columns, [list(row) for row in found.rows]


def read(path: str, query: str, text_max: int = TEXT_MAX, seconds_max: float = SECONDS_MAX) -> Found:
    """Run a query on the database at `path`, over a connection of its own. Raises `Invalid`, `StoreError`."""
    with _explained(query, seconds_max):
        db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(BUSY_MS)
            db.limit(apsw.SQLITE_LIMIT_LENGTH, TEXT_MAX)
            db.execute("pragma query_only = on")
            deadline = monotonic() + seconds_max
            return _read(db, query, lambda: monotonic() > deadline, text_max)
        finally:
            db.close()


def read_on(db: apsw.Connection, query: str, text_max: int = TEXT_MAX) -> Found:
    """Run a query on a connection that others use, too, where a simulated disk takes no second one. Nothing of the
    query stays on it. Raises `Invalid`."""
    looks = count(1)
    length = db.limit(apsw.SQLITE_LIMIT_LENGTH, TEXT_MAX)
    try:
        with _explained(query):
            return _read(db, query, lambda: next(looks) > _LOOKS_MAX, text_max)
    finally:
        db.limit(apsw.SQLITE_LIMIT_LENGTH, length)


def _read(db: apsw.Connection, query: str, too_long: Callable[[], bool], text_max: int) -> Found:
    tables: set[str] = set()

    def allow(operation: int, name: str | None, *more: str | None) -> int:
        if operation == apsw.SQLITE_READ and name:
            tables.add(name)
        return apsw.SQLITE_OK if operation in _READING else apsw.SQLITE_DENY

    columns: list[str] = []
    rows: list[tuple[Any, ...]] = []
    characters = 0
    seen = count()
    cursor = db.cursor()
    db.set_progress_handler(too_long, _STEPS_BETWEEN_LOOKS)
    db.set_authorizer(allow)
    try:

        def begun(cursor: apsw.Cursor, *_: Any) -> bool:
            nonlocal columns
            if next(seen):
                return False
            columns = [name for name, *_ in cursor.get_description()]
            return True

        cursor.exec_trace = begun
        for row in cursor.execute(query, can_cache=False):
            shown = tuple(v.hex() if isinstance(v, bytes) else v for v in row)
            rows.append(shown)
            characters += sum(len(v) for v in shown if isinstance(v, str))
            if len(rows) > ROWS_MAX:
                raise Invalid("query", query, f"gives more than {ROWS_MAX} rows; add a limit")
            if characters > text_max:
                raise Invalid("query", query, f"gives more than {text_max} characters of text; add a limit")
    finally:
        cursor.close(True)
        db.set_authorizer(None)
        db.set_progress_handler(None)
    return Found(columns, rows, frozenset(tables))


@contextmanager
def _explained(query: str, seconds_max: float = SECONDS_MAX) -> Iterator[None]:
    try:
        yield
    except apsw.ExecTraceAbort as error:
        raise Invalid("query", query, "give one statement at a time") from error
    except apsw.InterruptError as error:
        raise Invalid("query", query, f"took longer than {seconds_max:g} s") from error
    except (apsw.CantOpenError, apsw.IOError, apsw.CorruptError, apsw.NotADBError) as error:
        raise translated(error, "the database") from error
    except (apsw.Error, UnicodeError) as error:
        raise Invalid("query", query, str(error)) from error


_READING = frozenset({apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE})

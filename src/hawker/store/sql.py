"""Read-only SQL for people: one statement, on a connection that cannot write, with limits on time and rows."""

from __future__ import annotations

from itertools import count
from time import monotonic
from typing import Any

import apsw

from hawker.errors import Invalid

ROWS_MAX = 10_000
SECONDS_MAX = 3.0  # below what a broker waits for an answer
_STEPS_BETWEEN_LOOKS = 10_000


def run_query(path: str, query: str) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows. Blobs come as hexadecimal text. Raises `Invalid` with SQLite's own words."""
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    deadline = monotonic() + SECONDS_MAX
    db.set_progress_handler(lambda: monotonic() > deadline, _STEPS_BETWEEN_LOOKS)
    try:
        cursor = db.cursor()
        columns: list[str] = []
        rows: list[list[Any]] = []
        db.execute("pragma query_only = on")
        db.set_authorizer(_allow)
        seen = count()
        cursor.exec_trace = lambda *_: next(seen) == 0
        for row in cursor.execute(query):
            if not columns:
                columns = [name for name, *_ in cursor.get_description()]
            rows.append([v.hex() if isinstance(v, bytes) else v for v in row])
            if len(rows) > ROWS_MAX:
                raise Invalid("query", query, f"gives more than {ROWS_MAX} rows; add a limit")
        return columns, rows
    except apsw.ExecTraceAbort as error:
        raise Invalid("query", query, "give one statement at a time") from error
    except apsw.InterruptError as error:
        raise Invalid("query", query, f"took longer than {SECONDS_MAX:g} s") from error
    except apsw.Error as error:
        raise Invalid("query", query, str(error)) from error
    finally:
        db.close()


_READING = frozenset({apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE})


def _allow(operation: int, *details: str | None) -> int:
    return apsw.SQLITE_OK if operation in _READING else apsw.SQLITE_DENY

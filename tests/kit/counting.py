"""What SQLite does for a change, counted: statements and the steps of its virtual machine. Noise cannot touch them.

with counting() as counts:  # before the database is opened
    ...
    found = await counts.of(change())
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import msgspec

MARK = "987654321"
"""Stands in the key and the body of a row for its number, also as a number."""


class Count(msgspec.Struct, frozen=True):
    """`steps` of SQLite's virtual machine grow with every row that is looked at, `scanned` counts those of them that go
    on to the next row of a whole table. `commits` that wrote something."""

    statements: int = 0
    steps: int = 0
    scanned: int = 0
    commits: int = 0


class Counts:
    """Of every connection that is opened meanwhile."""

    def __init__(self) -> None:
        self._statements: list[tuple[str, int, int]] = []

    def watch(self, db: apsw.Connection) -> None:
        db.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._ended)

    def _ended(self, event: dict[str, Any]) -> None:
        status = event["stmt_status"]
        steps, scanned = status["SQLITE_STMTSTATUS_VM_STEP"], status["SQLITE_STMTSTATUS_FULLSCAN_STEP"]
        self._statements.append((event["sql"], steps, scanned))

    async def of(self, action: Awaitable[Any]) -> Count:
        """What was counted from its begin to its end."""
        self._statements.clear()
        await action
        found = list(self._statements)
        return Count(
            statements=len(found),
            steps=sum(steps for _, steps, _ in found),
            scanned=sum(scanned for _, _, scanned in found),
            commits=sum(sql == "commit" for sql, _, _ in found),
        )


@contextmanager
def counting() -> Iterator[Counts]:
    counts = Counts()
    apsw.connection_hooks.append(counts.watch)
    try:
        yield counts
    finally:
        apsw.connection_hooks.remove(counts.watch)


def fill(path: str, table: str, key: str, body: bytes, numbers: range) -> None:
    """Write a row for each number with a step, as `store.tx` would, in one statement: `MARK` in key and body is the
    number. They are not in the log, so what reads it is not to be asked."""
    db = apsw.Connection(path)
    db.set_busy_timeout(5000)
    db.execute(
        f"insert into {table} (id, body) "
        "with recursive number(n) as (select ? union all select n + ? from number where n + ? < ?) "
        f"select replace(?, '{MARK}', n), replace(?, '{MARK}', n) from number",
        (numbers.start, numbers.step, numbers.step, numbers.stop, key, body.decode()),
    )
    db.close()


class _Counted(apsw.VFSFile):
    def __init__(self, vfs: Syncs, filename: Any, flags: list[int]) -> None:
        super().__init__(vfs.usual, filename, flags)
        self._vfs = vfs

    def xSync(self, flags: int) -> None:  # SQLite's name
        self._vfs.count += 1
        super().xSync(flags)


class Syncs(apsw.VFS):
    """SQLite's own file system, with a count of how often it waited for the disk."""

    def __init__(self) -> None:
        self.count = 0
        self.usual = apsw.vfs_names()[0]
        super().__init__("counted", self.usual, makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # SQLite's name
        return _Counted(self, name, flags)


@contextmanager
def counting_syncs() -> Iterator[Syncs]:
    """Of every database that is opened meanwhile."""
    syncs = Syncs()
    try:
        yield syncs
    finally:
        syncs.unregister()
        apsw.set_default_vfs(syncs.usual)

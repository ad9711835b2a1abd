"""Brings what SQLite's write-ahead log holds into the database itself, between commits.

SQLite does that within a commit, every so many pages: it writes all of them and waits for the disk twice, while whoever
waits for that commit, and the loop with it, stand still. Here a thread does it, with a connection of its own, when
nothing has been committed for a moment. Commits go on meanwhile. SQLite begins the log anew with the first commit that
finds all of it brought, so the thread goes on until nothing was written while it worked.

This loses no durability: what is acknowledged is in the log on the disk, and stays there until the database on the disk
has it, too.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import apsw

from hawker.store.connection import BUSY_MS, WAL_PAGES_AT_FIRST, rows

PAGES = WAL_PAGES_AT_FIRST // 2
"""Once the log has this many pages, a checkpoint waits for a quiet moment."""
QUIET_S = 0.02
"""A moment is quiet when nobody has committed for this long."""
ROUNDS_MOST = 8
"""Rounds of one checkpoint at most: each brings what was committed during the one before it."""


class Checkpoints:
    """The checkpoints of the database that `writer` writes. Close them before its connections.

    The limits are lengths of the log. From `pages` on a thread waits for a quiet moment, and from `at_once` on it waits
    no longer. From `most` on commits make checkpoints themselves, because they outrun the thread; a log that is longer
    still has a reader that needs it, or the disk is full."""

    def __init__(
        self,
        writer: apsw.Connection,
        *,
        pages: int = PAGES,
        at_once: int = PAGES * 3 // 2,
        most: int = WAL_PAGES_AT_FIRST * 4,
    ) -> None:
        self.pages = pages
        self.at_once = at_once
        self.most = most
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._length = 0  # the log's pages after the last commit
        self._fresh = False  # whether anything was committed since `bring`
        self._again = 0  # after an incomplete checkpoint: the length from which the next one is tried
        self._db = apsw.Connection(writer.filename, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            self._db.set_busy_timeout(BUSY_MS)
            self._db.execute("pragma synchronous = full")
            rows(self._db, "select count(*) from sqlite_schema")  # it is not opened before
        except apsw.Error:
            self._db.close(True)
            raise
        writer.set_wal_hook(self._committed)  # in the place of SQLite's own

    def close(self) -> None:
        """Wait for what is under way. May be called again. Commits after it do it themselves, if need be."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(apsw.Error):
            self._db.close(True)

    def bring(self) -> None:
        """Make a checkpoint soon, however short the log is, unless nothing was committed since the last call."""
        if self._fresh:
            self._fresh = False
            self._begin()

    def _committed(self, writer: apsw.Connection, name: str, pages: int) -> int:
        """A commit has left so many pages in the log. This must not raise: SQLite would report the commit as failed,
        though it is on the disk."""
        self._length = pages
        self._fresh = True
        if pages >= self.most:
            with suppress(apsw.Error):  # the disk is full, or the thread is at it: the next commit tries again
                writer.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif pages < self.pages:
            self._again = 0  # it was begun anew
        elif pages >= self._again:
            self._begin()
        return apsw.SQLITE_OK

    def _begin(self) -> None:
        if self._closed.is_set() or self._busy():
            return
        thread = threading.Thread(target=self._run, name="hawker-checkpoint", daemon=True)
        with suppress(RuntimeError):  # no thread can be had
            thread.start()
            self._thread = thread

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        self._wait_for_quiet()
        before = 0
        with suppress(apsw.Error):  # as above; whoever reads finds damage
            for _ in range(ROUNDS_MOST):
                pages, brought = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                if brought < pages or pages == before:
                    break  # a reader still needs the older pages, or all are brought
                before = pages
        self._again = self._length + self.pages // 4

    def _wait_for_quiet(self) -> None:
        length = -1
        while length != self._length < self.at_once:
            length = self._length
            if self._closed.wait(QUIET_S):
                return

"""Brings what SQLite's write-ahead log holds into the file itself, beside the event loop.

SQLite would do that within a commit, once in so many pages: it writes all of them, and waits for the disk twice. That
is nothing for a database, but the loop that waits for the commit serves users' requests, too. Where rows change all the
time, those requests would stand still for a tenth of a second every few seconds.

The log begins again at its start only once all of it was brought and nothing was written meanwhile. So a thread brings
it in rounds, each of which finds less, and keeps writers out during the last round, which waits for the disk as the
others do. `holding` says so: a writer that can wait writes a moment later.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import apsw

from hawker.store.connection import BUSY_MS, rows

PAGES = 4000
"""Pages of the log after which a checkpoint begins: 16 MB."""
PAGES_LEFT = 100
"""The last round begins when no more pages than these were written meanwhile."""
ROUNDS_MOST = 5
LAST_MS = 20
"""How long the last round waits for a commit, and for readers of what was there before. Writers should not wait long
for these: the checkpoint is tried again later."""
PAGES_MOST = 4 * PAGES
"""A writer that is faster than the checkpoint waits for it at this size."""


class Checkpoints:
    """The checkpoints of one file, by a connection of their own. `close` them before the other connections."""

    def __init__(self, path: str, writer: apsw.Connection, *, pages: int = PAGES, most: int = PAGES_MOST) -> None:
        self._path = path
        self._pages = pages
        self._most = most
        self._thread: threading.Thread | None = None
        self._again = 0  # pages from which it is tried again: somebody read what was there before
        self.holding = False
        writer.set_wal_hook(self._committed)  # in the place of SQLite's own

    def close(self) -> None:
        """Wait for a checkpoint that is under way. May be called again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _committed(self, writer: apsw.Connection, name: str, pages: int) -> int:
        """SQLite tells that so many pages are in the log."""
        if pages < self._pages:
            self._again = 0  # the log began again at its start
            return apsw.SQLITE_OK
        if pages >= self._most:
            with suppress(apsw.Error):  # the disk is full: the log grows, and the next checkpoint tries it again
                writer.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif pages >= self._again and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        return apsw.SQLITE_OK

    def _run(self) -> None:
        with suppress(apsw.Error):  # the same; and readers find damage
            db = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                db.set_busy_timeout(BUSY_MS)
                rows(db, "select count(*) from sqlite_schema")  # not opened before it is needed
                before = 0
                for _ in range(ROUNDS_MOST):
                    _, brought = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                    if brought - before <= PAGES_LEFT:
                        break
                    before = brought
                self.holding = True
                db.set_busy_timeout(LAST_MS)
                pages, brought = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                self._again = 0 if brought == pages else pages + self._pages // 4
            finally:
                self.holding = False
                db.close(True)

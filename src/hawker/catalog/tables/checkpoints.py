"""Brings what SQLite's write-ahead log holds into the file itself, beside the event loop.

SQLite does that within a commit, every so many pages: it writes all of them, and waits for the disk twice. That is
nothing for a database, but the loop that waits for the commit carries users' requests, too, and where rows change all
the time they would stand still for a tenth of a second every few seconds.

The log begins anew only when all of it was brought, and what is written meanwhile is not. So a thread brings it in
rounds, each of which finds less, and keeps writers out during the last one, which waits for the disk as the others do.
`holding` says so: who can, writes a moment later.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import apsw

from hawker.store.connection import BUSY_MS, rows

PAGES = 4000
"""Of the log, after which it is begun with: 16 MB."""
PAGES_LEFT = 100
"""What was written meanwhile and is no more than that, is brought while writers wait."""
ROUNDS_MOST = 5
LAST_MS = 20
"""So long the last round waits for a commit, and for those who read what was there before. Writers should not wait long
for them: it is tried again later."""
PAGES_MOST = 4 * PAGES
"""Who writes faster than that is brought, waits for it."""


class Checkpoints:
    """Of one file, by a connection of its own. `close` it before the others."""

    def __init__(self, path: str, writer: apsw.Connection, *, pages: int = PAGES, most: int = PAGES_MOST) -> None:
        self._path = path
        self._pages = pages
        self._most = most
        self._thread: threading.Thread | None = None
        self._again = 0  # pages of this log from which it is tried again: somebody read what was there before
        self.holding = False
        writer.set_wal_hook(self._committed)  # in the place of SQLite's own

    def close(self) -> None:
        """Wait for one that is under way. May be called again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _committed(self, writer: apsw.Connection, name: str, pages: int) -> int:
        """So many pages are in the log."""
        if pages < self._pages:
            self._again = 0  # it was begun anew
            return apsw.SQLITE_OK
        if pages >= self._most:
            with suppress(apsw.Error):  # of a full disk: the log grows, and the next one tries it again
                writer.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif pages >= self._again and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        return apsw.SQLITE_OK

    def _run(self) -> None:
        with suppress(apsw.Error):  # the same; and damage is found by those who read
            db = apsw.Connection(self._path, flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                db.set_busy_timeout(BUSY_MS)
                rows(db, "select count(*) from sqlite_schema")  # it is not opened before
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

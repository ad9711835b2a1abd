"""One SQLite database: durable when acknowledged, one writer, commits shared by whoever writes in the same tick.

`Store.submit(change)` runs `change(tx)` inside a transaction together with everything else submitted in the same
tick of the event loop, and returns once that transaction is on disk (WAL, `synchronous=FULL`). A change that raises
is rolled back alone; the others go on. Commits are made on the loop while the disk is quick and in a thread once it
is slow: a fsync of 0.1 ms is cheaper than waking a thread, one of 10 ms must not stop the loop. The store
measures commits by the loop's clock, so in virtual time, where a commit takes none, all are made on the loop. A single
slow commit may only mean that the processors were busy, so it takes some in a row.

What a change may do is in `store.tx`. Reads outside a change go to a second connection and see what is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw

from hawker.errors import DiskFailed, StoreError
from hawker.host import Host
from hawker.model.rows import Row
from hawker.store import log, schema
from hawker.store.checkpoints import Checkpoints
from hawker.store.connection import LOOK, make_private, prepare, rows, translated
from hawker.store.reserve import Reserve
from hawker.store.schema import Schema
from hawker.store.tx import Commit, Known, Reads, Tx

T = TypeVar("T")
SLOW_COMMIT_S = 0.002
SLOW_IN_A_ROW = 3
BATCH_MOST = 512  # changes in one commit: about 10 ms of work, then the loop gets its turn


class _Pending:
    __slots__ = ("change", "error", "future", "tx", "value")

    def __init__(self, change: Callable[[Tx], Any], future: asyncio.Future[Any]) -> None:
        self.change = change
        self.future = future
        self.tx: Tx | None = None
        self.value: Any = None
        self.error: Exception | None = None  # its own: what it met may be uncommitted, so this is told after the commit

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Store:
    """Open with `Store.open`. `on_commit` is told "before" and "after" each commit: the crash tests cut there.

    `on_change` are called at the end of each change, inside its transaction, with the rows that it wrote, and may write
    more: that is how what a node publishes gets into the same commit.

    `types` maps each table to the type of its rows.

    `reserve`, when set, is given up by the first commit that finds no room; its changes are tried once more then.

    `full`: the last commit found no room, or the disk has failed; new orders are to be refused. `failed` says why
    nothing can be written until the database is opened anew, and is empty while all is well: an I/O error of a commit
    leaves open whether it is on the disk, and only reading it back at start-up tells.
    """

    def __init__(
        self,
        db: apsw.Connection,
        reader: apsw.Connection,
        host: Host,
        on_commit: Callable[[str], None] | None = None,
        checkpoints: Checkpoints | None = None,
        types: Mapping[str, type[Row]] | None = None,
    ) -> None:
        self._db = db
        self._checkpoints = checkpoints
        self._reader = reader
        self.types = types or schema.types(())
        self._host = host
        self._on_commit = on_commit
        self._queue: list[_Pending] = []
        self._scheduled = False
        self._committing: asyncio.Future[float] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._slow_commits = 0  # in a row
        self._closed = False
        self.on_change: list[Callable[[Tx, Known], None]] = []
        self.read = Reads(reader)
        self.commits = 0
        self.reserve: Reserve | None = None
        self.full = False
        self.failed = ""
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
        schemas: Sequence[Schema] = (),
    ) -> Store:
        """Open or make the database at `path`. Raises `Corrupt` when SQLite or the log's end says so, `StoreError` when
        it was written by a newer Hawker, has things of a kind that is not installed, or cannot be opened. `schemas` are
        the tables that kinds bring.

        `vfs` names a simulated disk. It has no shared memory, so one connection serves reads and writes, and all on the
        caller's thread.
        """
        if vfs is None:
            make_private(path)
        with ExitStack() as undo:
            try:
                db = apsw.Connection(str(path), vfs=vfs)
                undo.callback(_close, db)
                prepare(db, exclusive=vfs is not None, schemas=schemas)
                reader = db
                if vfs is None:
                    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
                    undo.callback(_close, reader)
                checkpoints = None
                if vfs is None:
                    checkpoints = Checkpoints(db)
                    undo.callback(checkpoints.close)
                store = cls(db, reader, host, on_commit, checkpoints, schema.types(schemas))
            except apsw.Error as error:
                raise translated(error, str(path)) from error
            undo.pop_all()
        return store

    @property
    def slow(self) -> bool:
        """Whether the disk is slow, so that commits are made in a thread."""
        return self._slow_commits >= SLOW_IN_A_ROW

    @property
    def committing(self) -> bool:
        """Whether a commit is under way in the thread."""
        return self._committing is not None

    async def submit(self, change: Callable[[Tx], T], *, not_before_s: float = 0.0) -> T:
        """Run `change` in the next commit and return what it returned, once that is on disk. With `not_before_s`, by
        the event loop's clock, the change waits for that time first, and other commits go ahead of it.

        Raises what `change` raises and `DiskFull`: then nothing of it is kept. Any other `StoreError`, and a cancel,
        leave open whether it was.
        """
        if not_before_s and (left_s := not_before_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)
        if self._closed:
            raise StoreError("the database is closed")
        if self.failed:
            raise DiskFailed(self.failed, hint=LOOK)
        pending = _Pending(change, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        self._schedule()
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
        self._shut()

    def checkpoint(self) -> None:
        """Bring what was committed into the database itself, as far as nobody reads what was there before. Call
        this when nobody waits. On a full disk everything stays in the write-ahead log."""
        with suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def checkpoint_later(self) -> None:
        """Make a checkpoint in a thread, if anything was committed since the last call."""
        if self._checkpoints:
            self._checkpoints.bring()

    def abandon(self) -> None:
        """Close as a killed process would: what is not committed is gone, and whoever waits in `submit` is never
        answered. For crash tests."""
        self._closed = True
        self._queue = []
        self._committing = None  # its thread is waited for, its outcome is told to nobody
        self._shut(checkpoint=False)

    def _shut(self, *, checkpoint: bool = True) -> None:
        if self._thread:
            self._thread.shutdown()
        if self._checkpoints:
            self._checkpoints.close()
        if not checkpoint:
            self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        if self._reader is not self._db:
            _close(self._reader)
        _close(self._db)

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and self._committing is None:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._queue or self._committing:
            return
        batch, self._queue = self._queue[:BATCH_MOST], self._queue[BATCH_MOST:]
        saved = self._seq, self._checksum
        committing = False
        try:
            self._db.execute("begin immediate")
            try:
                self._apply_all(batch)
            except apsw.ConstraintError:  # a table refuses a row: see whose it is
                self._db.execute("rollback")
                self._db.execute("begin immediate")
                self._seq, self._checksum = saved
                self._apply_all(batch, one_by_one=True)
            if self._on_commit:
                self._on_commit("before")
            if self.slow:
                self._commit_in_thread(batch, saved)
                return
            clock_s = asyncio.get_running_loop().time
            started = clock_s()
            committing = True
            self._db.execute("commit")
            # A simulated disk stays on one thread: its only connection is read from the loop.
            slow = clock_s() - started > SLOW_COMMIT_S and self._reader is not self._db
            self._slow_commits = self._slow_commits + 1 if slow else 0
        except Exception as error:
            self._refused(batch, saved, error, committing=committing)
        except BaseException as error:
            self._cut(batch, error)
        else:
            self._committed(batch)
        self._schedule()

    def _apply_all(self, batch: list[_Pending], *, one_by_one: bool = False) -> None:
        """Run the changes of a commit and write what they leave. Raises when SQLite has rolled back the whole
        transaction, or refuses a row; `one_by_one`, the change is refused that wrote it."""
        commit = Commit(self._db)
        for pending in batch:
            pending.tx = pending.error = None
            self._apply(pending, commit, one_by_one)
        commit.write()

    def _apply(self, pending: _Pending, commit: Commit, flush: bool) -> None:
        if pending.future.cancelled():
            return  # its caller left before it began
        db = self._db
        tx = Tx(db, self._host.now_ms(), self._host.steady_ms(), commit)
        try:
            pending.value = pending.change(tx)
            for called in self.on_change:
                called(tx, tx.changed())
            if flush:
                tx.flush()
            if db.get_autocommit():
                raise apsw.AbortError("SQLite has rolled the transaction back inside a change")
            self._seq, self._checksum = tx.done(self._seq, self._checksum)
            pending.tx = tx
        except Exception as error:
            if commit.refused:
                raise
            if db.get_autocommit() or isinstance(error, apsw.FullError):  # no room for one is no room for the batch
                raise _from_sqlite(error) from error
            tx.undo()
            pending.error = translated(error) if isinstance(error, apsw.Error | StopIteration) else error
        finally:
            tx.end()

    def _commit_in_thread(self, batch: list[_Pending], saved: tuple[int, bytes]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hawker-commit")

        clock_s = asyncio.get_running_loop().time

        def commit() -> float:
            started = clock_s()
            self._db.execute("commit")
            return clock_s() - started

        def done(future: asyncio.Future[float]) -> None:
            if self._committing is not future:
                return  # abandoned
            self._committing = None
            error = future.exception()
            if error is None:
                if future.result() <= SLOW_COMMIT_S / 2:  # half: no flutter around the limit
                    self._slow_commits = 0
                self._committed(batch)
            elif isinstance(error, Exception):
                self._refused(batch, saved, error, committing=True)
            else:
                self._cut(batch, error)
            self._schedule()

        self._committing = asyncio.get_running_loop().run_in_executor(self._thread, commit)
        self._committing.add_done_callback(done)

    def _committed(self, batch: list[_Pending]) -> None:
        self.commits += 1
        self.full = False
        try:
            if self._on_commit:
                self._on_commit("after")
            for pending in batch:
                if pending.error:
                    pending.fail(pending.error)
                if pending.tx is None:
                    continue
                for call in pending.tx.after:
                    _call(call)
                if not pending.future.cancelled():
                    pending.future.set_result(pending.value)
        except BaseException as error:
            self._cut(batch, error)

    @property
    def takes_orders(self) -> bool:
        """Whether the disk has room for new orders."""
        return not self.full and not (self.reserve and self.reserve.given_up)

    def _refused(self, batch: list[_Pending], saved: tuple[int, bytes], error: Exception, *, committing: bool) -> None:
        """Nothing of the batch is kept, as far as we know."""
        self._seq, self._checksum = saved
        self.full = isinstance(error, apsw.FullError)
        try:
            if not self._db.get_autocommit():
                self._db.execute("rollback")
        except apsw.Error as second:
            error, committing = second, True
        if committing and not isinstance(error, apsw.FullError | apsw.BusyError):
            # The commit's mark may be in the write-ahead log though its sync failed, and after a power cut it would
            # count. The next commit would write over it, but that is no promise: stop, and let start-up find out.
            self.full = True
            self.failed = f"{translated(error)}; restart the worker: it reads back what the disk holds"
            batch, self._queue = batch + self._queue, []
        if self.full and not self.failed and self.reserve and self.reserve.give_up():
            self._queue = batch + self._queue
            return
        for pending in batch:
            pending.fail(DiskFailed(self.failed, hint=LOOK) if self.failed else translated(error))

    def _cut(self, batch: list[_Pending], error: BaseException) -> None:
        """Ctrl-C, or the cut of a crash test, ends the program. Fail whatever waits, and write nothing more."""
        self.failed = f"the database was cut off: {error!r}"
        with suppress(apsw.Error):
            if not self._db.get_autocommit():
                self._db.execute("rollback")
        for pending in batch + self._queue:
            pending.fail(error)
        self._queue = []
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error


def _close(db: apsw.Connection) -> None:
    with suppress(apsw.Error):  # a last checkpoint may fail; the write-ahead log keeps what it would have copied
        db.close(True)


def _call(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # the change is on disk: its caller must hear that, and the others theirs
        problem = {"message": "a call after a commit failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(problem)


def _from_sqlite(error: BaseException) -> apsw.Error:
    """SQLite's error behind what a change made of it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, apsw.Error):
        seen = seen.__cause__ or seen.__context__
    return seen or apsw.AbortError(f"SQLite has rolled the transaction back: {error!r}")

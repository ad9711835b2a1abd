"""Keeps the log, and the rows that are over, from growing for ever.

The oldest records are cut off, some hundred in a commit, once there are more of them than are kept, or older ones. A
row whose last image is among them gets a new image at the log's end, so what is left of the log still gives every
table; one that is over is deleted in its place. `LogFloorRow` says how much is gone, and the checksum that the first
record left follows, so `store.verify` checks what is left as it checks a whole log. All of one batch is one commit: a
cut by a crash is there, or it is not.

An image is a row's last one if the table has the same: each change of a row writes both. So no search is needed. A row
that changed and changed back gets a new image without need, which does no harm.

Pages that become free are used again. Those above a reserve go back to the disk, some in a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hawker.model.rows import LogFloorRow, Row
from hawker.store import log
from hawker.store.db import Store
from hawker.store.tx import Tx

BATCH = 128
"""How many records one commit cuts: some milliseconds of work. Compaction waits until a bound is passed by as many."""
IMAGES = 256
"""How many rows' images one commit looks at. A record with more of them is cut after several commits."""
PAUSE_S = 0.01
"""The pause between two commits of one sweep: whoever waits for another commit goes first."""
STEPS_A_SIZE, TIMES_MOST = 16, 8
"""After so many commits of one sweep each does twice as much, up to so many times as much. In a busy worker there is
time for few commits, and records would come faster than they go."""
FREE_PAGES = 1024
"""Free pages that stay for new records; a quarter of the database stays if that is more."""
PAGES_BACK = 64
"""Pages that go back to the disk in one commit: as many others may have to move."""
ROWS_A_RECORD = 4
"""Rows in the database for each record that is kept at least. With fewer records than that, writing the rows' images
again would be more work than everything else."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the past is kept: until it is older than `seconds`, and no more than `records` of the log."""

    records: int = 20_000
    seconds: float = 86_400.0


class Last(NamedTuple):
    """A row as its table has it, whose last image is about to be cut off."""

    kind: type[Row]
    key: str
    body: bytes

    def read(self) -> Any:
        return msgspec.json.decode(self.body, type=self.kind)


Named = tuple[type[Row], str]
"""A row by its type and key."""
Over = Callable[[Tx, Collection[Last]], Collection[Named]]
"""Names the rows among these that are over, and others that go with them; compaction deletes them."""


class Compaction:
    """The compaction of one store. `owner` is what its records are about; `over` decides what need not stay. `batch`
    and `images` bound a commit, `free` is how many pages are kept."""

    def __init__(
        self,
        store: Store,
        owner: str,
        kept: Kept,
        over: Over,
        *,
        batch: int = BATCH,
        images: int = IMAGES,
        free: int = FREE_PAGES,
    ) -> None:
        self._store = store
        self._owner = owner
        self._kept = kept
        self._over = over
        self._batch = batch
        self._images = images
        self._free = free
        self._begun = 0, 0  # a record with too many images for one commit, and how many of them were seen to

    async def sweep(self) -> None:
        """Do all that is due, with pauses. Raises `StoreError`; nothing is lost by one."""
        for number in count():
            times = min(2 ** (number // STEPS_A_SIZE), TIMES_MOST)
            if not await self._store.submit(partial(self.step, times=times)):
                return
            await asyncio.sleep(PAUSE_S)

    def step(self, tx: Tx, times: int = 1) -> bool:
        """Do one commit's work, `times` as much as usual. Returns whether there was any."""
        floor = tx.get(LogFloorRow, LogFloorRow.KEY) or LogFloorRow()
        if self._is_due(tx, floor, self._batch * times):
            self._cut(tx, floor, self._batch * times, self._images * times)
            return True
        return tx.give_back(PAGES_BACK * times, above=self._free)

    def _is_due(self, tx: Tx, floor: LogFloorRow, batch: int) -> bool:
        kept = self._kept
        length = (tx.query("select max(seq) from log")[0][0] or 0) - floor.through
        if length - batch >= max(kept.records, floor.rows // ROWS_A_RECORD):
            return True
        if length - batch < 2 * floor.rows // self._images:
            return False  # this would write almost as many images again
        found = tx.query("select at_ms from log where seq = ?", (floor.through + batch,))
        return bool(found) and found[0][0] < tx.now_ms - int(kept.seconds * 1000)

    def _cut(self, tx: Tx, floor: LogFloorRow, batch: int, most: int) -> None:
        through, checksum, images = floor.through, b"", dict[tuple[str, str], bytes | None]()
        sql = "select seq, writes, checksum from log where seq > ? order by seq limit ?"
        for seq, writes, ends in tx.query(sql, (floor.through, batch)):
            entries = log.read_images(writes)
            if images and len(images) + len(entries) > most:
                break
            images |= {(table, key): body for table, key, body in entries}
            through, checksum = seq, ends
        before = self._begun[1] if self._begun[0] == through else 0
        part = list(images.items())[before : before + most]
        last = [
            Last(kind, key, body)
            for (table, key), body in part
            if body is not None and (kind := self._store.types.get(table)) and tx.body(kind, key) == body
        ]
        over = set(self._over(tx, last))
        stays = [row for row in last if (row.kind, row.key) not in over]
        tx.record("log.cut", self._owner, cause="local rule: the past is kept for a time", data={"through": through})
        for kind, key in sorted(over, key=lambda each: (each[0].table, each[1])):
            tx.delete(kind, key)
        for row in stays:
            tx.write_again(row.kind, row.key, row.body)
        seen = before + len(part)
        if seen < len(images):  # the record is cut once all its images have been handled
            tx.put(replace(floor, counted=floor.counted + len(stays)))
            tx.after_commit(lambda: self._note(through, seen))
            return
        tx.put(_after(floor, through, checksum, len(stays), tx.query("select max(seq) from log")[0][0]))
        tx.cut_log(through)

    def _note(self, record: int, seen: int) -> None:
        self._begun = record, seen


def _after(floor: LogFloorRow, through: int, checksum: bytes, stayed: int, head: int) -> LogFloorRow:
    """Once around the whole log, as many images were written again as there are rows that stay."""
    counted = floor.counted + stayed
    if through < floor.turn:
        return replace(floor, through=through, checksum=checksum.hex(), counted=counted)
    return LogFloorRow(through=through, checksum=checksum.hex(), rows=counted, turn=head)

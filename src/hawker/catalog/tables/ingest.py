"""Rows on their way into the replica's tables: checked one by one, written many at a time.

A row that cannot be taken never stops the rows after it. It goes to `_aside`, raw, and is passed on as it came, so that
nodes that can read it get it: "poison" fails the checks of its table, "ahead" is a merged row with a stamp too far in
the future, "unknown" is of a table that this Hawker does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import apsw
import msgspec

from hawker.catalog.tables.layout import Bad, Layout
from hawker.core import hlc
from hawker.model.catalog import RAISED_FLOOR, LogId, Numbered, Tier, Values
from hawker.store.connection import rows

_PUT_ASIDE = "insert or replace into _aside values (?,?,?,?,?,?,?,?,?,?,?)"
_pack = msgspec.msgpack.Encoder().encode

BULK_LEAST = 10_000
"""For so many rows a table's indexes are dropped and made again, if the table grows to twice its size: sorting once is
quicker than finding each row its place."""
_PLACE = itemgetter(0, 1)

AsideOf = tuple[str, str, str]
"""An owner, a tier and a table that may have rows in `_aside`."""


class Batch:
    """What one transaction writes. `aside` is the tables' note of which owners have rows put aside; the batch adds to
    it. `changed` has the keys of rows that readers may see differently now, by table; None stands for any row of the
    table."""

    must_wait = staticmethod(hlc.ahead)

    def __init__(
        self,
        db: apsw.Connection,
        layouts: Mapping[str, Layout],
        aside: set[AsideOf],
        now_ms: int,
    ) -> None:
        self._db = db
        self._layouts = layouts
        self._aside = aside
        self._now_ms = now_ms
        self._held: dict[str, list[tuple[object, ...]]] = {}  # rows to insert, by table, in their order
        self._owners: set[str] = set()  # of rows that are held
        self.tables: set[str] = set()
        self.changed: dict[str, set[str] | None] = {}
        self.stamp = 0
        self.put_aside = 0

    def add(self, owner: str, tier: Tier, number: int, table: str, key: str, values: Values | None) -> None:
        """Take a row as its owner's version `number` leaves it."""
        if table == RAISED_FLOOR.table:
            return
        layout = self._layouts.get(table)
        if layout is None:
            self._put_aside(owner, tier, number, table, key, values, "unknown", "")
            return
        try:
            if layout.tier != tier:
                raise Bad(f"{table} is a table of the tier {layout.tier}")
            row = layout.tombstone(owner, number, key) if values is None else layout.row(owner, number, key, values)
        except Bad as error:
            self._put_aside(owner, tier, number, table, key, values, "poison", str(error))
            return
        if layout.merged and values is not None:
            stamp = values.get("stamp") or 0
            if self.must_wait(stamp, self._now_ms):
                until_ms = hlc.accepted_at_ms(stamp)
                self._put_aside(
                    owner, tier, number, table, key, values, "ahead", "its stamp is in the future", until_ms
                )
                return
            self.stamp = max(self.stamp, stamp)
        if (owner, tier, table) in self._aside:
            self._db.execute("delete from _aside where (owner, tier, tbl, key) = (?,?,?,?)", (owner, tier, table, key))
        self._held.setdefault(table, []).append(row)
        self.tables.add(table)
        self._owners.add(owner)

    def add_all(self, log: LogId, numbered: Iterable[Numbered]) -> None:
        """Take rows of one log, each table's together. It does the same as `add` for each, and takes a third less time
        for most."""
        owner, tier = log
        table, held, layout = "", None, None
        for row in numbered:
            values = row.values
            if row.table != table:
                table = row.table
                layout, held = self._plain(owner, tier, table)
            if layout is None or held is None or values is None:
                self.add(owner, tier, row.number, table, row.key, values)
                table = ""  # it may have put a row aside, and written those held
                continue
            try:
                held.append(layout.row(owner, row.number, row.key, values))
            except Bad:
                self.add(owner, tier, row.number, table, row.key, values)
                table = ""

    def _plain(self, owner: str, tier: Tier, table: str) -> tuple[Layout | None, list[tuple[object, ...]] | None]:
        """The layout of a table whose rows need nothing but their checks, and where its rows are held."""
        layout = self._layouts.get(table)
        if layout is None or layout.tier != tier or layout.merged:
            return None, None
        if (owner, tier, table) in self._aside:
            return None, None
        self._owners.add(owner)
        self.tables.add(table)
        return layout, self._held.setdefault(table, [])

    def clear(self, log: LogId) -> None:
        """Drop every row of a log."""
        self._write_of(log.owner)
        for layout in self._of_tier(log.tier):
            self.changed[layout.name] = None
            self._db.execute(f"delete from {layout.physical} where _owner = ?", (log.owner,))
        self._db.execute("delete from _aside where owner = ? and tier = ?", log)

    def purge(self, log: LogId, floor: int) -> None:
        """Drop the tombstones at or below a floor."""
        self._write_of(log.owner)
        for layout in self._of_tier(log.tier):
            self._db.execute(
                f"delete from {layout.physical} where _owner = ? and _deleted and _number <= ?", (log.owner, floor)
            )
        self._db.execute("delete from _aside where owner = ? and tier = ? and deleted and number <= ?", (*log, floor))

    def write(self) -> None:
        """Bring what is held into the tables."""
        for table, held in self._held.items():
            layout = self._layouts[table]
            self._note(table, held)
            if len(held) > 1:
                held.sort(key=_PLACE)  # neighbours in the table are written together; of one key the last still wins
            if len(held) < BULK_LEAST or len(held) < rows(self._db, f"select count(*) from {layout.physical}")[0][0]:
                self._db.executemany(layout.insert, held)
                continue
            for index in layout.indexes:
                self._db.execute(f"drop index {index}")
            self._db.executemany(layout.insert, held)
            for index, on in layout.indexes.items():
                self._db.execute(f"create index {index} {on}")
        self._held = {}
        self._owners.clear()

    def _note(self, table: str, held: Sequence[Sequence[Any]]) -> None:
        if len(held) >= BULK_LEAST:
            self.changed[table] = None
            return
        keys = self.changed.setdefault(table, set())
        if keys is not None:
            keys.update(row[1] for row in held)

    def _write_of(self, owner: str) -> None:
        """Write what is held, if any of it is of this owner."""
        if owner in self._owners:
            self.write()

    def _of_tier(self, tier: Tier) -> list[Layout]:
        found = [layout for layout in self._layouts.values() if layout.tier == tier]
        self.tables.update(layout.name for layout in found)
        return found

    def _put_aside(
        self,
        owner: str,
        tier: Tier,
        number: int,
        table: str,
        key: str,
        values: Values | None,
        kind: str,
        why: str,
        until_ms: int = 0,
    ) -> None:
        layout = self._layouts.get(table)
        if layout is not None and layout.tier == tier:
            self._write_of(owner)  # an earlier row of this key may be held
            self._db.execute(f"delete from {layout.physical} where _owner = ? and id = ?", (owner, key))
            self.tables.add(table)
            self._note(table, ((owner, key),))
        try:
            raw = _pack(values)
        except RecursionError:  # decoding it had a little more stack left than there is here
            values, raw, why = None, _pack(None), "lists and maps in it are nested too deep to be kept"
        row = (owner, tier, table, key, number, values is None, raw, kind, why, self._now_ms, until_ms)
        self._db.execute(_PUT_ASIDE, row)
        self._aside.add((owner, tier, table))
        self.put_aside += 1

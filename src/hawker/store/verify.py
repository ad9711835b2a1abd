"""Replaying the log: compare the tables with it, name every record that does not hold, rebuild the tables from it.

What `hawker worker verify` runs. It opens the database by itself, so the worker must not be writing at the same
time when tables are rebuilt; comparing reads one snapshot and can be done beside a running worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec

from hawker.errors import Corrupt
from hawker.store import log
from hawker.store.connection import BUSY_MS, cut_off, rows, translated
from hawker.store.schema import tables


class Report(msgspec.Struct, kw_only=True):
    """What a verification found. `faults` is empty when all is well; each names a record or a row. `cut`: the last
    record that compaction has cut off."""

    records: int = 0
    cut: int = 0
    rows: int = 0
    faults: list[str] = []
    rebuilt: bool = False

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(path: Path | str, *, rebuild: bool = False, vfs: str | None = None) -> Report:
    """Replay the log of the database at `path` and compare. With `rebuild`, write the tables anew from the log.

    Raises `Corrupt` instead of rebuilding when a record of the log itself does not hold: tables made from a damaged log
    would be wrong in silence. Raises `StoreError` when there is no database of ours at `path`.

    What this cannot see: that the last records were cut off together with everything they wrote.
    """
    flags = apsw.SQLITE_OPEN_READWRITE if rebuild or vfs else apsw.SQLITE_OPEN_READONLY
    try:
        db = apsw.Connection(str(path), flags=flags, vfs=vfs)
    except apsw.Error as error:
        raise translated(error, str(path)) from error
    report = Report()
    try:
        db.set_busy_timeout(BUSY_MS)
        if vfs:
            db.execute("pragma locking_mode = exclusive")
        db.execute("begin immediate" if rebuild else "begin")
        known = tables(db)
        images = _replay(db, known, report)
        damaged = report.faults[0] if report.faults else ""
        _compare(db, known, images, report)
        if rebuild:
            if damaged:
                raise Corrupt(f"{path}: the log itself is damaged, so nothing was rebuilt: {damaged}")
            _rewrite(db, known, images)
            report.rebuilt = True
        db.execute("commit")
    except (apsw.CorruptError, apsw.NotADBError) as error:
        if rebuild:
            raise translated(error, str(path)) from error
        report.faults.append(f"SQLite: {error}")
    except apsw.Error as error:
        raise translated(error, str(path)) from error
    finally:
        db.close(True)
    return report


def _replay(db: apsw.Connection, known: Collection[str], report: Report) -> dict[tuple[str, str], bytes]:
    images: dict[tuple[str, str], bytes] = {}
    try:
        report.cut, previous = cut_off(db)
    except Corrupt as error:
        report.faults.append(error.message)
        report.cut, previous = 0, log.GENESIS
    due = first = report.cut + 1
    records: Iterator[tuple[Any, ...]] = db.execute(f"select {log.BYTES} from log order by seq")
    for row in records:
        seq, writes, stored = row[0], row[-2], row[-1]
        if seq < due:
            report.faults.append(f"log record {seq}: numbers begin at {first}")
            seq = due - 1
        elif seq > due:
            missing = f"record {due} is" if seq == due + 1 else f"records {due} to {seq - 1} are"
            report.faults.append(f"log: {missing} missing")
        elif log.checksum(previous, row[:-1]) != stored:
            report.faults.append(f"log record {seq}: its checksum does not match its content")
        previous, due = stored, seq + 1
        report.records += 1
        try:
            entries = log.read_images(writes)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            report.faults.append(f"log record {seq}: its row images do not read: {error}")
            continue
        for table, key, body in entries:
            if table not in known:
                report.faults.append(f"log record {seq}: writes to a table this Hawker does not know, {table}")
            elif body is None:
                images.pop((table, key), None)
            else:
                images[table, key] = body
    return images


def _compare(db: apsw.Connection, known: Collection[str], images: dict[tuple[str, str], bytes], report: Report) -> None:
    # SQLite's own check first: it also compares every index with its table.
    report.faults += [f"SQLite: {line}" for (line,) in rows(db, "pragma integrity_check") if line != "ok"]
    for table in known:
        found = rows(db, f"select cast(id as blob), cast(body as blob) from {table}")
        stored = {key.decode(errors="replace"): body for key, body in found}
        logged = {key: body for (t, key), body in images.items() if t == table}
        report.rows += len(stored)
        for key in sorted(stored.keys() | logged.keys()):
            if key not in logged:
                report.faults.append(f"table {table}: row {key} is not in the log")
            elif key not in stored:
                report.faults.append(f"table {table}: row {key} of the log is missing")
            elif stored[key] != logged[key]:
                report.faults.append(f"table {table}: row {key} differs from the log")


def _rewrite(db: apsw.Connection, known: Collection[str], images: dict[tuple[str, str], bytes]) -> None:
    for table in known:
        db.execute(f"delete from {table}")
    for (table, key), body in images.items():
        db.execute(f"insert into {table} (id, body) values (?, ?)", (key, body.decode()))

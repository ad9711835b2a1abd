"""The smallest engine of the catalog that keeps its promises: one append-only log in an SQLite file that all share.

A node appends what its worker publishes and reads what the others appended, in the file's order, into tables of its
own. Where a log of the shared file ends is its writer's cursor, and where a log of a node's tables stands is that
node's: each is written in one transaction with the rows, so nothing is lost or doubled wherever a node is cut off.

It serves tests of the catalog's interface, and those who write an engine as something to read. It is found by its entry
point alone: nothing in Hawker knows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import msgspec

from hawker.catalog.base import Site, Source
from hawker.catalog.tables.ingest import Batch
from hawker.catalog.tables.tables import Tables
from hawker.errors import NotFound, StoreError
from hawker.http.handlers import Route
from hawker.model.api import Member, OwnerLog
from hawker.model.catalog import NOTHING, TIERS, LogId, Origin, Position, Range, Tier
from hawker.store.connection import translated
from hawker.telemetry import Metrics

READ_S = 0.05
_SCHEMA = """create table if not exists told (seq integer primary key, owner text not null, tier text not null,
    region text not null, body blob not null) strict; create index if not exists told_of on told (owner, tier, seq)"""


def settings(directory: Path) -> dict[str, str]:
    """The engine's table of the configuration, for agents that share a directory."""
    return {"path": str(directory / "toy.db")}


class SharedLog:
    """The file. Each entry brings a reader of one owner's log from one position to another."""

    def __init__(self, path: str, vfs: str | None = None) -> None:
        self._path = path
        self._db = apsw.Connection(path, vfs=vfs)
        self._db.set_busy_timeout(1000)
        self._ask("pragma synchronous = extra")
        self._ask(_SCHEMA)

    def _ask(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return list(self._db.execute(sql, values))
        except apsw.Error as error:
            raise translated(error, self._path) from error

    def append(self, entry: Range, region: str) -> None:
        log, body = entry.origin.log, msgspec.msgpack.encode(entry)
        self._ask("insert into told (owner, tier, region, body) values (?, ?, ?, ?)", *log, region, body)

    def end(self, log: LogId) -> Position:
        found = self._ask("select body from told where owner = ? and tier = ? order by seq desc limit 1", *log)
        return msgspec.msgpack.decode(found[0][0], type=Range).origin.position if found else NOTHING

    def after(self, seq: int, region: str) -> list[tuple[int, Range]]:
        """What a node of `region` is to see."""
        where = "seq > ? and (tier = 'global' or region = ?)"
        found = self._ask(f"select seq, body from told where {where} order by seq", seq, region)
        return [(seq, msgspec.msgpack.decode(body, type=Range)) for seq, body in found]

    def close(self) -> None:
        self._db.close(True)


class Toy:
    """`settings`: `path` of the shared file, `vfs` where that is not on the host's own disk."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._tables = Tables.open(site.path, site.machine, vfs=site.machine.vfs)
        self._shared = SharedLog(**site.settings)
        self._seq = 0
        self._source: Source | None = None
        self._complete = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()

    @property
    def view(self) -> Tables:
        return self._tables

    async def open(self, source: Source | None) -> None:
        if source is not None:
            await source.open(self.seen(source.owner), lambda version: self._ready.set())
            self._source = source
            await self._publish()
        self._read()
        works = [self._for_ever(self._read_on)] + ([self._for_ever(self._publish_on)] if source else [])
        self._tasks = [asyncio.get_running_loop().create_task(work, name="toy catalog") for work in works]

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        source, self._source = self._source, None
        if source:
            await source.close()
        self._tables.close()
        self._shared.close()

    async def joined(self, within_s: float) -> None:
        """`open` has read all there is."""

    def routes(self) -> tuple[Route, ...]:
        return ()

    def seen(self, owner: str) -> Mapping[Tier, Position]:
        return {tier: self._shared.end(LogId(owner, tier)) for tier in TIERS}

    def complete(self) -> bool:
        return self._complete

    def unfit(self) -> str:
        return "" if self._complete else "the shared log was not read yet"

    def owners(self) -> list[Member]:
        found = self._tables.rows("select name, region, host, port from workers order by name")
        return [self._member(name, region, f"{host}:{port}") for name, region, host, port in found]

    async def forget(self, name: str, cause: str) -> None:
        """An empty snapshot takes the place of all that the owner published; it stands at the log's beginning, so the
        owner publishes all of it again, once it is back."""
        regions = self._tables.rows("select region from workers where name = ?", (name,))
        if name == self._site.name or not regions:
            raise NotFound(f"no worker is called {name}", hint="hawker workers lists them")
        for tier in TIERS:
            self._shared.append(Range(Origin(name, tier, *NOTHING), 0, (), True), regions[0][0])

    def measure(self, metrics: Metrics) -> None:
        metrics.catalog_aside.set(self._tables.rows("select count(*) from quarantine")[0][0])

    # --- what this node publishes ---

    async def _publish(self) -> None:
        """Append what the shared log lacks of our own. The log's own end says where to go on."""
        assert self._source is not None
        for tier in TIERS:
            at = self._shared.end(LogId(self._source.owner, tier))
            found = self._source.since(tier, at)
            if found.origin.position != at:
                self._shared.append(found, self._site.region)

    async def _publish_on(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._ready.wait()
        except TimeoutError:
            pass  # somebody may have forgotten us meanwhile
        self._ready.clear()
        await self._publish()

    # --- what this node reads ---

    def _read(self) -> None:
        """Bring the tables up to the end of the shared log, in one transaction for each entry."""
        entries = self._shared.after(self._seq, self._site.region)
        if self._seq == 0:  # each log goes on where our tables stand, or begins anew
            known = {(entry.origin.log, entry.origin.position): seq for seq, entry in entries}
            stands = {log: known.get((log, self._tables.position(log)), 0) for log, _ in known}
            entries = [(seq, entry) for seq, entry in entries if seq > stands[entry.origin.log]]
        for seq, entry in entries:
            self._tables.write(partial(_apply, entry))
            self._seq = seq
        self._complete = True
        self._tables.recheck()

    async def _read_on(self) -> None:
        await asyncio.sleep(READ_S)
        self._read()

    async def _for_ever(self, work: Callable[[], Any]) -> None:
        while True:
            try:
                await work()
            except StoreError:  # the disk is full or failed: it is tried again
                await asyncio.sleep(READ_S)

    def _member(self, name: str, region: str, address: str) -> Member:
        logs = []
        for tier in TIERS:
            at = self._tables.position(LogId(name, tier))
            logs.append(OwnerLog(tier=tier, epoch=at.epoch, head=at.head, confirmed_s=READ_S, behind_s=0.0))
        here = name == self._site.name
        return Member(name=name, region=region, roles=["worker"], address=address, status="known", logs=logs, here=here)


def _apply(entry: Range, batch: Batch, origins: dict[LogId, Origin]) -> None:
    log = entry.origin.log
    if entry.snapshot or entry.after == 0:
        batch.clear(log)
    batch.add_all(log, entry.rows)
    batch.purge(log, entry.origin.floor)
    origins[log] = entry.origin

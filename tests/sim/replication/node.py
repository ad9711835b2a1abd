"""A node of the simulation of replication: a real outbox over a real store, a real replica, and a clock of its own.

Its worker's tables stand for any: a lease is a "thing" of the region that readers wait for, and an "extra" beside it,
of a table that only newer nodes know; a tally is a "count" of all regions that may wait; "names" are merged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.outbox import Outbox, Projected
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.catalog.tables.schema import Columns, Count, Flag, Table, Text
from hawker.core import hlc
from hawker.host import Host
from hawker.model.catalog import TIERS, Change, LogId, Origin, Tier, Values, Version
from hawker.model.rows import LeaseRow, PublishedRow, TallyRow
from hawker.sim.platform.disk import CrashDisk
from hawker.store.db import Store
from hawker.store.tx import Reads, Tx


class Thing(Columns, frozen=True):
    color: Text | None = None
    size: Count | None = None
    old: Flag | None = None


class ThingBefore(Columns, frozen=True):
    """As a node of the version before knows it."""

    color: Text | None = None


class Extra(Columns, frozen=True):
    note: Text | None = None


class Tally(Columns, frozen=True):
    machines: Count | None = None


class Name(Columns, frozen=True):
    to: Text | None = None
    stamp: Count | None = None
    deleted: Flag | None = None


COUNTS = Table(name="counts", tier="global", columns=Tally)
NAMES = Table(name="names", tier="global", columns=Name, merged=True)
NEW = (
    Table(name="things", tier="region", columns=Thing, indexes=(("color",),)),
    Table(name="extras", tier="region", columns=Extra),
    COUNTS,
    NAMES,
)
BEFORE = (Table(name="things", tier="region", columns=ThingBefore), COUNTS, NAMES)

POISON = "poison"
"""A thing of this color is published with a color that is no text."""


def lease(reads: Reads, key: str, row: LeaseRow | None) -> Iterable[Projected]:
    thing = extra = None
    if row:
        thing = {"color": 3 if row.nonce == POISON else row.nonce, "size": row.expires_at_ms, "old": None}
        if row.expires_at_ms > 2:
            thing["old"] = True
        extra = {"note": row.description} if row.description else None
    yield "region", Change("things", key, thing), True
    yield "region", Change("extras", key, extra), True


def tally(reads: Reads, key: str, row: TallyRow | None) -> Iterable[Projected]:
    yield "global", Change("counts", key, {"machines": row.machines} if row else None), False


class Kinds(NamedTuple):
    """What nodes are made of. A mutant puts something else in the place of one."""

    outbox: type[Outbox] = Outbox
    log: type[OwnerLog] = OwnerLog
    replica: type[Replica] = Replica
    tick: Callable[[int, int], int] = hlc.tick


class Node:
    """`offset_ms`: how far its clock is off. `old`: it runs the version before."""

    def __init__(self, name: str, seed: int, kinds: Kinds, now_ms: Callable[[], int]) -> None:
        self.name = name
        self.kinds = kinds
        self.offset_ms = 0
        self.old = False
        self.up = False
        self.stamp = 0  # the last one that it gave
        self.unknown_rows = 0  # in its replica, as it was killed
        self.rng = random.Random(f"{seed}/{name}")
        self.host = Host(lambda: (now_ms() + self.offset_ms) / 1000, self.rng)
        self.worker_disk = CrashDisk(f"{seed}/{name}/worker")
        self.catalog_disk = CrashDisk(f"{seed}/{name}/catalog")
        self.on_published: Callable[[Version], None] = lambda version: None
        self.on_due: Callable[[int], None] = lambda ms: None
        self.store: Store
        self.log: OwnerLog
        self.outbox: Outbox
        self.replica: Replica

    async def start(self) -> list[Origin]:
        """Open both databases and begin new epochs. Gives them."""
        self.store = Store.open("worker.db", self.host, vfs=self.worker_disk.name)
        tables = BEFORE if self.old else NEW
        self.replica = self.kinds.replica.open("catalog.db", self.host, vfs=self.catalog_disk.name, tables=tables)
        self.log = self.kinds.log(self.host, self.name)
        self.outbox = self.kinds.outbox(self.host, self.log, {LeaseRow: lease, TallyRow: tally})
        self.store.on_change.append(self.outbox.on_change)
        self.up = True
        above = {tier: self.replica.position(LogId(self.name, tier)).epoch for tier in TIERS}

        def change(tx: Tx) -> list[Origin]:
            self.outbox.open(tx, above)
            self.outbox.refresh(tx)
            return [self.log.origin(tx, tier) for tier in TIERS]

        origins = await self.store.submit(change)
        self.log.on_version.append(lambda version: self.on_published(version))
        self.outbox.on_due.append(lambda ms: self.on_due(ms))
        return origins

    def kill(self) -> None:
        """Both databases stay as they are on their disks."""
        self.up = False
        self.unknown_rows = self.replica.rows("select count(*) from unknown")[0][0]
        self.store.abandon()
        self.replica.abandon()

    def close_disks(self) -> None:
        for disk in (self.worker_disk, self.catalog_disk):
            disk.close()
            disk.restore({})  # SQLite's bindings keep a disk that had a database open; not what was on it

    async def write(self, change: Callable[[Tx], Any]) -> Any:
        return await self.store.submit(change)

    def put_name(self, tx: Tx, name: str, values: Values) -> None:
        """A row of a merged table, stamped above all that this node has read or written."""
        self.stamp = self.kinds.tick(max(self.stamp, self.replica.newest_stamp()), self.host.now_ms())
        self.outbox.put(tx, "global", Change("names", name, {**values, "stamp": self.stamp}))

    def published(self, tier: Tier) -> dict[tuple[str, str], tuple[int, dict[str, Any] | None]]:
        found = self.store.read.select(PublishedRow, "tier = ? order by id", (tier,))
        return {(row.of, row.id): (row.number, row.values) for row in found}

    def origin(self, tier: Tier) -> Origin:
        return self.log.origin(self.store.read, tier)

    def behind(self, tier: Tier) -> bool:
        """Whether the own replica stands behind the own log."""
        return self.replica.position(LogId(self.name, tier)) != self.origin(tier).position

    def catch_up(self) -> None:
        """Bring the own replica up to the own log."""
        at = {tier: self.replica.position(LogId(self.name, tier)) for tier in TIERS}
        self.replica.merge([self.log.since(self.store.read, tier, at[tier]) for tier in TIERS])

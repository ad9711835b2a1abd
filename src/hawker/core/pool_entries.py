"""The entries of a pool (`hawker.core.routing`): one for each machine, with what the rows say of it, how many requests
are in flight there, and the list that it belongs to by both."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Any

import msgspec

RUNNING = "started"
COMING = frozenset({"created", "starting", "restarting", "updating", "replacing"})
"""States of a machine that somebody else is about to bring up; to start it would be refused."""
ASLEEP = frozenset({"stopped", "suspended", "stopping", "suspending"})
"""States that a start ends, or will end when the stop is over."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the rows say of a machine. `healthy`: its checks pass, or it has none. `hard` 0: it has no limit."""

    machine: str
    region: str
    state: str
    cordoned: bool = False
    healthy: bool = True
    soft: int = 20
    hard: int = 0
    autostart: bool = True


class PoolEntry:
    """A machine in a pool. Others only read it, but for `data`, which is the caller's own."""

    __slots__ = (
        *("closing", "data", "doubtful", "hard", "home", "in_flight", "delegated", "list", "machine", "others", "own"),
        *("index", "region", "rests_until", "row", "soft", "spare", "told_until", "waking", "weight"),
    )

    def __init__(self, row: Candidate, of: tuple[bytes, str]) -> None:
        self.row = row
        self.machine = row.machine
        self.region = row.region
        self.soft = row.soft
        self.hard = row.hard
        self.own = 0
        self.others = 0
        self.in_flight = 0
        """The sum of `own` requests and `others`, which another proxy or the delegate reported."""
        self.delegated = 0
        """How many slots a delegate may fill without asking; `others` counts those that are filled."""
        self.waking = False
        self.closing = False
        self.doubtful = False
        """Its worker may be gone, so the machine is used, or started, only for requests that no other machine can
        take."""
        self.rests_until = 0.0
        self.spare = False
        """While the machine rests, it takes only what no other machine can."""
        self.told_until = inf
        self.data: Any = None
        self.weight = of
        self.home: Region | None = None
        self.list: list[PoolEntry] | None = None
        self.index = 0

    def __repr__(self) -> str:
        return f"<PoolEntry {self.machine} {self.row.state} {self.in_flight}/{self.soft}/{self.hard}>"

    @property
    def full(self) -> bool:
        return 0 < self.hard <= self.in_flight

    def limit(self) -> None:
        """Set `hard`, the hard limit as `in_flight` counts to it: slots that are delegated and not filled count as
        taken."""
        hard = self.row.hard
        self.hard = max(1, hard - max(0, self.delegated - self.others)) if hard else 0


class Region:
    """The pool entries of a region. Each is in one of the lists, or in none."""

    __slots__ = ("asleep", "busy", "coming", "entries", "free", "full", "leaving", "name", "unwell")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free: list[PoolEntry] = []
        self.busy: list[PoolEntry] = []
        self.full: list[PoolEntry] = []
        self.leaving: list[PoolEntry] = []
        self.coming: list[PoolEntry] = []
        self.asleep: list[PoolEntry] = []
        self.unwell: list[PoolEntry] = []
        self.entries = 0


def list_of(entry: PoolEntry, home: Region) -> list[PoolEntry] | None:
    """The list that the entry belongs to; None: nothing can bring the machine to take requests, or nothing may."""
    row = entry.row
    if row.cordoned:
        return None
    if entry.rests_until:
        return home.unwell
    if entry.waking:
        return home.coming
    if row.state == RUNNING:
        if not row.healthy or entry.doubtful:
            return home.unwell
        if entry.closing:
            return home.leaving
        count = entry.in_flight
        if count < entry.soft and (count < entry.hard or not entry.hard):
            return home.free
        return home.busy if count < entry.hard or not entry.hard else home.full
    if row.state in COMING:
        return home.coming
    return home.asleep if row.state in ASLEEP and row.autostart else None


def to_start(home: Region, out: Collection[str], *, doubtful: bool = False) -> PoolEntry | None:
    """The machine that a request would wait for: one that is on its way with room for it, or the one to start. It is
    chosen from the machines that are `doubtful`, or from the others."""

    def may(entry: PoolEntry) -> bool:
        return entry.doubtful is doubtful and entry.machine not in out and not entry.full

    coming = list(filter(may, home.coming))
    if coming:
        return min(coming, key=lambda entry: (entry.in_flight, entry.weight))
    asleep = list(filter(may, home.asleep))
    return max(
        asleep,
        key=lambda entry: (entry.row.state == "suspended", entry.row.state == "stopped", entry.weight),
        default=None,
    )


def is_open(entry: PoolEntry) -> bool:
    """Whether it takes requests below its hard limit."""
    home = entry.home
    return home is not None and (entry.list is home.free or entry.list is home.busy)


def is_spare(entry: PoolEntry) -> bool:
    """Whether the machine is left alone or in doubt, and takes what no other can below its hard limit."""
    up = entry.row.state == RUNNING and entry.row.healthy and not (entry.row.cordoned or entry.waking or entry.closing)
    return (entry.spare if entry.rests_until > 0 else entry.doubtful) and up and not entry.full


def is_coming(entry: PoolEntry) -> bool:
    """Whether it is on its way up."""
    return entry.home is not None and entry.list is entry.home.coming


def has_room(entry: PoolEntry) -> bool:
    return not entry.full


def less_loaded(one: PoolEntry, two: PoolEntry) -> PoolEntry:
    """The one that has less in flight for its size."""
    return two if two.in_flight * one.soft < one.in_flight * two.soft else one

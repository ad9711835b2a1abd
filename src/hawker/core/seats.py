"""The machines of a pool (`hawker.core.routing`): what rows say of each, what is in flight there, and the list where it
belongs by both."""

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
    """What the rows say of a machine. `healthy`: its checks pass, or it has none. `hard` 0: no limit."""

    machine: str
    region: str
    state: str
    cordoned: bool = False
    healthy: bool = True
    soft: int = 20
    hard: int = 0
    autostart: bool = True


class Seat:
    """A machine in a pool. To be read only, but for `data`, which is the caller's own."""

    __slots__ = (
        *("closing", "data", "doubtful", "hard", "home", "in_flight", "lent", "list", "machine", "others", "own"),
        *("place", "region", "rests_until", "row", "soft", "spare", "told_until", "waking", "weight"),
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
        """`own`, and `others` that another proxy told of."""
        self.lent = 0
        """Places that whoever carries requests past this proxy may fill without asking; `others` are those filled."""
        self.waking = False
        self.closing = False
        self.doubtful = False
        """Its worker may be gone: it takes, and is started for, what no other machine can take."""
        self.rests_until = 0.0
        self.spare = False
        """While it rests it takes what no other can."""
        self.told_until = inf
        self.data: Any = None
        self.weight = of
        self.home: Region | None = None
        self.list: list[Seat] | None = None
        self.place = 0

    def __repr__(self) -> str:
        return f"<Seat {self.machine} {self.row.state} {self.in_flight}/{self.soft}/{self.hard}>"

    @property
    def full(self) -> bool:
        return 0 < self.hard <= self.in_flight

    def limit(self) -> None:
        """Set `hard`, the hard limit as `in_flight` counts to it: places that are lent and not filled are taken."""
        hard = self.row.hard
        self.hard = max(1, hard - max(0, self.lent - self.others)) if hard else 0


class Region:
    """The seats of a region, each in one of the lists, or in none."""

    __slots__ = ("asleep", "busy", "coming", "free", "full", "leaving", "name", "seats", "unwell")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free: list[Seat] = []
        self.busy: list[Seat] = []
        self.full: list[Seat] = []
        self.leaving: list[Seat] = []
        self.coming: list[Seat] = []
        self.asleep: list[Seat] = []
        self.unwell: list[Seat] = []
        self.seats = 0


def list_of(seat: Seat, home: Region) -> list[Seat] | None:
    """None: nothing can bring it to take requests, or nothing may."""
    row = seat.row
    if row.cordoned:
        return None
    if seat.rests_until:
        return home.unwell
    if seat.waking:
        return home.coming
    if row.state == RUNNING:
        if not row.healthy or seat.doubtful:
            return home.unwell
        if seat.closing:
            return home.leaving
        count = seat.in_flight
        if count < seat.soft and (count < seat.hard or not seat.hard):
            return home.free
        return home.busy if count < seat.hard or not seat.hard else home.full
    if row.state in COMING:
        return home.coming
    return home.asleep if row.state in ASLEEP and row.autostart else None


def to_start(home: Region, out: Collection[str], *, doubtful: bool = False) -> Seat | None:
    """What a request would wait for: one that is on its way with room for it, or the one to start. Of machines that are
    `doubtful`, or of those that are not."""

    def may(seat: Seat) -> bool:
        return seat.doubtful is doubtful and seat.machine not in out and not seat.full

    coming = list(filter(may, home.coming))
    if coming:
        return min(coming, key=lambda seat: (seat.in_flight, seat.weight))
    asleep = list(filter(may, home.asleep))
    return max(
        asleep,
        key=lambda seat: (seat.row.state == "suspended", seat.row.state == "stopped", seat.weight),
        default=None,
    )


def is_open(seat: Seat) -> bool:
    """Whether it takes requests below its hard limit."""
    home = seat.home
    return home is not None and (seat.list is home.free or seat.list is home.busy)


def is_spare(seat: Seat) -> bool:
    """Whether it rests, or is in doubt, and takes what no other can below its hard limit."""
    up = seat.row.state == RUNNING and seat.row.healthy and not (seat.row.cordoned or seat.waking or seat.closing)
    return (seat.spare if seat.rests_until > 0 else seat.doubtful) and up and not seat.full


def is_coming(seat: Seat) -> bool:
    """Whether it is on its way up."""
    return seat.home is not None and seat.list is seat.home.coming


def has_room(seat: Seat) -> bool:
    return not seat.full


def less_loaded(one: Seat, two: Seat) -> Seat:
    """For its size."""
    return two if two.in_flight * one.soft < one.in_flight * two.soft else one

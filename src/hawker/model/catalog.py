"""What travels between replicas of the catalog: positions in owner logs, versions, ranges.

Every row has exactly one owner, the node that publishes it. Each of an owner's transactions gets one number, and a
replica applies one owner's numbers strictly in order, so what it shows of an owner is always exactly what that owner
had committed at some number. Whole rows travel, as maps from column to value.

An owner keeps one log for each *tier*: what a region shares ("region") and what all regions share ("global").
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

Tier = Literal["region", "global"]
TIERS: tuple[Tier, ...] = ("region", "global")
Values = dict[str, Any]
"""A row's columns: text, whole numbers of 64 bits, floats, booleans. Lists and maps travel as JSON text. None is the
same as a column that is missing, and is left out."""


class LogId(NamedTuple):
    """An owner's log of one tier. The owner is a node's name."""

    owner: str
    tier: Tier


class Position(NamedTuple):
    """How much of a log is known: everything up to number `head` of `epoch`. Numbers begin at 1 and go on across
    epochs."""

    epoch: int
    head: int


NOTHING = Position(0, 0)


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """A log as its owner described it at `head`.

    `epoch` is the owner's present one: a new one begins each time its database is opened, so that a backup brought
    back never continues numbers that others have seen. `lineage` lists the (epoch, head) at which earlier epochs of
    this very database ended, oldest first: who stands at or below such an end holds a prefix of this log. `floor` is
    the highest number whose tombstones are gone: who stands below it takes a snapshot.
    """

    owner: str
    tier: Tier
    epoch: int
    head: int
    floor: int = 0
    lineage: tuple[Position, ...] = ()

    @property
    def log(self) -> LogId:
        return LogId(self.owner, self.tier)

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.head)


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One row as a version leaves it; `values` None is a tombstone."""

    table: str
    key: str
    values: Values | None


RAISED_FLOOR = Change("_floor", "floor", None)
"""A value that stands for no table, and is never stored."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """One transaction of an owner: its rows, whole, and its number.

    `floor` is the log's as the owner left it: who is told every version learns it without asking; `RAISED_FLOOR` stands
    in a version that does nothing but raise it. One without changes is no version: it only tells how far the log is, so
    that who is behind asks.
    """

    owner: str
    tier: Tier
    epoch: int
    number: int
    changes: tuple[Change, ...]
    floor: int = 0

    @property
    def log(self) -> LogId:
        return LogId(self.owner, self.tier)

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.number)


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A row with the number of the version that wrote it last."""

    number: int
    table: str
    key: str
    values: Values | None


class Range(msgspec.Struct, frozen=True, array_like=True):
    """What brings a replica from `after` to `origin.head`, applied in one transaction: every row whose number is above
    `after`. With `snapshot`, every row there is, in the place of all that the replica has of this log."""

    origin: Origin
    after: int
    rows: tuple[Numbered, ...]
    snapshot: bool = False

"""What tests of the replica tell it: versions, ranges and their owners, and a clock to tell the time by."""

from __future__ import annotations

from hawker.catalog.gossip.replica import Replica
from hawker.model.catalog import (
    Change,
    LogId,
    Origin,
    Range,
    Tier,
    Values,
    Version,
)

NOW_MS = 1_700_000_000_000
A = LogId("a", "region")


class Clock:
    ms = NOW_MS


def version(
    number: int,
    *changes: tuple[str, str, Values | None],
    owner: str = "a",
    epoch: int = 7,
    tier: Tier = "region",
    floor: int = 0,
) -> Version:
    made = tuple(Change(*each) for each in changes) or (Change("machines", f"m{number}", {"app": "web"}),)
    return Version(owner, tier, epoch, number, made, floor)


def origin(head: int, floor: int = 0, owner: str = "a", epoch: int = 7, tier: Tier = "region") -> Origin:
    return Origin(owner, tier, epoch, head, floor)


def begun(replica: Replica, owner: str = "a", tier: Tier = "region", epoch: int = 7) -> None:
    """The replica knows that the log is empty."""
    replica.merge([Range(origin(0, owner=owner, tier=tier, epoch=epoch), 0, (), True)])


def machines(replica: Replica) -> list[str]:
    return [key for (key,) in replica.rows("select id from machines order by id")]

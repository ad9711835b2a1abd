"""How fresh a node's view is: when each owner's log was last confirmed, and when the node should get no traffic.

A replica cannot know what it was not told, but it can say until when it lacked nothing. An owner tells with its packets
of membership how far its logs go; for owners of another region, any node there answers for them. A report that is lower
than the replica's own position changes nothing; after a higher one the node is behind until it has caught up.
"""

from __future__ import annotations

import msgspec

from hawker.model.catalog import LogId, Position

BEHIND_S = 30.0
"""A hole is repaired in a second, and what a lost neighbour had comes within a round of push-pull. A node that lacks
something for longer cannot get it."""
ISOLATED_S = 60.0
"""In this time sixty probes fail. Suspicion bridges shorter silences."""


def unfit(*, behind_s: float, others: int, silent_s: float, caught_up: bool = True) -> str:
    """Why a node should get no traffic now, "" when it may.

    `behind_s`: for how long it has known that it lacks versions. `others`: nodes it knows of or was told to join, taken
    for dead or not, but not those that left. `silent_s`: since when it has heard from none of them. A node that knows
    nobody is all there is, and is fit. `caught_up`: since it began it has had all that its region knows.
    """
    if behind_s > BEHIND_S:
        return f"behind: it has known for {behind_s:.0f} s of versions that it lacks"
    if others and silent_s > ISOLATED_S:
        return f"isolated: it has heard from none of {others} other nodes for {silent_s:.0f} s"
    if not caught_up:
        return "behind: since it began it has not caught up with its region"
    return ""


class Standing(msgspec.Struct, frozen=True):
    """How fresh one log is, in seconds: it was last known to be complete `confirmed_s` ago (None: never), and has been
    known to lack something for `behind_s` (0: it lacks nothing)."""

    confirmed_s: float | None = None
    behind_s: float = 0.0


class _Heard(msgspec.Struct):
    confirmed_at: float | None = None
    told: Position | None = None  # beyond where the replica was, at `told_at`; first beyond it at `behind_at`
    told_at: float = 0.0
    behind_at: float = 0.0


class Freshness:
    """What one node was told of others' logs, and when. The caller gives the time, in seconds."""

    def __init__(self) -> None:
        self._reached_at: float | None = None
        self._logs: dict[LogId, _Heard] = {}

    def reached(self, now: float) -> None:
        """Another node was heard from."""
        self._reached_at = now

    def silent_s(self, now: float) -> float:
        """The seconds since another node was heard from, or since the first call if none was yet."""
        if self._reached_at is None:
            self._reached_at = now
        return now - self._reached_at

    def told(self, log: LogId, at: Position, mine: Position, now: float) -> None:
        """A node that must know reports that the log goes to `at`; the replica stands at `mine`."""
        heard = self._logs.get(log)
        if heard is None:
            heard = self._logs[log] = _Heard()
        self._catch_up(heard, mine)
        if heard.told is None and at == mine:
            heard.confirmed_at = now  # less than is here was said some time ago, and confirms nothing of now
        elif heard.told is None and at > mine:
            heard.told, heard.told_at, heard.behind_at = at, now, now
        elif heard.told is not None and at >= heard.told:
            heard.told, heard.told_at = at, now

    def standing(self, log: LogId, mine: Position, now: float) -> Standing:
        """How fresh a log is in a replica that stands at `mine`."""
        heard = self._logs.get(log)
        if heard is None:
            return Standing()
        self._catch_up(heard, mine)
        confirmed_s = None if heard.confirmed_at is None else max(0.0, now - heard.confirmed_at)
        return Standing(confirmed_s, max(0.0, now - heard.behind_at) if heard.told else 0.0)

    def forget(self, owner: str) -> None:
        for log in [log for log in self._logs if log.owner == owner]:
            del self._logs[log]

    def _catch_up(self, heard: _Heard, mine: Position) -> None:
        """If the replica has reached what was reported, it was complete at the time of the report."""
        if heard.told is not None and mine >= heard.told:
            heard.confirmed_at, heard.told = heard.told_at, None

"""Stamps that order the writes of many nodes: a hybrid logical clock.

A stamp is `ms << 16 | counter`: wall time where clocks agree, and above every stamp seen before where they do not
(Kulkarni et al., "Logical physical clocks", 2014). Two nodes may give the same stamp; then the greater name wins.

A reader does not take a stamp yet that is further ahead of its clock than `AHEAD_MS`. Otherwise a node whose clock is a
year ahead would win every write for a year, because others stamp theirs above the ones that they read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

COUNTER_BITS = 16
AHEAD_MS = 500
"""More than clocks under NTP differ, and less than a person notices."""


def stamp(ms: int, counter: int = 0) -> int:
    return ms << COUNTER_BITS | counter


def ms_of(stamp: int) -> int:
    return stamp >> COUNTER_BITS


def tick(last: int, now_ms: int) -> int:
    """The stamp of a write: above `last`, the greatest given or seen. A full counter runs over into the time."""
    return max(last + 1, stamp(now_ms))


def accepted_at_ms(stamp: int) -> int:
    """The time on the reader's clock from which it may take a stamp."""
    return ms_of(stamp) - AHEAD_MS


def ahead(stamp: int, now_ms: int) -> bool:
    """Whether a stamp must wait."""
    return now_ms < accepted_at_ms(stamp)


def newest(rows: Iterable[tuple[int, str, T]]) -> T | None:
    """Choose among (stamp, owner, row) the row that counts: the greatest stamp wins, then the greatest owner."""
    best: tuple[int, str, T] | None = None
    for row in rows:
        if best is None or row[:2] > best[:2]:
            best = row
    return best[2] if best else None

"""When what a process does now and then is due: all of it at the same beats, so that one at rest seldom wakes.

To wake costs a process at rest more than what it wakes for.
"""

from __future__ import annotations

BEAT_S = 0.5


def until_beat(now: float, seconds: float) -> float:
    """How long to wait at `now`, of a clock that all use, for what is to come in about so many seconds: up to the beat
    that is nearest to then. What is to come sooner than in three quarters of a second comes when it was to come."""
    if seconds < 1.5 * BEAT_S:
        return seconds
    return round((now + seconds) / BEAT_S) * BEAT_S - now


def next_beat(now: float) -> float:
    """When the next one is, not at once."""
    return (round(now / BEAT_S) + 1) * BEAT_S

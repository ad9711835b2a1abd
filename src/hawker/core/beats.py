"""When the periodic work of a process is due: all of it at the same beats, so that an idle process seldom wakes.

Waking costs an idle process more than the work that it wakes for.
"""

from __future__ import annotations

BEAT_S = 0.5


def until_beat(now: float, seconds: float) -> float:
    """How long to wait at `now`, by a clock that all work shares, for what is due in about `seconds`: until the nearest
    beat. What is due within three quarters of a second is not moved."""
    if seconds < 1.5 * BEAT_S:
        return seconds
    return round((now + seconds) / BEAT_S) * BEAT_S - now


def next_beat(now: float) -> float:
    """When the next beat after the present one is."""
    return (round(now / BEAT_S) + 1) * BEAT_S

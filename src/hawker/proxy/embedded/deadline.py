"""A time-out that is moved at almost every event and almost never comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `late` once `at` (of the loop's clock) has passed. Setting it later costs no timer: the one that is there
    looks again when it fires."""

    __slots__ = ("_at", "_due", "_late", "_loop", "_now", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self._loop = loop
        self._now = loop.time
        self._late = late
        self._due = math.inf  # when the timer fires
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def at(self) -> float:
        """When it is late, infinite where there is no deadline."""
        return self._at

    def within(self, seconds: float) -> None:
        at = self._at = self._now() + seconds
        if at < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._arm(at)

    def clear(self) -> None:
        self._at = math.inf

    def close(self) -> None:
        """End it for good: nothing holds its owner after this."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self._due = at
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        due, self._due = self._due, math.inf
        self._timer = None
        if self._at > due:
            if self._at < math.inf:
                self._arm(self._at)
        else:
            self._at = math.inf
            self._late()

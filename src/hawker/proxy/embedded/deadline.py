"""A time-out that is moved at almost every event and almost never comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `late` once `at` (of the loop's clock) has passed. Setting it later costs no timer: the one that is there
    looks again when it fires."""

    __slots__ = ("_at", "_late", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self._loop = loop
        self._late = late
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> None:
        at = self._at = self._loop.time() + seconds
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._fire)
        elif self._timer.when() > at:
            self._timer.cancel()
            self._timer = self._loop.call_at(at, self._fire)

    def clear(self) -> None:
        self._at = math.inf

    def close(self) -> None:
        """For good: nothing holds its owner after this."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        fired, self._timer = self._timer, None
        assert fired is not None
        if self._at == math.inf:
            return
        if self._at > fired.when():
            self._timer = self._loop.call_at(self._at, self._fire)
        else:
            self._at = math.inf
            self._late()

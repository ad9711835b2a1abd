"""Decides how long what has failed is left alone: longer each time, up to half a minute."""

from __future__ import annotations

MOST_S = 30.0


class Backoff:
    """The backoff of a machine, or of a worker's proxy. Requests that were under way there together fail together: they
    count as one failure, however many they are. Times are seconds of the caller's clock."""

    __slots__ = ("_first_s", "_times", "until")

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._times = 0
        self.until = 0.0

    def failed(self, now: float) -> float:
        """It has failed. Returns until when to leave it alone."""
        if now >= self.until:
            self.until = now + min(self._first_s * 2.0**self._times, MOST_S)
            self._times = min(self._times + 1, 10)
        return self.until

    def over(self) -> None:
        """It has answered: the next failure is the first one again."""
        self._times = 0

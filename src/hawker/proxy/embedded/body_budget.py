"""Counts how much of requests' bodies is kept, to be sent once more, by all apps together and by each.

An app may keep as much as is left for the others (the dynamic threshold of buffers in a switch: Choudhury and Hahne
1998). Alone it has half of all; of two that want all each has a third. So whatever one app's requests wait for, those
of another find room.
"""

from __future__ import annotations


class BodyBudget:
    """`bytes` is the sum. Bytes whose app is not known yet count as those of one more app, ""."""

    __slots__ = ("_by_app", "_most", "bytes")

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self._most = most
        self._by_app: dict[str, int] = {}

    def add(self, app: str, count: int) -> None:
        if not count:
            return
        self.bytes += count
        self._by_app[app] = self._by_app.get(app, 0) + count

    def drop(self, app: str, count: int) -> None:
        """Bytes that were added are kept no more."""
        self.bytes -= count
        left = self._by_app[app] - count
        if left:
            self._by_app[app] = left
        else:
            del self._by_app[app]

    def too_much(self, app: str) -> bool:
        """Whether this app keeps more than it may."""
        return self._by_app.get(app, 0) > self._most - self.bytes

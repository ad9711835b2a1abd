"""The rumours still to be told: the newest one of each member, and how often it was sent."""

from __future__ import annotations

import msgspec

SMALLEST = 8
"""No rumour is shorter, so with less room than this the queue is not searched."""
MISFITS_MAX = 8
"""A packet counts as full once so many rumours did not fit. A longer search would cost more the longer the queue is."""


class Rumours:
    """The rumour that was sent least comes first. A newer rumour about a member replaces the older one and counts from
    0."""

    __slots__ = ("_levels", "_of", "unsent")

    def __init__(self) -> None:
        self._levels: list[dict[str, tuple[msgspec.Raw, int]]] = []  # by how often sent; each oldest first
        self._of: dict[str, int] = {}
        self.unsent = 0
        """The bytes of the rumours that were not sent yet."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def put(self, name: str, encoded: bytes) -> None:
        self.drop(name)
        self._level(0)[name] = (msgspec.Raw(encoded), len(encoded))
        self._of[name] = 0
        self.unsent += len(encoded)

    def drop(self, name: str) -> None:
        level = self._of.pop(name, None)
        if level is not None:
            _, size = self._levels[level].pop(name)
            self.unsent -= 0 if level else size

    def take(self, room: int, most: int, limit: int) -> list[msgspec.Raw]:
        """Take rumours for one packet: at most `most`, of `room` bytes in all. A rumour that was sent `limit` times is
        dropped."""
        return self.share(1, room, most, limit)[0]

    def share(self, times: int, room: int, most: int, limit: int) -> list[list[msgspec.Raw]]:
        """Take rumours for several packets that are sent at once. Each gets the new rumours first, before those that
        are repeated."""
        if not self._of:
            return [[] for _ in range(times)]
        taken: list[tuple[msgspec.Raw, int]] = []
        moves: list[tuple[str, int]] = []
        misfits = 0
        for level, waiting in enumerate(self._levels):
            for name, (raw, size) in waiting.items():
                if room < SMALLEST or len(taken) >= most or misfits >= MISFITS_MAX:
                    break
                if size > room:
                    misfits += 1
                    continue
                room -= size
                taken.append((raw, level))
                moves.append((name, level))
        for name, level in moves:
            told = self._levels[level].pop(name)
            self.unsent -= 0 if level else told[1]
            if level + times >= limit:
                del self._of[name]
            else:
                self._level(level + times)[name] = told
                self._of[name] = level + times
        return [[raw for raw, level in taken if level + each < limit] for each in range(times)]

    def _level(self, level: int) -> dict[str, tuple[msgspec.Raw, int]]:
        while len(self._levels) <= level:
            self._levels.append({})
        return self._levels[level]

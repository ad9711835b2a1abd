"""What is still to be told: one rumour a member, the newest, and how often it was sent."""

from __future__ import annotations

import msgspec

SMALLEST = 8
"""No rumour is shorter: with less room than this there is no point in looking."""
MISFITS_MAX = 8
"""A packet that had no room for so many is full. Looking further would cost more the longer the queue is."""


class Rumours:
    """Least-sent first. A newer rumour about a member takes the place of the older and starts from nothing."""

    __slots__ = ("_levels", "_of", "unsent")

    def __init__(self) -> None:
        self._levels: list[dict[str, tuple[msgspec.Raw, int]]] = []  # by how often sent; each oldest first
        self._of: dict[str, int] = {}
        self.unsent = 0
        """Bytes of those that were not sent yet."""

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
        """Rumours for one packet: at most `most`, of `room` bytes in all. What was sent `limit` times is dropped."""
        return self.share(1, room, most, limit)[0]

    def share(self, times: int, room: int, most: int, limit: int) -> list[list[msgspec.Raw]]:
        """The same for several who are told at once: each hears what is new, and none waits for its turn behind what is
        told to others again."""
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

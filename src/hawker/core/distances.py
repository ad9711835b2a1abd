"""How far other regions are, by what round trips to them took; the map says it of those that were not measured yet.

    distances = Distances("ams")
    distances.told("fra", 0.0071)
    distances.nearest(["iad", "fra"])               # ["fra", "iad"]

Of the last round trips to a region the shortest counts: whatever is longer, somebody on the way, or one of both ends,
was busy. An order that changes with every measurement would send an app's requests now here, now there, and wake
machines in both places; so a region's distance changes only when it is clearly another one. Times in seconds. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from hawker.model.regions import PLACES, angle, place

SAMPLES = 8
"""Round trips that count, the newest: who is farther away now is so after as many."""
CLEARLY = 0.2
"""The part of a distance below which a difference is no change."""
LEAST_S = 0.001
"""Nor is less than that."""
_EARTH_M = 6_371_000
_SLOWNESS_S_PER_M = 2 * 1.5 / 200_000_000
"""There and back, in glass, by ways that are half as long again as the shortest: what is found between the regions of
the large clouds."""


class Distances:
    """The distances from the region `here`."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._lasts: dict[str, deque[float]] = {}
        self._settled: dict[str, float] = {}

    def told(self, region: str, seconds: float) -> None:
        """A round trip to it took so long."""
        lasts = self._lasts.setdefault(region, deque(maxlen=SAMPLES))
        lasts.append(seconds)
        now, before = min(lasts), self._settled.get(region)
        if before is None or abs(now - before) > max(CLEARLY * before, LEAST_S):
            self._settled[region] = now

    def distance(self, region: str) -> float:
        """A round trip's time, as it counts now. Infinite where neither was measured nor has a place on the map."""
        if (known := self._settled.get(region)) is not None:
            return known
        if region not in PLACES or self._here not in PLACES:
            return inf
        return angle(place(self._here), place(region)) * _EARTH_M * _SLOWNESS_S_PER_M

    def nearest(self, regions: Iterable[str]) -> list[str]:
        """The nearest first; of those equally far, by name."""
        return sorted(regions, key=lambda region: (self.distance(region), region))

"""How far other regions are, by what round trips to them took; the map says it of those that were not measured yet.

    distances = Distances("ams")
    distances.told("fra", 0.0071)
    distances.nearest(["iad", "fra"])               # ["fra", "iad"]

The shortest of the last round trips to a region counts, because a longer one only shows that one end, or somebody on
the way, was busy. If the order changed with every measurement, an app's requests would go now here, now there, and wake
machines in both places. So a region's distance changes only when the difference is clear. Times are in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from hawker.model.regions import PLACES, angle, place

SAMPLES = 8
"""How many of the newest round trips count: a region that is farther away now is seen so after as many."""
CLEARLY = 0.2
"""A difference of less than this part of a distance is no change."""
LEAST_S = 0.001
"""A difference of less than this is no change either."""
_EARTH_M = 6_371_000
_SLOWNESS_S_PER_M = 2 * 1.5 / 200_000_000
"""A round trip through glass fibre that is 1.5 times as long as the shortest way, as measured between the regions of
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
        """The round trip's time that counts now; infinite for a region that was not measured and is not on the map."""
        if (known := self._settled.get(region)) is not None:
            return known
        if region not in PLACES or self._here not in PLACES:
            return inf
        return angle(place(self._here), place(region)) * _EARTH_M * _SLOWNESS_S_PER_M

    def nearest(self, regions: Iterable[str]) -> list[str]:
        """The nearest first; of those equally far, by name."""
        return sorted(regions, key=lambda region: (self.distance(region), region))

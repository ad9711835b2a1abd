"""Metrics of both ways: what the activator counts, and what HAProxy has of what it carries by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hawker.core.metrics import Family
from hawker.proxy.embedded.counters import Counted, Counters
from hawker.proxy.haproxy.runtime import CLASSES


class Counting(Counters):
    def __init__(self, of: Counted) -> None:
        super().__init__(of)
        self.answers = dict.fromkeys(CLASSES, 0)

    def carried(self, since: Sequence[int]) -> None:
        """Answers of machines, of each of `CLASSES`, since the last time."""
        for name, count in zip(CLASSES, since, strict=True):
            self.answers[name] += count

    def collect(self) -> Iterator[Family]:
        yield from super().collect()
        text = "Users' requests that HAProxy carried by itself"
        carried = Family("counter", "hawker_proxy_carried_requests", text, ["status"])
        for name, count in self.answers.items():
            carried.add(count, name)
        yield carried

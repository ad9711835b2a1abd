"""The metric of what HAProxy carries by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hawker.core.metrics import Family
from hawker.proxy.haproxy.runtime import CLASSES


class CarriedRequests:
    def __init__(self) -> None:
        self.answers = dict.fromkeys(CLASSES, 0)

    def add(self, since: Sequence[int]) -> None:
        """Machines' answers of each of `CLASSES` since the last time."""
        for name, count in zip(CLASSES, since, strict=True):
            self.answers[name] += count

    def collect(self) -> Iterator[Family]:
        text = "Users' requests that HAProxy carried by itself"
        carried = Family("counter", "hawker_proxy_carried_requests", text, ["status"])
        for name, count in self.answers.items():
            carried.add(count, name)
        yield carried

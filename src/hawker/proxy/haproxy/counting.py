"""Metrics of both ways: what the activator counts, and what HAProxy has of what it carries by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

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

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        carried = CounterMetricFamily(
            "hawker_proxy_carried_requests", "Users' requests that HAProxy carried by itself", labels=["status"]
        )
        for name, count in self.answers.items():
            carried.add_metric([name], count)
        yield carried

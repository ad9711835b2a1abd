"""What the data plane counts: plain integers on the path of a request, made into metrics when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Counters(Collector):
    """`register` it with a registry. `statuses` has 499 for clients that left."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.retries = 0
        self.replays = 0
        self.tunnels = 0
        self.in_flight = 0
        self.connections = 0
        self.machine_connections = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)

    def answered(self, status: int, seconds: float) -> None:
        """A request is over; `seconds` to the first byte of its answer, under 0: there was none."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if seconds >= 0:
            self.seconds += seconds
            self.buckets[bisect_left(BUCKETS_S, seconds)] += 1

    def unread(self, status: int) -> None:
        """What came could not be read as a request."""
        self.refused[status] = self.refused.get(status, 0) + 1

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("hawker_proxy_requests", "Users' requests by status", labels=["status"])
        for status, count in self.statuses.items():
            requests.add_metric([str(status)], count)
        yield requests
        unread = CounterMetricFamily("hawker_proxy_unread", "Requests that were none, by status", labels=["status"])
        for status, count in self.refused.items():
            unread.add_metric([str(status)], count)
        yield unread
        for name, text, value in (
            ("retries", "Requests sent to a machine once more", self.retries),
            ("replays", "Requests that a machine handed on", self.replays),
            ("machine_connections", "Connections opened to machines", self.machine_connections),
        ):
            yield CounterMetricFamily(f"hawker_proxy_{name}", text, value=value)
        for name, text, value in (
            ("in_flight", "Requests that are not answered yet", self.in_flight),
            ("connections", "Clients' connections", self.connections),
            ("tunnels", "Connections that carry bytes of no HTTP", self.tunnels),
        ):
            yield GaugeMetricFamily(f"hawker_proxy_{name}", text, value=value)
        total = 0
        buckets = []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.buckets, strict=True):
            total += count
            buckets.append((bound, float(total)))
        seconds = HistogramMetricFamily("hawker_proxy_first_byte_seconds", "From a request to its answer's first byte")
        seconds.add_metric([], buckets, self.seconds)
        yield seconds

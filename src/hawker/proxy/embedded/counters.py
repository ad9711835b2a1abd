"""What the data plane counts: plain integers on the path of a request, made into metrics when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hawker.proxy.embedded.pool import Pool

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Seconds:
    """A histogram."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1

    def cumulated(self) -> list[tuple[str, float]]:
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return list(zip(bounds, map(float, accumulate(self.buckets)), strict=True))


class Connection(Protocol):
    @property
    def busy(self) -> int: ...


class Counted(Protocol):
    """What is counted when somebody asks."""

    @property
    def connections(self) -> Collection[Connection]: ...

    @property
    def tunnels(self) -> Collection[object]: ...

    @property
    def pool(self) -> Pool: ...


class Counters(Collector):
    """`register` it with a registry. `statuses` has 499 for clients that left."""

    def __init__(self, of: Counted) -> None:
        self._of = of
        self.statuses: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.retries = 0
        self.replays = 0
        self.handshakes = 0
        self.handshakes_failed = 0
        self.handshakes_before = (0, 0)
        """The same two of a program that stands before this one."""
        self.first_byte = Seconds()
        self.phases: dict[str, Seconds] = {}

    def answered(self, status: int, seconds: float) -> None:
        """A request is over; `seconds` to the first byte of its answer, under 0: there was none."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if seconds >= 0:
            self.first_byte.add(seconds)

    def spent(self, phase: str, seconds: float) -> None:
        """What one of the things took that a request may have to wait for."""
        known = self.phases.get(phase)
        if known is None:
            known = self.phases[phase] = Seconds()
        known.add(seconds)

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
        shaken, failed = self.handshakes_before
        for name, text, value in (
            ("retries", "Requests sent to a machine once more", self.retries),
            ("replays", "Requests that a machine handed on", self.replays),
            ("handshakes", "Handshakes of TLS with users", self.handshakes + shaken),
            ("handshakes_failed", "Connections of TLS that came to none", self.handshakes_failed + failed),
            ("machine_connections", "Connections opened to machines", self._of.pool.opened),
        ):
            yield CounterMetricFamily(f"hawker_proxy_{name}", text, value=value)
        connections = list(self._of.connections)
        for name, text, value in (
            ("in_flight", "Requests that are not answered yet", sum(each.busy for each in connections)),
            ("connections", "Clients' connections", len(connections)),
            ("tunnels", "Connections that carry bytes of no HTTP", len(self._of.tunnels)),
        ):
            yield GaugeMetricFamily(f"hawker_proxy_{name}", text, value=value)
        first_byte = HistogramMetricFamily(
            "hawker_proxy_first_byte_seconds", "From a request to its answer's first byte"
        )
        first_byte.add_metric([], self.first_byte.cumulated(), self.first_byte.total)
        yield first_byte
        phases = HistogramMetricFamily(
            "hawker_proxy_phase_seconds", "What requests waited for, by phase", labels=["phase"]
        )
        for phase, seconds in self.phases.items():
            phases.add_metric([phase], seconds.cumulated(), seconds.total)
        yield phases

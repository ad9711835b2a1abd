"""Counts what happens on the path of a request in plain integers, which become metrics when somebody asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from hawker.core.metrics import Distribution, Family
from hawker.proxy.embedded.upstreams import UpstreamPools

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Connection(Protocol):
    @property
    def busy(self) -> int: ...


class Counted(Protocol):
    """What these counters count when somebody asks."""

    @property
    def connections(self) -> Collection[Connection]: ...

    @property
    def tunnels(self) -> Collection[object]: ...

    @property
    def upstreams(self) -> UpstreamPools: ...


class Counters:
    """The counters of a data plane, to be registered with a registry. `statuses` has 499 for clients that left."""

    def __init__(self, of: Counted) -> None:
        self._of = of
        self.statuses: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.retries = 0
        self.replays = 0
        self.handshakes = 0
        self.handshakes_failed = 0
        self.handshakes_before = (0, 0)
        """The same two counts of a program that stands before this one, such as HAProxy."""
        self.first_byte = Distribution(BUCKETS_S)
        self.phases: dict[str, Distribution] = {}

    def answered(self, status: int, seconds: float) -> None:
        """A request is over; `seconds` to the first byte of its answer, under 0: there was none."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if seconds >= 0:
            self.first_byte.observe(seconds)

    def spent(self, phase: str, seconds: float) -> None:
        """How long a request had to wait for one thing."""
        known = self.phases.get(phase)
        if known is None:
            known = self.phases[phase] = Distribution(BUCKETS_S)
        known.observe(seconds)

    def unread(self, status: int) -> None:
        """What came could not be read as a request; it was answered with this status."""
        self.refused[status] = self.refused.get(status, 0) + 1

    def collect(self) -> Iterator[Family]:
        requests = Family("counter", "hawker_proxy_requests", "Users' requests by status", ["status"])
        for status, count in self.statuses.items():
            requests.add(count, str(status))
        yield requests
        unread = Family("counter", "hawker_proxy_unread", "Requests that were none, by status", ["status"])
        for status, count in self.refused.items():
            unread.add(count, str(status))
        yield unread
        shaken, failed = self.handshakes_before
        for name, text, value in (
            ("retries", "Requests sent to a machine once more", self.retries),
            ("replays", "Requests that a machine handed on", self.replays),
            ("handshakes", "Handshakes of TLS with users", self.handshakes + shaken),
            ("handshakes_failed", "Connections of TLS that came to none", self.handshakes_failed + failed),
            ("machine_connections", "Connections opened to machines", self._of.upstreams.http1.opened),
        ):
            yield Family("counter", f"hawker_proxy_{name}", text).add(value)
        connections = list(self._of.connections)
        for name, text, value in (
            ("in_flight", "Requests that are not answered yet", sum(each.busy for each in connections)),
            ("connections", "Clients' connections", len(connections)),
            ("tunnels", "Connections that carry bytes of no HTTP", len(self._of.tunnels)),
        ):
            yield Family("gauge", f"hawker_proxy_{name}", text).add(value)
        first_byte = Family("histogram", "hawker_proxy_first_byte_seconds", "From a request to its answer's first byte")
        yield first_byte.add_histogram(BUCKETS_S, self.first_byte.counts, self.first_byte.total)
        phases = Family("histogram", "hawker_proxy_phase_seconds", "What requests waited for, by phase", ["phase"])
        for phase, seconds in self.phases.items():
            phases.add_histogram(BUCKETS_S, seconds.counts, seconds.total, phase)
        yield phases

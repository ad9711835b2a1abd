"""Logs and metrics: how they are set up, and the list of metric names with their units.

A log line is one event with fields, never a sentence: `step.completed flow=machine.start step=launch resource=...
cause=...`. Names and units listed here are an interface; change them with a note. Resource ids and causes are not
metric labels, since there are as many as machines; counters show them as exemplars.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from hawker.core.metrics import Count, Counter, Distribution, Gauge, Histogram, Registry

_LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)


class Metrics:
    """One registry per agent. Times are seconds."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.measured: list[Callable[[Metrics], None]] = []  # each sets its gauges, just before somebody reads them
        self.steps = self._counter("hawker_steps", "Attempts of steps by outcome", "flow", "step", "outcome")
        self.step_seconds = self._histogram(
            "hawker_step_seconds", "Time from the beginning of a step to its commit", "flow", "step"
        )
        self.runs = self._counter("hawker_runs", "Runs that ended, by status", "flow", "status")
        self.alarms = self._counter("hawker_alarms", "Runs parked for a person", "flow", "step")
        self.orders = self._counter("hawker_orders", "Orders by outcome", "region", "outcome")
        self.order_seconds = self._histogram(
            "hawker_order_seconds", "Time from an order to its fill or refusal", "region", "outcome"
        )
        self.held = self._gauge("hawker_held", "What the ledger holds, by resource", "resource")
        self.capacity = self._gauge("hawker_capacity", "What the worker has, by resource", "resource")
        self.requests = self._counter("hawker_requests", "HTTP requests by operation and status", "operation", "status")
        self.loop_stalls = self._counter(
            "hawker_loop_stalls",
            "Times that the event loop stood still until the agent was begun anew, since its process began",
        ).labels()
        self.loop_lag = self._gauge(
            "hawker_loop_lag_seconds",
            "The longest time by which the event loop was late, within the last minute or two",
        ).labels()
        self.catalog_bytes = self._counter("hawker_catalog_bytes", "Datagrams' bytes: sent, received", "direction")
        self.catalog_refused = self._counter(
            "hawker_catalog_refused", "Packets and requests of the catalog that were not taken, by reason", "why"
        )
        self.catalog_versions = self._counter(
            "hawker_catalog_versions",
            "Versions of owner logs by outcome: applied, missing (holes found), refused; merged counts ranges",
            "outcome",
        )
        self.catalog_behind = self._gauge(
            "hawker_catalog_behind_seconds",
            "For how long this node has known that it lacks versions of owners of its region that live; 0: none",
        ).labels()
        self.catalog_aside = self._gauge("hawker_catalog_quarantine", "Rows that are kept but cannot be shown").labels()
        self.catalog_rumours = self._gauge(
            "hawker_catalog_rumours", "Versions and positions that wait to be told"
        ).labels()
        self.catalog_subscriptions = self._gauge(
            "hawker_catalog_subscriptions", "Subscriptions: distinct queries, and listeners", "of"
        )
        self.members = self._gauge("hawker_members", "Members of this region's group, by status", "status")

        self._steps: dict[tuple[str, str, str], tuple[Count, Distribution]] = {}
        self._requests: dict[tuple[str, int], Count] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self.registry.register(Counter(name, text, labels))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self.registry.register(Gauge(name, text, labels))

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return self.registry.register(Histogram(name, text, labels, bounds=_LATENCY_BUCKETS))

    def step(self, flow: str, step: str, outcome: str, seconds: float, exemplar: dict[str, str]) -> None:
        """Count an attempt of a step that has ended. The children are kept, since looking them up by labels costs more
        than counting."""
        there = self._steps.get((flow, step, outcome))
        if there is None:
            there = self.steps.labels(flow, step, outcome), self.step_seconds.labels(flow, step)
            self._steps[flow, step, outcome] = there
        counter, histogram = there
        counter.inc(exemplar=exemplar)
        histogram.observe(seconds)

    def request(self, operation: str, status: int) -> None:
        """A request was answered."""
        there = self._requests.get((operation, status))
        if there is None:
            there = self._requests[operation, status] = self.requests.labels(operation, status)
        there.inc()

    def exposition(self) -> bytes:
        """All metrics in the OpenMetrics text format."""
        for measure in self.measured:
            measure(self)
        return self.registry.exposition()


def exemplar(resource: str, cause: str) -> dict[str, str]:
    """Resource and cause for a counter's exemplar, cut to the 128 characters that OpenMetrics allows in all."""
    return {"resource": resource[:32], "cause": cause[:70]}


class Logger:
    """Each call is a line: `event` names what happened, `fields` say the rest. `exc_info` is an exception."""

    def debug(self, event: str, **fields: Any) -> None:
        _note("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        _note("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        _note("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        _note("error", event, fields)

    def critical(self, event: str, **fields: Any) -> None:
        _note("critical", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """An error, with the exception that is being handled."""
        _note("error", event, {**fields, "exc_info": sys.exc_info()[1]})


Sink = Callable[[str, str, dict[str, Any]], None]
"""Takes a line: its level, event and fields."""

LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def write_line(level: str, event: str, fields: dict[str, Any]) -> None:
    """Write a line as a JSON object to standard error, with the real time in UTC."""
    error = fields.pop("exc_info", None)
    if error is not None:
        fields["exception"] = "".join(traceback.format_exception(error)).rstrip()
    at = datetime.fromtimestamp(time.time(), UTC).replace(tzinfo=None)  # noqa: TID251  # nobody decides by it
    line = {**fields, "event": event, "level": level, "timestamp": f"{at.isoformat(timespec='microseconds')}Z"}
    sys.stderr.write(json.dumps(line, default=repr) + "\n")
    sys.stderr.flush()


_least = LOG_LEVELS["info"]
_sink: Sink = write_line


def _note(level: str, event: str, fields: dict[str, Any]) -> None:
    if heeded(level):
        _sink(level, event, fields)


def heeded(level: str) -> bool:
    """Whether lines of this level go anywhere."""
    return LOG_LEVELS[level] >= _least


def set_up_logs(*, level: str = "info") -> None:
    """Drop lines below this level from now on. Raises `KeyError` for a level that there is not."""
    global _least
    _least = LOG_LEVELS[level.lower()]


@contextmanager
def logs_into(sink: Sink, level: str = "debug") -> Iterator[None]:
    """Until the block ends, lines from this level on go there instead."""
    global _least, _sink
    before = _least, _sink
    _least, _sink = LOG_LEVELS[level], sink
    try:
        yield
    finally:
        _least, _sink = before


@contextmanager
def without_logs() -> Iterator[None]:
    """Drop log lines in a command that itself tells people what the parts it uses would log."""
    with logs_into(write_line, "critical"):
        yield


def get_logger() -> Logger:
    return Logger()

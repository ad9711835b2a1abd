"""What an agent counts, and how OpenMetrics writes it (https://prometheus.io/docs/specs/om/open_metrics_spec).

This module implements the part of the format that Hawker uses: counters, gauges and histograms with labels, and
exemplars of counters. The usual library, prometheus_client, imports a web server, which would cost each agent
1 MiB and 14 ms at its start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Generic, Protocol, Self, TypeVar

import msgspec

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Sample(msgspec.Struct, frozen=True):
    """One line: `name` is the family's with a suffix. `exemplar`: labels of what was counted last, with how much."""

    name: str
    labels: Mapping[str, str]
    value: float
    exemplar: tuple[Mapping[str, str], float] | None = None


class Family:
    """The samples of one name at one time. `kind` is counter, gauge or histogram."""

    def __init__(self, kind: str, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.kind = kind
        self.name = name
        self.text = text
        self.samples: list[Sample] = []
        self._labels = tuple(labels)

    def add(self, value: float, *values: str, exemplar: tuple[Mapping[str, str], float] | None = None) -> Self:
        """A counter's or gauge's value, `values` being those of its labels."""
        suffix = "_total" if self.kind == "counter" else ""
        labels = dict(zip(self._labels, values, strict=True))
        self.samples.append(Sample(self.name + suffix, labels, float(value), exemplar))
        return self

    def add_histogram(self, bounds: Sequence[float], counts: Sequence[int], total: float, *values: str) -> Self:
        """`counts` has one number for each bucket and a last one for values above all `bounds`; `total` is the sum of
        all values."""
        labels = dict(zip(self._labels, values, strict=True))
        cumulated = list(accumulate(counts))
        for bound, count in zip((*bounds, inf), cumulated, strict=True):
            self.samples.append(Sample(f"{self.name}_bucket", {**labels, "le": _number(bound)}, float(count)))
        self.samples.append(Sample(f"{self.name}_count", labels, float(cumulated[-1])))
        self.samples.append(Sample(f"{self.name}_sum", labels, total))
        return self

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escaped(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        for sample in self.samples:
            line = f"{sample.name}{_set(sample.labels) if sample.labels else ''} {_number(sample.value)}"
            if sample.exemplar:
                line += f" # {_set(sample.exemplar[0])} {_number(sample.exemplar[1])}"
            yield line


class Collector(Protocol):
    """A metric that a registry reads."""

    def collect(self) -> Iterable[Family]:
        """The families with their present values."""


C = TypeVar("C", bound=Collector)


class Registry:
    def __init__(self) -> None:
        self._collectors: list[Collector] = []

    def register(self, collector: C) -> C:
        self._collectors.append(collector)
        return collector

    def exposition(self) -> bytes:
        """All metrics as OpenMetrics text."""
        lines = [line for collector in self._collectors for each in collector.collect() for line in each.lines()]
        return "\n".join([*lines, "# EOF\n"]).encode()

    def value(self, name: str, /, **labels: str) -> float | None:
        """The value of one sample, or None if no sample has this name and these labels."""
        samples = (sample for each in self._collectors for family in each.collect() for sample in family.samples)
        return next((each.value for each in samples if each.name == name and each.labels == labels), None)


class Count:
    """The value of a counter with one set of labels. It only rises."""

    def __init__(self) -> None:
        self.value = 0.0
        self.exemplar: tuple[Mapping[str, str], float] | None = None

    def inc(self, amount: float = 1.0, exemplar: Mapping[str, str] | None = None) -> None:
        self.value += amount
        if exemplar is not None:
            self.exemplar = exemplar, amount


class Level:
    """The value of a gauge with one set of labels: one that was set, or a function that is called at each reading."""

    def __init__(self) -> None:
        self._value = 0.0
        self._read: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        self._value = value

    def set_function(self, read: Callable[[], float]) -> None:
        self._read = read

    @property
    def value(self) -> float:
        return self._value if self._read is None else self._read()


class Distribution:
    """The counts of a histogram with one set of labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self._bounds, value)] += 1


_Child = TypeVar("_Child")


class _Metric(Generic[_Child]):
    """A metric and its children, one for each set of label values. A metric without labels has one child from the
    start."""

    def __init__(self, name: str, text: str, labels: Sequence[str], make: Callable[[], _Child]) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._make = make
        self._children: dict[tuple[str, ...], _Child] = {} if labels else {(): make()}

    def labels(self, *values: object) -> _Child:
        key = tuple(map(str, values))
        if len(key) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels)}, not {len(key)} of them")
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._make()
        return child


class Counter(_Metric[Count]):
    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels, Count)

    def collect(self) -> list[Family]:
        found = Family("counter", self._name, self._text, self._labels)
        for values, count in self._children.items():
            found.add(count.value, *values, exemplar=count.exemplar)
        return [found]


class Gauge(_Metric[Level]):
    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels, Level)

    def collect(self) -> list[Family]:
        found = Family("gauge", self._name, self._text, self._labels)
        for values, level in self._children.items():
            found.add(level.value, *values)
        return [found]


class Histogram(_Metric[Distribution]):
    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels, lambda: Distribution(bounds))
        self._bounds = bounds

    def collect(self) -> list[Family]:
        found = Family("histogram", self._name, self._text, self._labels)
        for values, its in self._children.items():
            found.add_histogram(self._bounds, its.counts, its.total, *values)
        return [found]


def _number(value: float) -> str:
    return "+Inf" if value == inf else "-Inf" if value == -inf else "NaN" if value != value else repr(float(value))


def _set(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

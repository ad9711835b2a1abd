"""What is counted is read back as it was, by a parser of OpenMetrics that others wrote."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hawker.core.metrics import CONTENT_TYPE, Counter, Family, Gauge, Histogram, Registry

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False)


Read = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by name and labels."""


def read(registry: Registry) -> Read:
    text = registry.exposition().decode()
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # the library leaves it untyped
    return {(each.name, tuple(each.labels.items())): each.value for family in families for each in family.samples}


@given(TEXTS, st.dictionaries(TEXTS, NUMBERS, max_size=4), TEXTS)
def test_labels_and_values_of_any_kind_are_read_as_they_were_written(
    text: str, values: dict[str, float], exemplar: str
) -> None:
    registry = Registry()
    gauge, counter = Gauge("level", text, ["of"]), Counter("seen", text, ["of", "what"])
    registry.register(gauge)
    registry.register(counter)
    for label, value in values.items():
        gauge.labels(label).set(value)
        counter.labels(label, "x").inc(abs(value), {"cause": exemplar})
    wanted: Read = {("level", (("of", label),)): value for label, value in values.items()}
    wanted |= {("seen_total", (("of", label), ("what", "x"))): abs(value) for label, value in values.items()}
    assert read(registry) == wanted


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_what_is_at_most_its_bounds(seconds: list[float]) -> None:
    registry, bounds = Registry(), (0.5, 1.0, 10.0)
    histogram = Histogram("took", "", bounds=bounds)
    registry.register(histogram)
    for each in seconds:
        histogram.labels().observe(each)
    found = read(registry)
    for bound, text in zip((*bounds, math.inf), ("0.5", "1.0", "10.0", "+Inf"), strict=True):
        assert found["took_bucket", (("le", text),)] == sum(each <= bound for each in seconds)
    assert found["took_count", ()] == len(seconds)
    assert found["took_sum", ()] == pytest.approx(sum(seconds))


def test_a_counter_shows_what_was_counted_last_beside_its_value() -> None:
    registry = Registry()
    counter = Counter("steps", "Steps", ["flow"])
    registry.register(counter)
    counter.labels("start").inc(2, {"resource": "m1"})
    counter.labels("start").inc()
    assert registry.exposition().splitlines() == [
        b"# HELP steps Steps",
        b"# TYPE steps counter",
        b'steps_total{flow="start"} 3.0 # {resource="m1"} 2.0',
        b"# EOF",
    ]


def test_a_level_is_asked_for_when_somebody_reads_it() -> None:
    registry, now = Registry(), [1.0, math.nan]
    gauge = Gauge("lag", "")
    registry.register(gauge)
    gauge.labels().set_function(lambda: now.pop(0))
    assert registry.value("lag") == 1.0
    assert b"\nlag NaN\n" in registry.exposition()


def test_labels_are_as_many_as_were_named() -> None:
    with pytest.raises(ValueError, match="steps has the labels flow, step, not 1 of them"):
        Counter("steps", "", ["flow", "step"]).labels("start")
    with pytest.raises(ValueError, match="longer"):
        Family("gauge", "level", "").add(1.0, "more")


def test_a_value_that_is_not_there_is_none() -> None:
    registry = Registry()
    registry.register(Counter("seen", "", ["of"]))
    assert registry.value("seen_total", of="x") is None


def test_readers_are_told_the_format() -> None:
    assert CONTENT_TYPE.startswith("application/openmetrics-text; version=1.0.0;")

"""Regions by their distance: measured, or as they lie on the map."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.distances import CLEARLY, LEAST_S, SAMPLES, Distances
from hawker.model.regions import PLACES

CODES = st.sampled_from([*sorted(PLACES), "lab", "basement"])
SECONDS = st.floats(0.0001, 1.0)


def nearest(here: str, regions: list[str]) -> list[str]:
    return Distances(here).nearest(regions)


def test_the_nearest_region_comes_first() -> None:
    assert nearest("ams", ["syd", "lhr", "fra", "basement", "ewr", "ams", "attic"]) == [
        *("ams", "lhr", "fra", "ewr", "syd", "attic", "basement")
    ]


def test_the_shorter_way_round_the_earth_counts() -> None:
    assert nearest("lax", ["lhr", "nrt"]) == ["lhr", "nrt"]  # 8,770 and 8,820 km
    assert nearest("sjc", ["jnb", "nrt"]) == ["nrt", "jnb"]


@pytest.mark.parametrize(
    ("here", "there", "usual_s"), [("ams", "iad", 0.085), ("fra", "lhr", 0.013), ("lax", "nrt", 0.1)]
)
def test_the_map_guesses_a_round_trip_within_a_third_of_what_is_usual(here: str, there: str, usual_s: float) -> None:
    """Beside regions that were measured, those that were not are where they belong."""
    assert Distances(here).distance(there) == pytest.approx(usual_s, rel=0.34)


@given(here=CODES, regions=st.lists(CODES, unique=True))
def test_nothing_is_lost_and_the_order_does_not_depend_on_that_of_the_question(here: str, regions: list[str]) -> None:
    found = nearest(here, regions)
    assert sorted(found) == sorted(regions)
    assert found == nearest(here, [*reversed(regions)])


def test_what_was_measured_counts_more_than_the_map() -> None:
    distances = Distances("ams")
    distances.told("fra", 0.120)
    distances.told("basement", 0.001)
    assert distances.nearest(["fra", "syd", "iad", "basement", "attic"]) == ["basement", "iad", "fra", "syd", "attic"]
    assert distances.distance("attic") == inf


@given(first=SECONDS, more=st.lists(SECONDS, max_size=3 * SAMPLES))
def test_a_distance_is_the_shortest_of_the_last_round_trips_or_not_clearly_another(
    first: float, more: list[float]
) -> None:
    distances = Distances("ams")
    every = [first, *more]
    for count, seconds in enumerate(every, 1):
        distances.told("fra", seconds)
        shortest = min(every[max(0, count - SAMPLES) : count])
        counted = distances.distance("fra")
        assert abs(counted - shortest) <= max(CLEARLY * counted, LEAST_S)
        assert counted in every[:count]


@given(base=SECONDS, jitter=st.lists(st.floats(0.0, CLEARLY * 0.99), min_size=1, max_size=50))
def test_what_is_no_clear_change_changes_no_order(base: float, jitter: list[float]) -> None:
    distances = Distances("ams")
    distances.told("fra", base)
    distances.told("cdg", base * (1 + CLEARLY / 2))
    for each in jitter:
        distances.told("cdg", base * (1 + CLEARLY / 2) * (1 - each))
        assert distances.nearest(["cdg", "fra"]) == ["fra", "cdg"]
        distances.told("fra", base * (1 + each))
        assert distances.nearest(["cdg", "fra"]) == ["fra", "cdg"]


def test_who_is_farther_away_now_is_so_after_some_round_trips_and_who_is_nearer_at_once() -> None:
    distances = Distances("ams")
    distances.told("fra", 0.010)
    for _ in range(SAMPLES - 1):
        distances.told("fra", 0.050)
        assert distances.distance("fra") == 0.010
    distances.told("fra", 0.050)
    assert distances.distance("fra") == 0.050
    distances.told("fra", 0.020)
    assert distances.distance("fra") == 0.020

"""Regions by their distance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.model.regions import PLACES, nearest

CODES = st.sampled_from([*sorted(PLACES), "lab", "basement"])


def test_the_nearest_region_comes_first() -> None:
    assert nearest("ams", ["syd", "lhr", "fra", "basement", "ewr", "ams", "attic"]) == [
        *("ams", "lhr", "fra", "ewr", "syd", "attic", "basement")
    ]


def test_the_shorter_way_round_the_earth_counts() -> None:
    assert nearest("lax", ["lhr", "nrt"]) == ["lhr", "nrt"]  # 8,770 and 8,820 km
    assert nearest("sjc", ["jnb", "nrt"]) == ["nrt", "jnb"]


@given(here=CODES, regions=st.lists(CODES, unique=True))
def test_nothing_is_lost_and_the_order_does_not_depend_on_that_of_the_question(here: str, regions: list[str]) -> None:
    found = nearest(here, regions)
    assert sorted(found) == sorted(regions)
    assert found == nearest(here, reversed(regions))

"""Whom an order is offered to: all of a small region; of a larger one a draw, and some said to have the image."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.auction import candidates

REGION = [f"w{n:03}" for n in range(100)]


@given(st.integers(0, 60), st.sets(st.sampled_from([*REGION, "gone"])), st.integers(0), st.integers(1, 30))
def test_candidates_are_as_many_as_the_fan_out_none_twice_and_all_of_the_region(
    count: int, holders: set[str], seed: int, fanout: int
) -> None:
    workers = REGION[:count]
    asked = candidates(workers, random.Random(seed), fanout, holders)
    assert len(asked) == min(count, fanout) == len(set(asked))
    assert set(asked) <= set(workers)


def test_all_workers_of_a_small_region_are_asked() -> None:
    assert candidates(REGION[:20], random.Random(1), 20, {"w001"}) == REGION[:20]


@given(st.sets(st.sampled_from(REGION), min_size=1), st.integers(0))
def test_some_that_have_the_image_are_among_the_candidates_of_a_large_region(holders: set[str], seed: int) -> None:
    asked = candidates(REGION, random.Random(seed), 20, holders)
    assert len(holders & set(asked)) >= min(5, len(holders))


def test_the_others_are_drawn_from_everybody_so_that_an_old_view_keeps_nobody_out() -> None:
    rng = random.Random(3)
    seen = {name for _ in range(200) for name in candidates(REGION, rng, 20, REGION[:5])}
    assert seen == set(REGION)


def test_without_anybody_who_has_it_the_draw_is_as_it_always_was() -> None:
    assert candidates(REGION, random.Random(9)) == random.Random(9).sample(REGION, 20)

"""Stamps: above all that was seen, near the clock, and taken only once their time has come."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.hlc import AHEAD_MS, ahead, ms_of, newest, stamp, tick

MS = st.integers(0, 1 << 42)
STAMPS = st.integers(0, 1 << 58)


@given(last=STAMPS, now_ms=MS)
def test_a_tick_is_above_the_last_stamp_and_not_below_the_clock(last: int, now_ms: int) -> None:
    given_stamp = tick(last, now_ms)
    assert given_stamp > last
    assert ms_of(given_stamp) >= now_ms


def test_a_full_counter_runs_over_into_the_time() -> None:
    assert tick(stamp(5, 0xFFFF), 5) == stamp(6)


def test_a_stamp_more_than_500_ms_ahead_must_wait() -> None:
    assert AHEAD_MS == 500
    assert not ahead(stamp(1500, 7), 1000)
    assert ahead(stamp(1501), 1000)


def test_the_newest_row_does_not_depend_on_the_order() -> None:
    for rows in permutations([(1, "b", "old"), (2, "a", "tied"), (2, "b", "newest")]):
        assert newest(rows) == "newest"
    assert newest([]) is None

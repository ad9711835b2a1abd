"""What is left of a time whose end was written down, whatever has become of the clock since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.deadlines import left_ms

TIMES = st.integers(0, 2**45)
LENGTHS = st.integers(0, 2**33)


@given(TIMES, LENGTHS, TIMES)
def test_nothing_has_more_left_than_it_was_given_wherever_the_clock_is(since: int, length: int, now: int) -> None:
    assert 0 <= left_ms(since + length, length, now) <= length


@given(TIMES, LENGTHS, LENGTHS)
def test_by_a_clock_that_only_went_on_the_rest_is_left(since: int, length: int, passed: int) -> None:
    assert left_ms(since + length, length, since + passed) == max(0, length - passed)


@given(TIMES, LENGTHS, st.integers(1, 2**40))
def test_by_a_clock_that_was_set_back_before_it_began_all_of_it_is_left(since: int, length: int, back: int) -> None:
    assert left_ms(since + length, length, since - back) == length


@given(TIMES, LENGTHS, TIMES)
def test_what_it_is_put_down_to_is_kept_when_that_is_asked_again(since: int, length: int, now: int) -> None:
    left = left_ms(since + length, length, now)
    assert left_ms(now + left, length, now) == left

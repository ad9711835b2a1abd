from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.beats import BEAT_S, next_beat, until_beat

NOWS = st.floats(0, 1e6)


@given(NOWS, st.floats(0.75, 1000))
def test_what_is_due_now_and_then_is_due_at_the_nearest_beat(now: float, seconds: float) -> None:
    wait = until_beat(now, seconds)
    assert abs(wait - seconds) <= BEAT_S / 2 + 1e-6
    assert (now + wait) / BEAT_S == pytest.approx(round((now + wait) / BEAT_S))


@given(NOWS, st.floats(0, 0.74))
def test_what_comes_more_often_keeps_its_own_time(now: float, seconds: float) -> None:
    assert until_beat(now, seconds) == seconds


@given(NOWS)
def test_the_next_beat_is_neither_at_once_nor_far(now: float) -> None:
    assert BEAT_S / 2 <= next_beat(now) - now <= BEAT_S * 1.5
    assert next_beat(next_beat(now)) == next_beat(now) + BEAT_S

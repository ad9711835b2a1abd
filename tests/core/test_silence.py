"""How long a broker waits for a worker that did not answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.silence import ANSWERS, PATIENCE_S, SILENT_AFTER_S, Silence, asked, patience_s, unanswered

SILENT = Silence(since_s=10.0)
deadlines = st.floats(0.01, 100)


@given(deadlines)
def test_one_that_answers_is_given_the_whole_deadline(deadline_s: float) -> None:
    assert patience_s(ANSWERS, deadline_s) == deadline_s


def test_a_long_wait_in_vain_makes_it_silent_and_a_short_one_does_not() -> None:
    assert unanswered(ANSWERS, 10.0, 10.0 + SILENT_AFTER_S) == SILENT
    assert unanswered(ANSWERS, 10.0, 10.0 + SILENT_AFTER_S / 2) == ANSWERS


def test_silence_is_counted_from_the_first_wait() -> None:
    assert unanswered(SILENT, 20.0, 30.0) == SILENT


@given(deadlines)
def test_a_silent_one_is_waited_for_briefly_and_not_asked_twice_at_a_time(deadline_s: float) -> None:
    assert patience_s(SILENT, deadline_s) == min(PATIENCE_S, deadline_s)
    assert patience_s(asked(SILENT, True), deadline_s) == 0
    assert asked(asked(SILENT, True), False) == SILENT

"""How long what has failed is left alone."""

from __future__ import annotations

from hawker.proxy.backoff import MOST_S, Backoff


def test_requests_that_fail_together_are_one_time() -> None:
    backoff = Backoff(0.5)
    assert {backoff.failed(100.0 + n / 1000) for n in range(100)} == {100.5}


def test_each_time_is_twice_as_long_up_to_half_a_minute() -> None:
    backoff, now = Backoff(0.5), 0.0
    found = []
    for _ in range(9):
        until = backoff.failed(now)
        found.append(until - now)
        now = until
    assert found == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MOST_S, MOST_S, MOST_S]


def test_an_answer_ends_it() -> None:
    backoff = Backoff(0.5)
    for now in (0.0, 1.0, 5.0):
        backoff.failed(now)
    backoff.over()
    assert backoff.failed(20.0) == 20.5

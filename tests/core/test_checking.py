"""What results make of a health check, and when it is looked at next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.checking import (
    FIRST_S,
    GROWTH,
    JITTER,
    RELEARN_S,
    WAITING,
    Health,
    Outcome,
    after,
    delay_s,
    first_delay_s,
    fresh,
    resumed,
)
from hawker.model.checks import Check

UP, DOWN = Outcome(True, "200 OK"), Outcome(False, "connect: connection refused")
CHECK = Check(name="up", kind="readiness", type="tcp", port=80, interval_s=15.0, grace_s=10.0)


def look(health: Health, outcome: Outcome, age_s: float, check: Check = CHECK) -> Health:
    return after(health, outcome, check, age_s=age_s, now_ms=int(age_s * 1000))


def test_a_machine_that_has_just_started_does_not_pass_yet() -> None:
    assert fresh(5) == Health(status="warning", output=WAITING, changed_ms=5)


def test_what_fails_within_the_grace_period_does_not_count_and_says_why() -> None:
    health = look(fresh(0), DOWN, 9.9)
    assert (health.status, health.output, health.changed_ms) == ("warning", DOWN.output, 0)
    assert look(health, DOWN, 10.0).status == "critical"


def test_the_first_success_ends_the_grace_period() -> None:
    health = look(fresh(0), UP, 1)
    assert (health.status, health.changed_ms) == ("passing", 1000)
    assert look(health, DOWN, 2).status == "critical"


def test_one_result_turns_it_and_the_time_is_that_of_the_last_turn() -> None:
    health = look(look(look(fresh(0), UP, 20), UP, 40), UP, 60)
    assert (health.status, health.changed_ms) == ("passing", 20_000)
    health = look(look(health, DOWN, 80), Outcome(False, "503"), 100)
    assert (health.status, health.output, health.changed_ms) == ("critical", "503", 80_000)
    assert look(health, UP, 120).status == "passing"


def test_a_worker_that_comes_back_goes_on_from_what_it_knew() -> None:
    passing = resumed("passing", "ok", 7)
    assert look(passing, UP, 30).changed_ms == 7
    assert look(resumed("critical", "503", 7), DOWN, 1).status == "critical", "no second grace period"
    assert look(resumed("warning", WAITING, 7), DOWN, 1).status == "warning"


def test_until_the_first_success_it_is_looked_at_soon_and_then_ever_later() -> None:
    health, delays = fresh(0), []
    for _ in range(60):
        delays.append(delay_s(health, CHECK, 0.5))
        health = look(health, DOWN, 1)
    assert delays[:3] == [FIRST_S, FIRST_S * GROWTH, FIRST_S * GROWTH**2]
    assert delays == sorted(delays)
    assert delays[-1] == CHECK.interval_s
    assert delay_s(look(health, UP, 1), CHECK, 0.5) == CHECK.interval_s
    assert delay_s(look(look(fresh(0), UP, 1), DOWN, 2), CHECK, 0.5) == CHECK.interval_s, "not faster when it fails"


results = st.lists(st.tuples(st.booleans(), st.floats(0, 5)), min_size=1, max_size=30)
checks = st.builds(
    lambda interval_s, grace_s: Check(
        name="x", kind="service", type="tcp", port=1, interval_s=interval_s, grace_s=grace_s
    ),
    st.floats(0.1, 3600),
    st.floats(0, 60),
)


@given(results=results, check=checks)
def test_its_status_is_that_of_the_last_result_but_for_grace(results: list[tuple[bool, float]], check: Check) -> None:
    health, age_s, passed = fresh(0), 0.0, False
    for good, waited_s in results:
        age_s += waited_s
        before, health = health, look(health, UP if good else DOWN, age_s, check)
        passed = passed or good
        in_grace = not passed and age_s < check.grace_s
        assert health.status == ("passing" if good else "warning" if in_grace else "critical")
        changed = health.status != before.status
        assert health.changed_ms == (int(age_s * 1000) if changed else before.changed_ms)
        assert health.had_success == passed


@given(results=results, check=checks, draw=st.floats(0, 1))
def test_it_is_never_looked_at_more_seldom_than_its_interval_says(
    results: list[tuple[bool, float]], check: Check, draw: float
) -> None:
    health = fresh(0)
    assert 0 <= first_delay_s(health, check, draw) <= FIRST_S
    for good, _ in results:
        health = look(health, UP if good else DOWN, 1.0, check)
        delay = delay_s(health, check, draw)
        assert min(check.interval_s, FIRST_S) * (1 - JITTER) <= delay <= check.interval_s * (1 + JITTER)
        assert 0 <= first_delay_s(health, check, draw) <= min(check.interval_s, RELEARN_S)

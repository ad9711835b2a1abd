"""What a worker does by itself when a program ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.restart import BACKOFF_FIRST_S, BACKOFF_MOST_S, HEALTHY_AFTER_S, Ending, Verdict, backoff_s, decide
from hawker.model.config import Restart


def ended(status: int = 0, *, oom: bool = False, ran_s: float = 1.0, restarts: int = 0) -> Ending:
    return Ending(status=status, oom_killed=oom, ran_s=ran_s, restarts=restarts)


endings = st.builds(
    Ending,
    status=st.integers(-1, 255),
    oom_killed=st.booleans(),
    ran_s=st.floats(0, 10_000),
    restarts=st.integers(0, 10_000),
)
policies = st.builds(Restart, policy=st.sampled_from(["no", "on-failure", "always"]), max_retries=st.integers(0, 20))


@pytest.mark.parametrize(
    ("policy", "ending", "again"),
    [
        ("no", ended(0), False),
        ("no", ended(1), False),
        ("no", ended(137, oom=True), False),
        ("on-failure", ended(0), False),
        ("on-failure", ended(1), True),
        ("on-failure", ended(-1), True),  # nobody saw how it ended
        ("on-failure", ended(0, oom=True), True),  # the kernel killed a child of it
        ("on-failure", ended(1, restarts=9), True),
        ("on-failure", ended(1, restarts=10), False),
        ("always", ended(0), True),
        ("always", ended(1, restarts=1000), True),
    ],
)
def test_the_table(policy: str, ending: Ending, again: bool) -> None:
    assert decide(Restart(policy=policy, max_retries=10), ending).again is again  # type: ignore[arg-type]


def test_the_rule_says_why() -> None:
    assert decide(Restart(policy="no"), ended(3)).rule == "restart policy no: exit status 3"
    assert decide(Restart(), ended(137, oom=True)).rule == "restart policy on-failure: out of memory, restart 1"
    used_up = decide(Restart(max_retries=2), ended(1, restarts=2))
    assert used_up.rule == "restart policy on-failure: exit status 1, 2 of 2 retries used"


@pytest.mark.parametrize("retries", range(21))
def test_on_failure_stops_after_exactly_its_retries(retries: int) -> None:
    policy = Restart(policy="on-failure", max_retries=retries)
    for status in range(1, 256):
        restarts = 0
        for _ in range(retries + 5):
            verdict = decide(policy, ended(status, restarts=restarts))
            if not verdict.again:
                break
            restarts = verdict.restarts
        assert restarts == retries


@given(policies, endings)
def test_a_verdict_counts_and_waits_only_when_it_starts_again(policy: Restart, ending: Ending) -> None:
    verdict = decide(policy, ending)
    so_far = 0 if ending.ran_s >= HEALTHY_AFTER_S else ending.restarts
    expected = so_far + 1 if verdict.again else so_far
    assert verdict.restarts == expected
    assert verdict.delay_s == (backoff_s(so_far) if verdict.again else 0.0)
    assert verdict.rule.startswith(f"restart policy {policy.policy}: ")


@given(endings)
def test_a_program_that_ran_well_for_a_while_starts_with_a_clean_slate(ending: Ending) -> None:
    long_run = ended(1, ran_s=HEALTHY_AFTER_S + ending.ran_s, restarts=ending.restarts)
    assert decide(Restart(max_retries=1), long_run) == Verdict(
        again=True, delay_s=BACKOFF_FIRST_S, restarts=1, rule="restart policy on-failure: exit status 1, restart 1"
    )


def test_the_delay_grows_and_is_capped() -> None:
    for few, many in pairwise(backoff_s(restarts) for restarts in range(10_001)):
        assert BACKOFF_FIRST_S <= few <= many <= BACKOFF_MOST_S


def test_the_delays_are_the_documented_ones() -> None:
    assert [backoff_s(n) for n in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]

"""When something outside fails, nothing moves: no machine is taken away, none is started elsewhere, and what restarts
does so by its own policy. With a scheduler that reconciles in its place, machines do move: the test has teeth."""

from __future__ import annotations

import pytest
from tests.kit.tiers import full
from tests.sim.scenarios.outage import MACHINES, REGION, outage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # on virtual time: a slow host changes nothing else


@pytest.mark.parametrize("seconds", [90, *full(600)])
def test_machines_that_turn_unhealthy_stay_where_they_are_and_run_on(seconds: int) -> None:
    found = outage(seconds=seconds)
    assert found.wrong == []
    assert len(found.before) == MACHINES
    assert found.after == found.before
    assert set(found.starts.values()) == {0}
    assert found.stops == 0


@pytest.mark.parametrize("seconds", [90, *full(600)])
def test_machines_that_crash_restart_where_they_are_and_as_their_policy_says(seconds: int) -> None:
    found = outage(crashing=True, seconds=seconds)
    assert found.wrong == []
    assert found.after == found.before
    assert found.ended >= 4 * (MACHINES // 3)  # the fault happened
    assert {region: count for region, count in found.starts.items() if count} == {REGION: found.by_policy}
    assert found.stops == 0


def test_a_scheduler_that_reconciles_moves_machines_in_the_same_world() -> None:
    found = outage(seconds=120, reconciling=True)
    moved = found.before.keys() - found.after.keys()
    assert len(moved) == MACHINES // 3
    assert sum(count for region, count in found.starts.items() if region != REGION) == len(moved)

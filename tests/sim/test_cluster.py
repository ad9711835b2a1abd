"""The whole system under faults: a few seeds that must hold every promise, and that a run repeats itself anywhere.

Many more seeds run in campaigns: `hawker sim campaign --seeds 1..300 --jobs 2`.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.tiers import full

from hawker.sim.campaign import Campaign
from hawker.sim.checks.acknowledged import OPERATIONS
from hawker.sim.plan import Plan
from hawker.sim.running import Report, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # on virtual time: a slow host changes nothing else

FEW, FEW_S = (1, 4), 30.0
MORE, MORE_S = (1, 2, 3, 4, 5, 6), 60.0
SHORT = Plan(seed=3, seconds=2.0)
SCRIPT = "from tests.sim.test_cluster import SHORT, simulate; print(simulate(SHORT).digest)"


@functools.cache
def report(seed: int, seconds: float) -> Report:
    found = simulate(Plan(seed=seed, seconds=seconds))
    gc.collect()
    return found


@pytest.mark.parametrize(
    ("seed", "seconds"), [*((seed, FEW_S) for seed in FEW), *full(*((seed, MORE_S) for seed in MORE))]
)
def test_a_seed_holds_every_promise(seed: int, seconds: float) -> None:
    assert report(seed, seconds).violations == []


def test_the_seeds_have_seen_faults() -> None:
    assert all(sum(report(seed, FEW_S).fired.values()) > 10 for seed in FEW)


def test_every_operation_was_acknowledged_in_the_seeds() -> None:
    told = {answer for seed in FEW for answer in report(seed, FEW_S).answers}
    assert [what for what in OPERATIONS if not any(each.startswith(f"{what} 2") for each in told)] == []


@pytest.mark.full
def test_more_seeds_have_seen_every_fault_and_rare_path() -> None:
    campaign = Campaign()
    for seed in MORE:
        campaign.add(report(seed, MORE_S))
    assert campaign.never() == []
    assert campaign.fired.total() > 20 * len(MORE)


def test_a_run_has_one_digest_and_another_seed_another_whatever_the_hash_seed_and_the_python() -> None:
    """`HAWKER_PYTHONS` may name more interpreters that have Hawker's dependencies, separated by colons."""
    digest = simulate(SHORT).digest
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "src"), str(root)))
    others = [found for found in os.environ.get("HAWKER_PYTHONS", "").split(":") if found]
    for python, hash_seed in [(sys.executable, "77"), *((other, "5") for other in others)]:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run([python, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == digest, (python, hash_seed, done.stderr)
    assert simulate(Plan(seed=4, seconds=SHORT.seconds)).digest != digest

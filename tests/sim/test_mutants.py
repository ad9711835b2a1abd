"""Each mutation of our own code is noticed by an invariant within a few seeds: the checks have teeth."""

from __future__ import annotations

import gc

import pytest
from tests.kit.tiers import full

from hawker.sim.mutants.market import MUTANTS
from hawker.sim.plan import Plan
from hawker.sim.running import simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # on virtual time: a slow host changes nothing else

SEEDS_MOST = 15
SECONDS = 20.0
SMALL = (("ord", 3), ("fra", 1))
MEMORY_MIB = 3584  # a fleet that is soon full
OFTEN = 8.0  # faults that a mutant needs come so many times as often


ALWAYS = ("ledger without check", "stop undone", "release bars nothing")


@pytest.mark.parametrize("name", [*ALWAYS, *full(*(name for name in MUTANTS if name not in ALWAYS))])
def test_a_mutant_is_noticed(name: str) -> None:
    mutant = MUTANTS[name]
    times = OFTEN if mutant.faults else 1.0
    seen: list[str] = []
    for seed in range(1, SEEDS_MOST + 1):
        report = simulate(
            Plan(
                seed=seed,
                seconds=SECONDS,
                workers=SMALL,
                memory_mib=MEMORY_MIB,
                mutant=name,
                only=mutant.faults,
                times=times,
            )
        )
        gc.collect()
        seen += report.violations
        if mutant.noticed(report.violations):
            return
    pytest.fail(f"{name} survived {SEEDS_MOST} seeds: {seen[:5]}")

"""Users' requests through real proxies under faults: a few seeds that hold every promise, and mutants that do not.

Many more seeds run in campaigns: `hawker sim campaign --users --seeds 1..300`.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.tiers import full
from tests.sim.scenarios.standbys import outages

from hawker.core.outage import Outage
from hawker.sim.mutants.base import Mutant, mutated
from hawker.sim.mutants.proxy import PROXY_MUTANTS
from hawker.sim.plan import Plan, plan_of
from hawker.sim.platform.replacing import Change
from hawker.sim.running import Report, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # on virtual time: a slow host changes nothing else

SEEDS = (1,)
SECONDS = {
    **dict.fromkeys(("any machine is started", "any connection", "no autostop", "none kept"), 1.0),
    "one over the hard limit": 8.0,
    "404 without knowing": 16.0,
    "POST sent again": 20.0,
}
"""How long there is load before a mutant shows; 12 for all others."""
QUICKEST = "any machine is started"
OFTEN = 4.0  # faults that a mutant needs come so many times as often
SMALL = (("ord", 2), ("fra", 1))
SCRIPT = "from tests.sim.test_users import plan, simulate; print(simulate(plan(3, 1.0)).digest)"


def plan(seed: int, seconds: float = 20.0, mutant: str = "") -> Plan:
    found = replace(plan_of(seed, seconds, users=True, mutant=mutant), workers=SMALL, clients=0)
    faults = PROXY_MUTANTS[mutant].faults if mutant else ()
    return replace(found, only=faults, times=OFTEN) if faults else found


@functools.cache
def report(seed: int) -> Report:
    found = simulate(plan(seed))
    gc.collect()
    return found


def test_where_nothing_goes_wrong_every_request_is_answered_whatever_owners_do_with_their_machines() -> None:
    assert simulate(replace(plan(2, 14.0), faults=[])).violations == []


@pytest.mark.parametrize("seed", SEEDS)
def test_users_are_promised_what_they_get_whatever_goes_wrong(seed: int) -> None:
    assert report(seed).violations == []


def test_the_seeds_have_seen_requests_answered_and_machines_put_to_rest_and_woken() -> None:
    answered = sum(report(seed).answers["request 200"] for seed in SEEDS)
    asked = sum(n for seed in SEEDS for what, n in report(seed).answers.items() if what.startswith("request "))
    assert asked > 100 * len(SEEDS)
    assert answered > asked * 0.6
    for seed in SEEDS:
        assert report(seed).paths["a machine was put to rest by its proxy"] > 5
        assert report(seed).paths["a sleeping machine was started for a request"] > 2


@pytest.mark.parametrize("name", [QUICKEST, *full(*(name for name in PROXY_MUTANTS if name != QUICKEST))])
def test_a_mutant_of_the_proxy_is_noticed(name: str) -> None:
    seen: list[str] = []
    for seed in range(1, 6):
        violations = simulate(plan(seed, SECONDS.get(name, 12.0), mutant=name)).violations
        gc.collect()
        seen += violations
        if PROXY_MUTANTS[name].noticed(violations):
            return
    pytest.fail(f"{name} survived: {seen[:5]}")


def test_a_run_with_users_has_one_digest_whatever_the_hash_seed() -> None:
    digest = simulate(plan(3, 1.0)).digest
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == digest, done.stderr


def test_a_standby_is_started_once_for_each_outage_however_many_proxies_see_it() -> None:
    found = outages()
    assert found.wrong == []
    counts = (found.before, found.once_gone, found.stopped_meanwhile, found.back, found.gone_again)
    assert counts == (0, 1, 1, 1, 2)


def test_a_proxy_that_forgets_what_was_done_about_an_outage_by_itself_and_others_is_noticed() -> None:
    forgetting = Change(Outage, "failed", _forgets), Change(Outage, "stood_up", lambda *args: False)
    with mutated(Mutant("every look is the first", (), forgetting)):
        assert outages().stopped_meanwhile > 1


def _forgets(outage: Outage) -> None:
    outage.failures += 1
    outage.told = False

"""The faults of a run, drawn from its seed before it begins.

Every kind has a random number generator of its own, so taking one out of a plan leaves the others as they are: that is
how a failing run is shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hawker.sim.faults.kinds import KINDS
from hawker.sim.plan import Fault, Plan


def faults_of(plan: Plan) -> list[Fault]:
    """In order of time."""
    faults = plan.faults
    if faults is None:
        faults = draw(str(plan.seed), plan.seconds, *plan.names(), only=plan.only, times=plan.times)
    gone = frozenset(plan.dropped)
    return [fault for number, fault in enumerate(faults) if number not in gone]


def draw(
    seed: str,
    seconds: float,
    workers: Sequence[str],
    brokers: Sequence[str],
    *,
    only: Sequence[str] = (),
    times: float = 1.0,
) -> list[Fault]:
    """A plan for a simulation of that length, in order of time. `only` of these kinds, and so many `times` as often."""
    plan: list[Fault] = []
    names = {"worker": list(workers), "broker": list(brokers), "any": [*workers, *brokers]}
    for name, kind in KINDS.items():
        rng = random.Random(f"{seed}/fault/{name}")
        expected = kind.rate * times * seconds / 60 if not only or name in only else 0.0
        for _ in range(int(expected) + (rng.random() < expected % 1)):
            node = rng.choice(names[kind.whom])
            other = rng.choice([n for n in names["any"] if n != node]) if kind.pair else ""
            plan.append(
                Fault(
                    at_s=round(rng.uniform(2, seconds), 3),
                    kind=name,
                    node=node,
                    other=other,
                    lasts_s=round(rng.uniform(*kind.lasts_s), 3),
                    amount=round(rng.uniform(*kind.amount), 3),
                )
            )
    return sorted(plan, key=lambda fault: (fault.at_s, fault.kind, fault.node))

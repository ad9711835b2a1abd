"""The faults of a run, drawn from its seed before it begins.

Every kind has a random number generator of its own, so taking one out of a plan leaves the others as they are: that is
how a failing run is shrunk.
"""

from __future__ import annotations

import random

from hawker.sim.faults.kinds import KINDS, OF_USERS
from hawker.sim.plan import Fault, Plan


def faults_of(plan: Plan) -> list[Fault]:
    """The faults of a run, in order of time."""
    faults = plan.faults if plan.faults is not None else _drawn(plan)
    gone = frozenset(plan.dropped)
    return [fault for number, fault in enumerate(faults) if number not in gone]


def _drawn(plan: Plan) -> list[Fault]:
    found: list[Fault] = []
    workers, brokers = plan.names()
    everybody = [*workers, *brokers]
    names = {"worker": workers, "broker": brokers, "any": everybody, "edge": plan.edges()}
    for name, kind in (KINDS | (OF_USERS if plan.served else {})).items():
        rng = random.Random(f"{plan.seed}/fault/{name}")
        expected = kind.rate * plan.times * plan.seconds / 60 if not plan.only or name in plan.only else 0.0
        for _ in range(int(expected) + (rng.random() < expected % 1)):
            node = rng.choice(names[kind.whom])
            other = rng.choice([n for n in everybody if n != node]) if kind.pair else ""
            found.append(
                Fault(
                    at_s=round(rng.uniform(2, plan.seconds), 3),
                    kind=name,
                    node=node,
                    other=other,
                    lasts_s=round(rng.uniform(*kind.lasts_s), 3),
                    amount=round(rng.uniform(*kind.amount), 3),
                )
            )
    return sorted(found, key=lambda fault: (fault.at_s, fault.kind, fault.node))

"""One run from its plan, and the report of it.

report = simulate(plan_of(seed=7))
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hawker import __version__
from hawker.sim.cluster import lives
from hawker.sim.hosts.node import MakeAgent, the_agent
from hawker.sim.mutants.base import mutated
from hawker.sim.mutants.market import MUTANTS
from hawker.sim.mutants.proxy import PROXY_MUTANTS
from hawker.sim.plan import Plan
from hawker.sim.platform.loop import SimLoop, Stalled, run


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went. Without `violations` everything held."""

    plan: Plan
    version: str
    digest: str
    events: int
    steps: int
    virtual_s: float
    violations: list[str]
    fired: dict[str, int]
    paths: dict[str, int]
    answers: dict[str, int]
    kinds: dict[str, int]
    last: list[str]


def simulate(plan: Plan, make: MakeAgent = the_agent, *, tell: Callable[[int, str], None] | None = None) -> Report:
    """`tell` hears of every event."""

    async def main(loop: SimLoop) -> Report:
        with lives(loop, plan, make) as cluster:
            cluster.record.tell = tell
            try:
                await cluster.run()
                violations = cluster.violations
            except Stalled as error:
                violations = [*cluster.oracle.violations, f"L2: {error.message}"]
        return Report(
            plan=plan,
            version=__version__,
            digest=cluster.record.digest(),
            events=cluster.record.count,
            steps=loop.steps,
            virtual_s=loop.time(),
            violations=violations,
            fired=dict(cluster.faults.fired),
            paths=dict(cluster.paths.taken(cluster.faults.fired)),
            answers=dict(cluster.oracle.answers + cluster.requests()),
            kinds=dict(cluster.record.kinds),
            last=cluster.record.last(),
        )

    with mutated((MUTANTS | PROXY_MUTANTS)[plan.mutant] if plan.mutant else None):
        return run(main)

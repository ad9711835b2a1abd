"""Many seeds: what went wrong, which faults fired, and which rare paths were taken.

A campaign fails when a run violates a promise, and also when a path it must have seen was never taken: then it has
shown nothing about that path.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hawker.sim.checks.paths import COMMON, NAMED, OF_USERS
from hawker.sim.faults import kinds
from hawker.sim.plan import Plan, plan_of
from hawker.sim.running import Report, simulate

FEW, MANY = 5, 100
"""With `MANY` seeds or more, every named path must have been taken; with `FEW` or more, the common ones."""
SEEDS_A_PROCESS = 20  # then a fresh one: Python gives little memory back


@dataclass
class Campaign:
    """The sum of its runs."""

    runs: int = 0
    events: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)  # violations by seed
    fired: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    users: bool = False  # in its runs

    def add(self, report: Report) -> None:
        self.runs += 1
        self.users |= bool(report.plan.served)
        self.events += report.events
        if report.violations:
            self.failed[report.plan.seed] = report.violations
        self.fired.update(report.fired)
        self.paths.update(report.paths)
        self.answers.update(report.answers)

    def never(self) -> list[str]:
        """What it must have seen and has not: paths, and kinds of faults once there were many seeds."""
        many = self.runs >= MANY
        expected = NAMED if many else COMMON if self.runs >= FEW else ()
        if self.users:
            expected = OF_USERS if self.runs >= FEW else ()
        paths = [path for path in expected if not self.paths[path]]
        faults = kinds.KINDS | (kinds.OF_USERS if self.users else {})
        return paths + [f"fault: {kind}" for kind in faults if many and not self.fired[kind]]

    @property
    def ok(self) -> bool:
        return not self.failed and not self.never()


def run_seeds(seeds: Sequence[int], jobs: int = 1, *, seconds: float = 60.0, users: bool = False) -> Iterator[Report]:
    """One report a seed, as they come."""
    plans = [plan_of(seed, seconds, users=users) for seed in seeds]
    if jobs == 1:
        yield from map(run_one, plans)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=SEEDS_A_PROCESS) as pool:
        yield from pool.imap(run_one, plans)


def run_one(plan: Plan) -> Report:
    report = simulate(plan)
    gc.collect()  # the loop runs without it
    return report

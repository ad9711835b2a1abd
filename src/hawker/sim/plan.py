"""What a run is made of: a `Plan`, which a seed and a few words decide.

A plan can be written down and read again: a failed run's record has its plan.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from hawker.sim.clients.owners import SERVED, Served

REGIONS = ["ord", "fra", "syd"]
WORKERS = (("ord", 3), ("fra", 2), ("syd", 2))
BROKERS = ("ord", "fra")
MEMORY_MIB = 6144
"""The memory of each worker, which is so small that regions fill up and orders race for the rest."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault: when, what, on which node (or between which two), for how long, how much."""

    at_s: float
    kind: str
    node: str
    other: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0

    def line(self) -> str:
        whom = f"{self.node}-{self.other}" if self.other else self.node
        return f"{self.at_s:.3f} {self.kind} {whom} for {self.lasts_s:.3f} s, {self.amount:.3f}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run is made of.

    `workers` counts them by region; `brokers` names the regions that have one. With `static` the brokers have a fixed
    list of workers instead of the catalog. If `faults` is None they are drawn from the seed, `only` of some kinds, and
    `times` as often; those at the places in `dropped` are left out. Each worker has `memory_mib`. `mutant` names one of
    `sim.mutants`. `served` has the apps that users ask for through proxies; without any there are no proxies. The
    worker `forgetful` keeps little of the past, so that it cuts its log again and again."""

    seed: int
    seconds: float = 60.0
    clients: int = 6
    workers: tuple[tuple[str, int], ...] = WORKERS
    brokers: tuple[str, ...] = BROKERS
    faults: list[Fault] | None = None
    dropped: list[int] = []
    only: tuple[str, ...] = ()
    times: float = 1.0
    static: bool = False
    memory_mib: int = MEMORY_MIB
    mutant: str = ""
    served: tuple[Served, ...] = ()
    forgetful: str = "ord-2"

    def names(self) -> tuple[list[str], list[str]]:
        workers = [f"{region}-{n}" for region, count in self.workers for n in range(1, count + 1)]
        return workers, [f"broker-{region}" for region in self.brokers]

    def edges(self) -> list[str]:
        """The nodes that take users' requests: the brokers and one worker, as on a host with every role."""
        workers, brokers = self.names()
        return [*brokers, *workers[:1]]


def plan_of(seed: int, seconds: float = 60.0, *, users: bool = False, mutant: str = "") -> Plan:
    """A plan as campaigns have it: clients of the market, or fewer of them, and users of apps through proxies."""
    plan = Plan(seed=seed, seconds=seconds, mutant=mutant)
    return replace(plan, clients=2, memory_mib=2 * MEMORY_MIB, served=SERVED) if users else plan

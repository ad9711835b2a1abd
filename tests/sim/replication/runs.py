"""Replication alone, simulated: six nodes with real databases, and a network and an operator that do their worst.

Nodes write, tell each other versions, ask for what they miss, and compare digests. Messages are lost, doubled,
reordered, delayed and blocked one way; nodes are killed, lose power and disks, come back with old backups and wrong
clocks, run the version before, publish rows that make no sense, and drop old tombstones.

*Always*, after every delivery: what a replica shows of an owner is exactly what that owner had at the position that the
replica tells (S11), positions never go back (S12), and no row stops the rows after it (S13). *Eventually*, once the
faults are over: all replicas equal all owners within `ROUNDS_MOST` rounds of comparing with one random other (L1),
tombstones are gone (L6), nothing waits (L9), and merged rows read the same everywhere. *Sometimes*: every path of
`PATHS` is taken by some seed of a campaign.

`run` gives one seed's report, `campaign` adds up many. The world is in `world`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from tests.sim.replication.calm import calm
from tests.sim.replication.chaos import chaos
from tests.sim.replication.node import Kinds
from tests.sim.replication.report import FAULTS, PATHS, Report
from tests.sim.replication.world import World


class Table(msgspec.Struct, kw_only=True):
    """What the seeds of a campaign did together."""

    seeds: int = 0
    wrong: list[str] = []
    faults: dict[str, int] = {}
    paths: dict[str, int] = {}
    never: list[str] = []  # faults that never fired and paths that were never taken
    writes: int = 0
    deliveries: int = 0
    checks: int = 0
    rounds_most: int = 0

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.never


def run(seed: int, kinds: Kinds | None = None) -> Report:
    """One seed. The report is the same for the same seed, on any Python."""
    world = World(seed, kinds or Kinds())

    async def both() -> None:
        await chaos(world)
        await calm(world)

    def failed(_: object, context: Mapping[str, Any]) -> None:
        """A store answers its callers whatever is raised after a commit: here that ends the run."""
        world.failure = world.failure or context.get("exception")

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(failed)
        try:
            runner.run(both())
        except Exception as error:  # also one that is ours: a replica must not raise, whatever it is told
            world.report.wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
        return world.finish()


def campaign(seeds: Iterable[int], kinds: Kinds | None = None) -> Table:
    """Many seeds, added up."""
    table, faults, paths = Table(), Counter[str](), Counter[str]()
    for seed in seeds:
        report = run(seed, kinds)
        table.seeds += 1
        table.wrong += report.wrong
        faults.update(report.faults)
        paths.update(report.paths)
        table.writes += report.writes
        table.deliveries += report.deliveries
        table.checks += report.checks
        table.rounds_most = max(table.rounds_most, report.rounds)
    table.faults, table.paths = {n: faults[n] for n in FAULTS}, {n: paths[n] for n in PATHS}
    table.never = [name for name, count in (table.faults | table.paths).items() if not count]
    return table

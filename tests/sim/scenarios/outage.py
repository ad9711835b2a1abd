"""An outage of something outside: every program of a region turns unhealthy for ten minutes, and nobody asked for
anything.

A scheduler that reconciles would take the unhealthy machines away and start others elsewhere: here that is a stampede
after a fault that no move can mend. `outage` runs the market through it, and with `reconciling` also such a scheduler
in its place: a control loop that looks at health and replaces, as Nomad or Kubernetes would.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from hawker.model.rows import MachineRow, RunRow
from hawker.sim.clients.api import Answer, Api, machine_config
from hawker.sim.cluster import Cluster, lives
from hawker.sim.hosts.world import Program
from hawker.sim.plan import Fault, Plan
from hawker.sim.platform.loop import SimLoop, run

REGION = "fra"
MACHINES = 12
CRASH_S = 20.0  # after its start, a program without what it depends on gives up
LOOK_S = 10.0
LOOKS_BEFORE = 3  # unhealthy for so many looks in a row: replaced
NO_FAULTS: list[Fault] = []


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """What an outage led to. `before`, `after`: the worker of each machine; `starts` during it, by region.

    `by_policy` are the starts in the region that a machine's own restart policy asked for.
    """

    before: dict[str, str]
    after: dict[str, str]
    starts: dict[str, int]
    stops: int
    by_policy: int
    ended: int  # programs of the region that ended by themselves
    wrong: list[str]


def outage(*, seed: int = 1, seconds: float = 600.0, crashing: bool = False, reconciling: bool = False) -> Outage:
    """`crashing`: unhealthy programs also end with an error, again and again."""
    workers = (("ord", 1), (REGION, 1), ("syd", 1))
    plan = Plan(seed=seed, clients=0, workers=workers, brokers=("ord",), faults=NO_FAULTS)

    async def main(loop: SimLoop) -> Outage:
        with lives(loop, plan) as cluster:
            return await _outage(cluster, seconds, crashing=crashing, reconciling=reconciling)

    return run(main)


async def _outage(cluster: Cluster, seconds: float, *, crashing: bool, reconciling: bool) -> Outage:
    await cluster.up()
    await cluster.in_process("operator", _place(cluster))
    await asyncio.sleep(5)
    before, starts = _placement(cluster), _starts(cluster)
    stops = sum(len(node.world.stops) for node in cluster.workers)
    sick = [node for node in cluster.workers if node.settings.region == REGION]
    ended = Counter[str]()
    for node in sick:
        node.world.on_event = lambda what, spec: ended.update([what])
        if crashing:
            node.world.programs["serve"] = Program(runs_s=CRASH_S, code=1)
            for key in list(node.world.instances):
                node.world.end(key, code=1)
    unhealthy = {node.name for node in sick}
    began = cluster.loop.time()
    if reconciling:
        reconciler = cluster.in_process("operator", _reconcile(cluster, unhealthy, began + seconds))
        await reconciler
    else:
        await asyncio.sleep(seconds)
    now = _starts(cluster)
    return Outage(
        before=before,
        after=_placement(cluster),
        starts={region: now[region] - starts[region] for region in now},
        stops=sum(len(node.world.stops) for node in cluster.workers) - stops,
        by_policy=sum(_restarts(cluster, node.name) for node in sick),
        ended=ended["ended"],
        wrong=[*cluster.paths.violations, *(str(error) for error in cluster.loop.unhandled)],
    )


async def _place(cluster: Cluster) -> None:
    """As many machines in every region."""
    api = cluster.operator.api
    for number in range(MACHINES):
        region = cluster.workers[number % len(cluster.workers)].settings.region
        answer = await _order(api, f"outage-{number}", region)
        assert answer.status == 200, answer


async def _order(api: Api, label: str, region: str) -> Answer:
    config = machine_config("serve", label, restart={"policy": "on-failure", "max_retries": 10})
    body = {"name": label, "region": region, "config": config}
    return await api.ask("POST", "/v1/apps/web/machines", body, headers={"idempotency-key": label})


async def _reconcile(cluster: Cluster, unhealthy: set[str], until: float) -> None:
    """The scheduler that this is not: what is unhealthy is taken away and started elsewhere."""
    api, bad, number = cluster.operator.api, Counter[str](), 0
    while cluster.loop.time() < until:
        await asyncio.sleep(LOOK_S)
        found = await api.ask("GET", "/v1/apps/web/machines")
        for machine in found.body or []:
            if machine["hawker"]["worker"] not in unhealthy:
                continue
            bad[machine["id"]] += 1
            if bad[machine["id"]] == LOOKS_BEFORE:
                number += 1
                await _order(api, f"replacement-{number}", "ord" if number % 2 else "syd")
                await api.ask("DELETE", f"/v1/apps/web/machines/{machine['id']}?force=true")


def _placement(cluster: Cluster) -> dict[str, str]:
    """The worker of every machine that is there."""
    found: dict[str, str] = {}
    for node in cluster.workers:
        store = cluster.store(node)
        assert store is not None  # there are no faults
        for row in store.read.select(MachineRow, "state <> 'destroyed' order by id"):
            found[row.id] = node.name
    return found


def _starts(cluster: Cluster) -> Counter[str]:
    return Counter({node.settings.region: len(node.world.starts) for node in cluster.workers})


def _restarts(cluster: Cluster, name: str) -> int:
    """Starts that restart policies asked for."""
    store = cluster.store(cluster.nodes[name])
    assert store is not None
    runs = store.read.select(RunRow, "flow = 'machine.exit'")
    return sum("launch" in run.outputs or run.status == "done" for run in runs if "launch" in run.steps)

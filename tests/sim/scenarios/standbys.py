"""Hosts that lose power, and the machine that stands by for one of theirs.

Several proxies see each outage, and one of them is started anew in the middle of each. The standby is started once for
an outage: one that its owner stops meanwhile stays stopped, until there is another outage.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from hawker.sim.clients.api import machine_config
from hawker.sim.clients.owners import SERVED
from hawker.sim.cluster import Cluster, lives
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Plan
from hawker.sim.platform.loop import SimLoop, run

SEEN_S = 20.0
"""This long after an outage began each proxy has acted on it."""


class Outages(msgspec.Struct, frozen=True, kw_only=True):
    """How often the standby had been started at each moment, and what else was wrong."""

    before: int
    once_gone: int
    stopped_meanwhile: int
    back: int
    gone_again: int
    wrong: list[str]


def outages(*, seed: int = 1) -> Outages:
    plan = Plan(seed=seed, clients=0, workers=(("ord", 3),), brokers=("ord",), faults=[], served=SERVED)

    async def main(loop: SimLoop) -> Outages:
        with lives(loop, plan) as cluster:
            return await _outages(cluster)

    return run(main)


async def _outages(cluster: Cluster) -> Outages:
    await cluster.up()
    machine, there, lost = await cluster.in_process("operator", _pair(cluster))
    another = next(node for node in cluster.workers if node not in (there, lost))
    counts = []

    async def after(seconds: float) -> None:
        await asyncio.sleep(seconds)
        counts.append(sum(spec.machine == machine for spec in there.world.starts))

    await after(5.0)
    lost.cut_power()
    await after(SEEN_S)
    stopped = await cluster.in_process("operator", cluster.operator.api.ask("POST", _path(machine, "/stop"), {}))
    assert stopped.status == 200, stopped
    another.kill()
    another.start()
    await after(SEEN_S)
    lost.start()
    await after(SEEN_S)
    lost.cut_power()
    await asyncio.sleep(SEEN_S)
    another.kill()
    another.start()
    await after(SEEN_S)
    before, once_gone, stopped_meanwhile, back, gone_again = counts
    return Outages(
        before=before,
        once_gone=once_gone,
        stopped_meanwhile=stopped_meanwhile,
        back=back,
        gone_again=gone_again,
        wrong=[*cluster.paths.violations, *(str(error) for error in cluster.loop.unhandled)],
    )


async def _pair(cluster: Cluster) -> tuple[str, Node, Node]:
    """The standby, its host, and that of the machine which it stands by for."""
    await cluster.operator.make_apps(["web"])
    primary, its_host = await _order(cluster, "primary", {})
    for number in range(10):
        standby, host = await _order(cluster, f"standby-{number}", {"standbys": [primary]})
        if host is not its_host:
            return standby, host, its_host
    raise AssertionError("every machine is on one host")


async def _order(cluster: Cluster, name: str, more: dict[str, Any]) -> tuple[str, Node]:
    config = machine_config("serve", name, **more)
    body = {"name": name, "region": "ord", "config": config, "skip_launch": bool(more)}
    answer = await cluster.operator.api.ask("POST", "/v1/apps/web/machines", body)
    assert answer.status == 200, answer
    return answer.body["id"], cluster.nodes[answer.body["hawker"]["worker"]]


def _path(machine: str, what: str) -> str:
    return f"/v1/apps/web/machines/{machine}{what}"

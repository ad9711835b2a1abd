"""A machine that is ordered anew while its host is away: what brokers with old hints, and the host that returns, do."""

from __future__ import annotations

import asyncio

import pytest

from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.clients.api import Api, machine_config
from hawker.sim.cluster import Cluster
from hawker.sim.fleet import PORT, TOKEN
from hawker.sim.plan import Plan
from hawker.sim.platform.logs import logs_into
from hawker.sim.platform.loop import SimLoop, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # on virtual time: a slow host changes nothing else


@pytest.mark.parametrize("away", [False, True], ids=["back", "away"])
def test_a_machine_that_was_ordered_anew_is_destroyed_where_it_is_now_and_stays_so(away: bool) -> None:
    """A broker with an old hint was told that it is gone by the worker that had given it up. Found by the simulator,
    seed 40. And one that was destroyed while its first worker was away came to life there again."""

    async def main(loop: SimLoop) -> dict[str, tuple[State, int]]:
        cluster = Cluster(loop, Plan(seed=1, clients=0, workers=(("ord", 2),), brokers=("ord", "fra"), faults=[]))
        with logs_into(cluster.record):
            try:
                await cluster.up()
                await cluster.in_process("operator", story(cluster))
                return states(cluster)
            finally:
                cluster.end()
                loop.discard()

    async def story(cluster: Cluster) -> None:
        one, other = (
            Api({node.name: (node.station.address, PORT)}, TOKEN, cluster.operator.api._rng, cluster.oracle)
            for node in cluster.brokers
        )
        body = {"config": machine_config("serve", "a"), "region": "ord"}
        made = (await one.ask("POST", "/v1/apps/web/machines?wait=1", body)).body
        path, old = f"/v1/apps/web/machines/{made['id']}", cluster.nodes[made["hawker"]["worker"]]
        assert (await other.ask("GET", path)).status == 200  # now it remembers the worker
        await asyncio.sleep(2)
        old.cut_power()
        anew = await one.ask("POST", "/v1/apps/web/machines?wait=1", {**body, "replaces": made["id"]})
        assert (anew.status, anew.body["id"]) == (200, made["id"])
        assert anew.body["hawker"]["worker"] != old.name
        there = await one.ask("GET", path)  # while its first worker is away
        assert there.body["hawker"]["worker"] == anew.body["hawker"]["worker"]
        if away:
            assert (await one.ask("DELETE", f"{path}?force=true")).status == 200
            await asyncio.sleep(5)
        old.start()
        await asyncio.sleep(10)
        assert (await other.ask("GET", path)).body["hawker"]["worker"] == anew.body["hawker"]["worker"]
        if not away:
            assert (await other.ask("DELETE", f"{path}?force=true")).status == 200

    def states(cluster: Cluster) -> dict[str, tuple[State, int]]:
        found = {}
        for node in cluster.workers:
            store = cluster.store(node)
            assert store is not None
            [row] = store.read.select(MachineRow)
            found[node.name] = row.state, len(node.world.instances)
        return found

    assert run(main) == dict.fromkeys(("ord-1", "ord-2"), (State.destroyed, 0))

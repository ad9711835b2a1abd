"""Between regions at rest little is said, and news crosses as soon as ever: live agents on virtual time."""

from __future__ import annotations

import asyncio
from statistics import median

from msgspec.structs import asdict
from tests.kit.waiting import until

from hawker.agent.settings import AgentSettings, CatalogSettings, TokenSettings, WorkerRole
from hawker.model.guest import Resources
from hawker.model.rows import AppRow
from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
from hawker.sim.hosts.world import Program
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.record import Record
from hawker.store.tx import Tx

PORT = 4281
REGIONS = ("ord", "mad", "syd")
ROOM = asdict(Resources(cpus_shared=16, cpus_dedicated=1, memory_mib=4096, disk_mib=10240, machines=10))


class Regions:
    """Three of two workers each."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop = loop
        net = Net(loop, Record(loop.time), str(seed), list(REGIONS))
        self.nodes: list[Node] = []
        for name in (f"{region}-{n}" for region in REGIONS for n in (1, 2)):
            settings = AgentSettings(
                name=name,
                region=name.partition("-")[0],
                directory=DIRECTORY,
                tokens=TokenSettings(cluster="c" * 20),
                worker=WorkerRole(listen=f"0.0.0.0:{PORT}", capacity=ROOM),
                catalog=CatalogSettings(join=[f"{node.station.address}:{PORT}" for node in self.nodes[:1]]),
            )
            node = Node(net, str(seed), settings, {"serve": Program()}, the_agent)
            settings.catalog.advertise = f"{node.station.address}:{PORT}"
            self.nodes.append(node)
            node.start()

    def comparisons(self) -> float:
        """That were asked for by now."""
        found = [node.agent.metrics.requests.labels("Catalog_digest", 200) for node in self.nodes if node.agent]
        return sum(count.value for count in found)

    async def crossing_s(self, app: str) -> float:
        """From an app that is made at one worker until every node knows of it."""
        node, began = self.nodes[0], self.loop.time()

        def change(tx: Tx) -> None:
            tx.record("app.made", app, cause="a test")
            tx.put(
                AppRow(
                    name=app, id=app, org="alice", network=app, number=1, created_at_ms=tx.now_ms, stamp_ms=tx.now_ms
                )
            )

        assert node.agent is not None
        assert node.agent.worker is not None
        assert node.process is not None
        await self.loop.run_in(node.process, node.agent.worker.store.submit(change))
        await until(lambda: all(self._knows(node, app) for node in self.nodes))
        return self.loop.time() - began

    def _knows(self, node: Node, app: str) -> bool:
        assert node.agent is not None
        assert node.agent.catalog is not None
        return bool(node.agent.catalog.view.rows("select id from apps where id = ?", (app,)))


def test_regions_that_have_nothing_to_tell_each_other_seldom_compare_and_tell_news_as_soon_as_ever() -> None:
    async def main(loop: SimLoop) -> None:
        regions = Regions(loop, 1)
        await asyncio.sleep(60)
        before = regions.comparisons()
        await asyncio.sleep(60)
        at_rest = regions.comparisons() - before
        took = []
        for n in range(8):
            took.append(await regions.crossing_s(f"app-{n}"))
            await asyncio.sleep(60)
        for node in regions.nodes:
            node.kill()
        assert at_rest < 150, "345 at the usual pace"
        assert median(took) < 0.7, took
        assert max(took) < 1.3, took

    run(main)

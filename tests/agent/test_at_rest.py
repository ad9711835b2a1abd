"""How often an agent wakes that nobody asks anything: on virtual time, so that each time is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from msgspec.structs import asdict

from hawker.agent.settings import AgentSettings, TokenSettings, WorkerRole
from hawker.agent.watchdog import Report, Watchdog
from hawker.model.guest import Resources
from hawker.proxy.settings import ProxySettings
from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
from hawker.sim.hosts.world import Program
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.record import Record

ROOM = asdict(Resources(cpus_shared=16, cpus_dedicated=1, memory_mib=4096, disk_mib=10240, machines=10))


def stalled() -> NoReturn:
    raise AssertionError("nothing stands still here")


def test_a_worker_with_a_proxy_at_rest_wakes_twice_a_second_and_for_membership(tmp_path: Path) -> None:
    """What it does now and then it does at the same beats; membership has its own period, and asks other regions."""

    async def main(loop: SimLoop) -> int:
        settings = AgentSettings(
            name="ord-1",
            region="ord",
            directory=DIRECTORY,
            tokens=TokenSettings(cluster="c" * 20),
            worker=WorkerRole(listen="0.0.0.0:4281", capacity=ROOM),
            proxy=ProxySettings(backhaul="0.0.0.0:4290"),
        )
        node = Node(Net(loop, Record(loop.time), "1", ["ord"]), "1", settings, {"serve": Program()}, the_agent)
        settings.catalog.advertise = f"{node.station.address}:4281"
        node.start()
        await asyncio.sleep(0.123)  # what begins at different times comes together all the same
        report = Report(tmp_path / "stalled")
        watchdog = Watchdog(0.0, report, stalled)
        watchdog.start()
        await asyncio.sleep(60)
        assert node.serving
        before = loop.wakes
        await asyncio.sleep(60)
        wakes = loop.wakes - before
        watchdog.stop()
        report.close()
        node.kill()
        return wakes

    assert run(main) < 240, "218; where each loop has its own phase, 287"

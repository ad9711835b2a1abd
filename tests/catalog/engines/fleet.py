"""A fleet of live agents on virtual time, over any engine of the catalog. The engines are the built-in one and every
directory beside this file, each found by its entry point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from tests.kit.waiting import until

from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, WorkerRole
from hawker.catalog.base import Catalog
from hawker.model.guest import Resources
from hawker.model.rows import CheckRow, TallyRow
from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
from hawker.sim.hosts.world import Program
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.record import Record
from hawker.store.tx import Tx
from hawker.worker.daemon import Worker

HERE = Path(__file__).parent
PLUGINS = sorted(place.name for place in HERE.iterdir() if any(place.glob("*.dist-info")))
ENGINES = ("gossip", *PLUGINS)
PORT = 4281
USER = "t" * 20
ROOM = asdict(Resources(cpus_shared=16, cpus_dedicated=1, memory_mib=4096, disk_mib=10240, machines=10))
CHECKS = "select id, status, updated_at_ms from checks order by id"


class Fleet:
    """Agents by name. All share `directory`, for engines that keep something there, or have these `settings`."""

    def __init__(self, loop: SimLoop, engine: str, directory: Path, settings: dict[str, Any] | None = None) -> None:
        self.loop = loop
        self.net = Net(loop, Record(loop.time), "1", ["ord", "fra"])
        self._engine = engine
        if settings is None and engine in PLUGINS:
            settings = import_module(f"tests.catalog.engines.{engine}.engine").settings(directory)
        self._settings = {engine: settings} if settings else {}
        self.nodes: dict[str, Node] = {}

    async def worker(self, name: str, region: str = "ord") -> Node:
        return await self._add(name, region, worker=WorkerRole(listen=f"0.0.0.0:{PORT}", capacity=ROOM))

    async def broker(self, name: str, region: str = "ord") -> Node:
        return await self._add(name, region, broker=BrokerRole(listen=f"0.0.0.0:{PORT}"))

    async def _add(self, name: str, region: str, **roles: Any) -> Node:
        settings = AgentSettings(
            name=name,
            region=region,
            directory=DIRECTORY,
            tokens=TokenSettings(cluster="c" * 20, users={"alice": USER}),
            catalog=CatalogSettings(
                engine=self._engine,
                settings=self._settings,
                join=[f"{node.station.address}:{PORT}" for node in self.nodes.values()],
            ),
            **roles,
        )
        node = self.nodes[name] = Node(self.net, "1", settings, {"serve": Program()}, the_agent)
        settings.catalog.advertise = f"{node.station.address}:{PORT}"
        await self.start(node)
        return node

    async def start(self, node: Node) -> None:
        node.start()
        await until(lambda: node.serving)

    async def do(self, node: Node, work: Coroutine[Any, Any, Any]) -> Any:
        """In the node's own process, which a power cut may end."""
        assert node.process is not None
        return await self.loop.run_in(node.process, work)

    async def check(self, node: Node, *statuses: tuple[str, int], gone: tuple[str, ...] = ()) -> None:
        """One commit of the worker's that writes checks, each published in that commit."""

        def change(tx: Tx) -> None:
            tx.record("checked", node.name, cause="a test")
            for machine, at_ms in statuses:
                tx.put(a_check(machine, at_ms))
            for machine in gone:
                tx.delete(CheckRow, f"{machine}/up")

        await self.do(node, worker(node).store.submit(change))

    async def count(self, node: Node, app: str, machines: int) -> None:
        """The same for a row that all regions see."""

        def change(tx: Tx) -> None:
            tx.record("counted", app, cause="a test")
            tx.put(TallyRow(app=app, machines=machines))

        await self.do(node, worker(node).store.submit(change))

    async def until_seen(self, node: Node, sql: str, wanted: list[tuple[Any, ...]]) -> None:
        def seen() -> bool:
            return node.serving and rows(node, sql) == wanted

        try:
            await until(seen, 120)
        except TimeoutError:
            found = rows(node, sql) if node.serving else "nothing: it does not serve"
            raise AssertionError(f"{node.name}: {sql} gives {found}, not {wanted}") from None

    def end(self) -> None:
        for node in self.nodes.values():
            if node.process:
                node.kill()


def in_fleet(
    engine: str,
    directory: Path,
    test: Callable[[Fleet], Coroutine[Any, Any, None]],
    settings: dict[str, Any] | None = None,
) -> None:
    async def main(loop: SimLoop) -> None:
        fleet = Fleet(loop, engine, directory, settings)
        await test(fleet)
        assert not loop.unhandled
        fleet.end()
        await asyncio.sleep(0)

    run(main)


def a_check(machine: str, at_ms: int) -> CheckRow:
    return CheckRow(
        machine=machine,
        app="web",
        name="up",
        kind="service",
        service="tcp/80",
        instance="i",
        status="passing",
        output="",
        updated_at_ms=at_ms,
    )


def seen_check(machine: str, at_ms: int) -> tuple[Any, ...]:
    """The row of `CHECKS` that shows it."""
    return f"{machine}/up", "passing", at_ms


def catalog(node: Node) -> Catalog:
    assert node.agent is not None
    assert node.agent.catalog is not None
    return node.agent.catalog


def worker(node: Node) -> Worker:
    assert node.agent is not None
    assert node.agent.worker is not None
    return node.agent.worker


def rows(node: Node, sql: str) -> list[tuple[Any, ...]]:
    return catalog(node).view.rows(sql)

"""A market in one process over loopback: real agents with real images, and a driver that runs nothing.

```
async with market(tmp_path, ["ord-1", "ord-2"]) as there:
    async with there.client() as client: ...
```

Everything but the programs is real: brokers, offers, the catalog, HTTP between agents, image stores, unpacking. A
machine has started when its image is ready. No registry is asked but those whose names a test gives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import asdict
from tests.kit.images import settings as image_settings
from tests.kit.markets import Client
from tests.kit.registry import free_port
from tests.kit.waiting import eventually

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, WorkerRole
from hawker.agent.worker_parts import WorkerParts
from hawker.client.client import AsyncClient
from hawker.host import Host, live
from hawker.images.service import Images
from hawker.model.guest import Resources
from hawker.model.op import Request, StreamRequest
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import Program, World
from hawker.worker.images.peers import Peers

PROGRAM = "run"
CLUSTER, USER = "the agents' token", "a user's token"
ROOM = Resources(cpus_shared=64, cpus_dedicated=8, memory_mib=65536, disk_mib=1 << 20, machines=64)


class ImageDriver(FakeDriver):
    """Makes images ready as a container driver does, and pretends to run them."""

    def __init__(self, world: World, images: Images) -> None:
        super().__init__(world)
        self._images = images

    async def prepare(self, image: str) -> None:
        await self._images.ensure(image)


R = TypeVar("R")


class ImageMarket:
    """`images` by worker; `endpoint` is the broker's."""

    def __init__(self, endpoint: str, agents: dict[str, Agent], images: dict[str, Images]) -> None:
        self.endpoint = endpoint
        self.agents = agents
        self.images = images

    def peers(self, worker: str) -> Peers:
        """Where a worker asks others for images."""
        agent = self.agents[worker]
        assert agent.worker is not None
        assert agent.worker.parts.images._peers is not None
        return agent.worker.parts.images._peers

    @asynccontextmanager
    async def client(self, token: str = USER) -> AsyncIterator[Client]:
        client = Client(self.endpoint, token)
        try:
            yield client
        finally:
            await client.close()

    async def send(self, request: Request[R], token: str = USER) -> R:
        """What a program gets from a call."""
        async with AsyncClient(self.endpoint, token) as client:
            return await client.send(request)

    async def all_of(self, request: StreamRequest[R], token: str = USER) -> list[R]:
        """A stream, to its end."""
        async with AsyncClient(self.endpoint, token) as client, client.stream(request) as parts:
            return [part async for part in parts]


@asynccontextmanager
async def market(
    directory: Path, workers: Sequence[str], *, image_weight: float | None = None, **images: Any
) -> AsyncIterator[ImageMarket]:
    """Workers by name, `<region>-<number>`, and a broker in the first one's region. `images` goes into the settings of
    their images."""
    broker_port = free_port()
    found: dict[str, Images] = {}

    async def parts(settings: AgentSettings, role: WorkerRole, host: Host) -> WorkerParts:
        stack = AsyncExitStack()
        opened = await Images(settings.directory / "images", settings.images, host).open()
        stack.push_async_callback(opened.close)
        found[settings.name] = opened
        world = World(host, {PROGRAM: Program()})
        return WorkerParts(ImageDriver(world, opened).for_all(), opened, None, stack)

    def settings(name: str, port: int, join: list[str], **roles: Any) -> AgentSettings:
        return AgentSettings(
            name=name,
            region=name.rpartition("-")[0],
            directory=directory / name,
            tokens=TokenSettings(cluster=CLUSTER, users={"somebody": USER}),
            catalog=CatalogSettings(join=join),
            images=image_settings(**images),
            **roles,
        )

    async with AsyncExitStack() as stack:
        agents: dict[str, Agent] = {}
        join = [f"127.0.0.1:{broker_port}"]
        region = workers[0].rpartition("-")[0]
        broker = BrokerRole(listen=f"127.0.0.1:{broker_port}", image_weight=image_weight)
        todo = [settings(f"{region}-broker", broker_port, [], broker=broker)]
        for name in workers:
            port = free_port()
            role = WorkerRole(listen=f"127.0.0.1:{port}", capacity=asdict(ROOM))
            todo.append(settings(name, port, join, worker=role))
        for each in todo:
            agent = Agent(each, live(), make_worker_parts=parts)
            await agent.open()
            agents[each.name] = agent
            stack.push_async_callback(agent.close)
        there = ImageMarket(f"http://127.0.0.1:{broker_port}", agents, found)

        async def all_known() -> bool:
            nodes = [agent.catalog for agent in agents.values()]
            return all(node and len(node.view.rows("select name from workers")) == len(workers) for node in nodes)

        await eventually(all_known, "every agent knows all workers")
        yield there

"""The agents of a run on their hosts, the network between them, and what became of them so far.

A `Fleet` knows nothing of faults, of what is promised, or of who asks: those act on it (`faults`, `checks`, `traffic`,
`cluster`). The agents are the live ones, in `hawker.agent`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import asdict, replace

from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, WorkerRole
from hawker.model.guest import Resources
from hawker.proxy.embedded.settings import Settings as Embedded
from hawker.proxy.settings import ProxySettings, RouterSettings
from hawker.sim.clients import users
from hawker.sim.clients.api import Api
from hawker.sim.clients.oracle import Oracle
from hawker.sim.clients.orderers import PROGRAMS
from hawker.sim.clients.owners import WEB
from hawker.sim.hosts.node import DIRECTORY, MakeAgent, Node
from hawker.sim.hosts.world import Program
from hawker.sim.plan import MEMORY_MIB, REGIONS, Plan
from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process
from hawker.sim.platform.record import Record
from hawker.store.db import Store
from hawker.worker.drivers.base import InstanceSpec

PORT = 4281
BACKHAUL = 4290
TOKEN = "user-token-of-the-simulation"
CLUSTER_TOKEN = "cluster-token-of-the-simulation"
ROOM = Resources(cpus_shared=20, cpus_dedicated=2, memory_mib=MEMORY_MIB, disk_mib=1 << 20, machines=30)
IDLE_S, IDLE_LOOK_S = 2.5, 0.5
ROUTING = RouterSettings(
    idle_s=IDLE_S, idle_look_s=IDLE_LOOK_S, drain_s=4.0, gone_s=6.0, start_again_s=1.0, ready_s=15.0, stale_s=5.0
)


RECORDS_KEPT = 16
"""How many records the forgetful worker keeps of its log. A run writes twenty times as many: most that is over is
forgotten within it."""


class Fleet:
    """`losses`: when each worker's database lost what it had been told; `capacities`: the room each began with;
    `since`: starts and stops of its world before the last loss; `ends`: when agents of a node ended.

    `on_node` hears of what happens to a node's agent, `on_program` of every start and end of a program.
    """

    def __init__(self, loop: SimLoop, plan: Plan, make: MakeAgent) -> None:
        self.loop = loop
        self.plan = plan
        self.record = Record(loop.time)
        self.net = Net(loop, self.record, str(plan.seed), REGIONS)
        self.oracle = Oracle()
        self.nodes: dict[str, Node] = {}
        self.losses: dict[str, list[tuple[float, float]]] = {}
        self.capacities: dict[str, Resources] = {}
        self.since: dict[str, tuple[int, int]] = {}
        self.ends: dict[str, list[float]] = {}
        self.on_node: Callable[[Node, str, str], None] = lambda node, what, why: None
        self.on_program: Callable[[Node, str, InstanceSpec], None] = lambda node, what, spec: None
        self._make = make
        self._processes: list[Process] = []
        workers, brokers = plan.names()
        self.workers = [self._add(name, worker=True) for name in workers]
        self.brokers = [self._add(name, worker=False) for name in brokers]
        self._join()

    def _add(self, name: str, *, worker: bool) -> Node:
        region = next(region for region in REGIONS if region in name)
        room = replace(ROOM, memory_mib=self.plan.memory_mib)
        settings = AgentSettings(
            name=name,
            region=region,
            directory=DIRECTORY,
            tokens=TokenSettings(cluster=CLUSTER_TOKEN, users={"alice": TOKEN}),
            worker=self._worker_role(name, room) if worker else None,
            broker=None if worker else BrokerRole(listen=f"0.0.0.0:{PORT}"),
        )
        if self.plan.served:
            settings.proxy = _proxy(edge=name in self.plan.edges(), worker=worker)
        programs = {name: Program(**how) for name, (_, how) in PROGRAMS.items()} if worker else {}
        programs |= {name: Program(**how) for name, how in WEB.items()} if worker else {}
        node = self.nodes[name] = Node(self.net, str(self.plan.seed), settings, programs, self._make)
        node.settings.catalog = CatalogSettings(advertise=f"{node.station.address}:{PORT}")
        node.on_event = lambda what, why: self._on_node(node, what, why)
        node.disk.note = lambda what: self.record.note("sync", name, what)
        node.world.on_event = lambda what, spec: self.on_program(node, what, spec)
        self.losses[name], self.ends[name], self.capacities[name], self.since[name] = [], [], room, (0, 0)
        return node

    def _worker_role(self, name: str, room: Resources) -> WorkerRole:
        role = WorkerRole(listen=f"0.0.0.0:{PORT}", capacity=asdict(room), validate=True)
        if name == self.plan.forgetful:
            role.history_records = RECORDS_KEPT
        return role

    def _join(self) -> None:
        """Everybody knows a worker of each region to begin with, or all where brokers have a fixed list."""
        first = {node.settings.region: node for node in reversed(self.workers)}
        members = [f"{first[region].station.address}:{PORT}" for region in REGIONS if region in first]
        for node in self.nodes.values():
            here = node.settings.catalog.advertise
            node.settings.catalog.join = [member for member in members if member != here]
        if self.plan.static:
            addresses = [f"{n.name}@{n.settings.region}={n.station.address}:{PORT}" for n in self.workers]
            for node in self.brokers:
                assert node.settings.broker
                node.settings.broker.workers = addresses

    def _on_node(self, node: Node, what: str, why: str) -> None:
        self.record.note("agent", node.name, f"{what} {why}")
        if what == "end":
            self.ends[node.name].append(self.loop.time())
        self.on_node(node, what, why)

    def api(self, name: str) -> tuple[Api, random.Random]:
        """The brokers' addresses for somebody who asks them, and the random numbers by which that client decides."""
        brokers = {node.name: (node.station.address, PORT) for node in self.brokers}
        rng = random.Random(f"{self.plan.seed}/client/{name}")
        return Api(brokers, TOKEN, rng, self.oracle), rng

    def in_process(self, station: str, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        process = Process(station, self.net.stations[station])
        self._processes.append(process)
        return self.loop.run_in(process, coro)

    def store(self, node: Node) -> Store | None:
        """The database of a worker's agent that serves now."""
        return node.agent.worker.store if node.agent and node.agent.worker else None

    def lost(self, node: Node, *, since_s: float) -> None:
        """Note that a worker's database has lost what it was told since then."""
        self.losses[node.name].append((since_s, self.loop.time()))
        self.since[node.name] = (len(node.world.starts), len(node.world.stops))

    def forgot(self, worker: str, asked_s: float, told_s: float) -> bool:
        """Whether what a worker was asked and what was told of it in that time may be lost, with its disk or by a
        backup."""
        return any(since <= told_s and asked_s <= until for since, until in self.losses[worker])

    def end(self) -> None:
        """End the fleet: nothing of it has an effect any more."""
        for node in self.nodes.values():
            node.kill("the simulation is over")
            node.disk.close()
        for process in self._processes:
            self.loop.kill(process)


def _proxy(*, edge: bool, worker: bool) -> ProxySettings:
    """The proxy of a node."""
    return ProxySettings(
        listen={str(users.PORT): f"0.0.0.0:{users.PORT}"} if edge else {},
        backhaul=f"0.0.0.0:{BACKHAUL}" if worker else "",
        domain=users.DOMAIN,
        routing=ROUTING,
        embedded=Embedded(wait_s=users.WAIT_S, drain_s=2.0),
    )

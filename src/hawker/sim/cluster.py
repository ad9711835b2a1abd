"""The whole system in one process: agents on simulated hosts, clients, faults, and the end where everything is checked.

    report = simulate(Plan.of(seed=7))

A run has four parts: the agents come up; clients and faults for `seconds` of virtual time; then faults end and the
system comes to rest, within a stated time; then every promise is checked (`sim.promises`, `sim.invariants`). What the
agents are is in `hawker.agent`, what goes wrong in `sim.faults`, who asks in `sim.clients`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker import __version__
from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, WorkerRole
from hawker.model.guest import Resources
from hawker.model.rows import ReservationRow, RunRow
from hawker.sim import kernel, promises, traffic, watch
from hawker.sim.asking import Api
from hawker.sim.book import Book
from hawker.sim.clients import PROGRAMS, Client
from hawker.sim.faults import Fault, Faults, draw
from hawker.sim.logs import logs_into
from hawker.sim.loop import Process, SimLoop, Stalled, run
from hawker.sim.mutants import MUTANTS, mutated
from hawker.sim.net import Net
from hawker.sim.node import DIRECTORY, MakeAgent, Node, the_agent
from hawker.sim.operator import Operator
from hawker.sim.owners import SERVED, WEB, Owner, Served
from hawker.sim.paths import Paths
from hawker.sim.proxy_mutants import PROXY_MUTANTS
from hawker.sim.record import Record
from hawker.sim.world import Program
from hawker.store.db import Store
from hawker.worker.drivers.base import InstanceSpec

REGIONS = ["ord", "fra", "syd"]
WORKERS = (("ord", 3), ("fra", 2), ("syd", 2))
BROKERS = ("ord", "fra")
APPS = ["web", "api"]
PORT = 4281
TOKEN = "user-token-of-the-simulation"
CLUSTER_TOKEN = "cluster-token-of-the-simulation"
ROOM = Resources(cpus_shared=20, cpus_dedicated=2, memory_mib=6144, disk_mib=1 << 20, machines=30)
"""Of each worker: little enough that regions fill up, and orders race for what is left."""

UP_S = 30.0
REST_S = 240.0
"""How long the work may take to come to rest once faults are over: twice a lease, and a long backoff."""
CONVERGE_S = 60.0
"""How long replicas may take to be equal after that, and members to know each other."""
LOOK_S = 1.0
QUIET_LOOKS = 5
DRAIN_S = 120.0  # clients end what they have begun


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run is made of.

    `workers` by region; `brokers` are regions that have one, `static` ones with a fixed list of workers in the place of
    the catalog. `faults` None: drawn from the seed, `only` of some kinds and so many `times` as often; `dropped` are
    left out, by their place. `memory_mib`: of each worker. `mutant`: of `sim.mutants`. `served`: apps that
    users ask for through proxies; without any there are no proxies.
    """

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
    memory_mib: int = ROOM.memory_mib
    mutant: str = ""
    served: tuple[Served, ...] = ()

    def names(self) -> tuple[list[str], list[str]]:
        workers = [f"{region}-{n}" for region, count in self.workers for n in range(1, count + 1)]
        return workers, [f"broker-{region}" for region in self.brokers]

    def the_faults(self) -> list[Fault]:
        faults = self.faults
        if faults is None:
            faults = draw(str(self.seed), self.seconds, *self.names(), only=self.only, times=self.times)
        gone = frozenset(self.dropped)
        return [fault for number, fault in enumerate(faults) if number not in gone]


def plan_of(seed: int, seconds: float = 60.0, *, users: bool = False, mutant: str = "") -> Plan:
    """A plan as campaigns have it: clients of the market, or fewer of them, and users of apps through proxies."""
    plan = Plan(seed=seed, seconds=seconds, mutant=mutant)
    return replace(plan, clients=2, memory_mib=2 * ROOM.memory_mib, served=SERVED) if users else plan


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went. Without `violations` everything held."""

    plan: Plan
    version: str
    digest: str
    events: int
    steps: int
    virtual_s: float
    violations: list[str]
    fired: dict[str, int]
    paths: dict[str, int]
    answers: dict[str, int]
    kinds: dict[str, int]
    last: list[str]


class Cluster:
    """The agents, the network between them and the clients of one run."""

    def __init__(self, loop: SimLoop, plan: Plan, make: MakeAgent = the_agent) -> None:
        self.loop = loop
        self.plan = plan
        self.record = Record(loop.time)
        self.net = Net(loop, self.record, str(plan.seed), REGIONS)
        self.book = Book()
        self.paths = Paths(self)
        self.nodes: dict[str, Node] = {}
        self.losses: dict[str, list[tuple[float, float]]] = {}
        self.capacities: dict[str, Resources] = {}
        self.since: dict[str, tuple[int, int]] = {}
        self.ends: dict[str, list[float]] = {}  # when agents of a node ended
        self._make = make
        workers, brokers = plan.names()
        self.workers = [self._add(name, worker=True) for name in workers]
        self.brokers = [self._add(name, worker=False) for name in brokers]
        self._join()
        self.faults = Faults(self, plan.the_faults())
        self.watch = watch.Watch(self)
        self.clients: list[Client] = []
        self._add_clients()
        self.traffic = traffic.Traffic(self, self._owner()) if plan.served else None
        if self.traffic:
            for node in self.workers:
                self.traffic.serving.add(node)
        self._processes: list[Process] = []

    # --- what it is made of ------------------------------------------------------------------------------------------

    def _add(self, name: str, *, worker: bool) -> Node:
        region = next(region for region in REGIONS if region in name)
        room = replace(ROOM, memory_mib=self.plan.memory_mib)
        settings = AgentSettings(
            name=name,
            region=region,
            directory=DIRECTORY,
            tokens=TokenSettings(cluster=CLUSTER_TOKEN, users={"alice": TOKEN}),
            worker=WorkerRole(listen=f"0.0.0.0:{PORT}", capacity=room) if worker else None,
            broker=None if worker else BrokerRole(listen=f"0.0.0.0:{PORT}"),
        )
        if self.plan.served:
            # One worker in all takes users' requests itself, as on a host that is everything.
            edge = not worker or name == self.plan.names()[0][0]
            settings.proxy = traffic.settings(edge=edge, worker=worker)
        programs = {name: Program(**how) for name, (_, how) in PROGRAMS.items()} if worker else {}
        programs |= {name: Program(**how) for name, how in WEB.items()} if worker else {}
        node = self.nodes[name] = Node(self.net, str(self.plan.seed), settings, programs, self._make)
        node.settings.catalog = CatalogSettings(advertise=f"{node.station.address}:{PORT}")
        node.on_event = lambda what, why: self._on_node(node, what, why)
        node.disk.note = lambda what: self.record.note("sync", name, what)
        node.world.on_event = lambda what, spec: self._on_program(node, what, spec)
        self.losses[name], self.ends[name], self.capacities[name], self.since[name] = [], [], room, (0, 0)
        return node

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

    def _add_clients(self) -> None:
        for number in range(self.plan.clients):
            name = f"client{number + 1}"
            its_api, rng = self._api(name)
            self.net.station(name, REGIONS[number % len(REGIONS)])
            self.clients.append(Client(name, its_api, rng, APPS, REGIONS, self.loop.time))
        for client in self.clients:
            client.others = [other for other in self.clients if other is not client]
        self.net.station("operator", REGIONS[0])
        self.operator = Operator(*self._api("operator"), [node.name for node in self.workers], self.loop.time)

    def _api(self, name: str) -> tuple[Api, random.Random]:
        brokers = {node.name: (node.station.address, PORT) for node in self.brokers}
        rng = random.Random(f"{self.plan.seed}/client/{name}")
        return Api(brokers, TOKEN, rng, self.book), rng

    def _owner(self) -> Owner:
        self.net.station("owner", REGIONS[0])
        return Owner("owner", *self._api("owner"), self.plan.served, self.loop.time)

    def lost(self, node: Node, *, since_s: float) -> None:
        """A worker's database forgets what it was told since then."""
        self.losses[node.name].append((since_s, self.loop.time()))
        self.since[node.name] = (len(node.world.starts), len(node.world.stops))

    def forgot(self, worker: str, asked_s: float, told_s: float) -> bool:
        """Whether what a worker was asked and what was told of it in that time may be lost, with its disk or by a
        backup."""
        return any(since <= told_s and asked_s <= until for since, until in self.losses[worker])

    def _on_node(self, node: Node, what: str, why: str) -> None:
        self.record.note("agent", node.name, f"{what} {why}")
        if what == "end":
            self.ends[node.name].append(self.loop.time())
        self.paths.on_node(node, what, why)

    def _on_program(self, node: Node, what: str, spec: InstanceSpec) -> None:
        self.paths.on_program(node, what, spec)
        if self.traffic:
            self.traffic.serving.on_program(node, what, spec)

    def in_process(self, station: str, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        process = Process(station, self.net.stations[station])
        self._processes.append(process)
        return self.loop.run_in(process, coro)

    # --- a run -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All four parts. What was wrong is in `violations` afterwards."""
        await self.up()
        if self.traffic:
            await self.traffic.prepare()
        until = self.loop.time() + self.plan.seconds
        self.faults.shift(self.loop.time() if self.traffic else 0.0)
        self.faults.schedule()
        self.watch.go_on()
        tasks = [self.in_process(client.name, client.run(until)) for client in self.clients]
        tasks.append(self.in_process("operator", self.operator.run(until)))
        tasks += self.traffic.ask(until) if self.traffic else []
        await asyncio.sleep(self.plan.seconds)
        self.faults.end()
        for node in self.workers:
            node.world.programs = {name: _steady(program) for name, program in node.world.programs.items()}
        await self._drain(tasks)
        await self._rest()
        await self._converge()
        if self.traffic:
            await self.traffic.finale()
            await self._rest()
        self.violations = promises.check(self)

    async def up(self) -> None:
        """Every agent serves, and the apps are made."""
        for node in self.nodes.values():
            node.start()
        await self._until(lambda: all(node.serving for node in self.nodes.values()), UP_S, "every agent serves")
        await self.in_process("operator", self.operator.make_apps(APPS))

    async def _drain(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Clients come to an end; those in doubt ask again; an operator opens what is cordoned."""
        _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        if late:
            self.book.violations.append(
                f"L2: {len(late)} clients were still waiting {DRAIN_S:g} s after the faults ended"
            )
        settling = [self.in_process(client.name, client.settle()) for client in self.clients]
        settling += [self.in_process("owner", self.traffic.owner.settle())] if self.traffic else []
        settling += [self.in_process("operator", self.operator.open_again(node.name)) for node in self.workers]
        for task in await asyncio.gather(*settling, return_exceptions=True):
            if isinstance(task, BaseException):
                raise task

    async def _rest(self) -> None:
        """Until nothing is on its way for a few looks in a row."""
        until, quiet = self.loop.time() + REST_S, 0
        while quiet < QUIET_LOOKS:
            if self.loop.time() > until:
                self.book.violations.append(f"L2: not at rest after {REST_S:g} s: {'; '.join(self.busy())[:2000]}")
                return
            await self.in_process("operator", self.operator.retry_parked())
            await asyncio.sleep(LOOK_S)
            quiet = 0 if self.busy() else quiet + 1

    async def _converge(self) -> None:
        """L1, L5: until every replica equals its owners' logs, and every member takes the others for living."""
        until = self.loop.time() + CONVERGE_S
        while wrong := watch.check(self):
            if self.loop.time() > until:
                self.book.violations += [f"after {CONVERGE_S:g} s: {what}" for what in wrong[:20]]
                return
            await asyncio.sleep(LOOK_S)

    def busy(self) -> list[str]:
        """What is still on its way."""
        found = []
        for node in self.nodes.values():
            if not node.serving:
                found.append(f"{node.name} does not serve")
            elif node.agent and node.agent.broker and (left := len(node.agent.broker._orders._releases)):
                found.append(f"{node.name}: {left} orders are being released")
        for node in self.workers:
            if store := self.store(node):
                runs = store.read.select(RunRow, "status in ('active', 'parked') order by id")
                found += [f"{node.name}: run {run.id} {run.flow} is {run.status}: {run.error}" for run in runs]
                held = store.read.query(f"select count(*) from {ReservationRow.table}")[0][0]
                found += [f"{node.name}: {held} reservations"] * (held > 0)
        return found

    def store(self, node: Node) -> Store | None:
        """The database of a worker's agent that serves now."""
        return node.agent.worker.store if node.agent and node.agent.worker else None

    async def _until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        until = self.loop.time() + within_s
        while not condition():
            if self.loop.time() > until:
                raise Stalled(f"within {within_s:g} s it did not come to this: {what}")
            await asyncio.sleep(0.1)

    def end(self) -> None:
        """Nothing of it has an effect any more."""
        self.faults.over = True
        for node in self.nodes.values():
            node.kill("the simulation is over")
            node.disk.close()
        for process in self._processes:
            self.loop.kill(process)


def _steady(program: Program) -> Program:
    """For the end: a program that runs until it is stopped, or still cannot be started."""
    return Program(fails=program.fails, stops_in_s=program.stops_in_s, listens_s=program.listens_s)


def simulate(plan: Plan, make: MakeAgent = the_agent, *, tell: Callable[[int, str], None] | None = None) -> Report:
    """One run. `tell` hears of every event."""

    async def main(loop: SimLoop) -> Report:
        cluster = Cluster(loop, plan, make)
        cluster.record.tell = tell
        with logs_into(cluster.record, cluster.paths.on_log):
            try:
                await cluster.run()
                violations = cluster.violations
            except Stalled as error:
                violations = [*cluster.book.violations, f"L2: {error.message}"]
            finally:
                cluster.end()
                loop.discard()
        return Report(
            plan=plan,
            version=__version__,
            digest=cluster.record.digest(),
            events=cluster.record.count,
            steps=loop.steps,
            virtual_s=loop.time(),
            violations=violations,
            fired=dict(cluster.faults.fired),
            paths=dict(cluster.paths.taken()),
            answers=dict(cluster.book.answers + (cluster.traffic.counts() if cluster.traffic else Counter())),
            kinds=dict(cluster.record.kinds),
            last=cluster.record.last(),
        )

    with ExitStack() as stack:
        stack.enter_context(mutated((MUTANTS | PROXY_MUTANTS)[plan.mutant] if plan.mutant else None))
        if plan.served:
            stack.enter_context(kernel.simulated())
        return run(main)


def total(counts: Sequence[dict[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for count in counts:
        found.update(count)
    return found

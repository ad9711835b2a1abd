"""A fleet, who asks it for something, what goes wrong with it, and what is checked: everything of one run.

A run has four parts: the agents come up; clients and faults for `seconds` of virtual time; then faults end and the
system comes to rest, within a stated time; then every promise is checked. `running.simulate` makes one and runs it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hawker.model.rows import UNENDED, ReservationRow, RunRow
from hawker.sim.checks import promises, watch
from hawker.sim.checks.paths import Paths
from hawker.sim.clients.operator import Operator
from hawker.sim.clients.orderers import Client
from hawker.sim.clients.owners import Owner
from hawker.sim.faults.drawing import faults_of
from hawker.sim.faults.faults import Faults
from hawker.sim.faults.kinds import KINDS, OF_USERS
from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import MakeAgent, Node, the_agent
from hawker.sim.hosts.world import Program
from hawker.sim.plan import REGIONS, Plan
from hawker.sim.platform.logs import logs_into
from hawker.sim.platform.loop import SimLoop, Stalled
from hawker.sim.traffic.traffic import Traffic
from hawker.worker.drivers.base import InstanceSpec

APPS = ["web", "api"]

UP_S = 30.0
REST_S = 240.0
"""How long the work may take to come to rest once faults are over: twice a lease, and a long backoff."""
CONVERGE_S = 60.0
"""How long replicas may take to be equal after that, and members to know each other."""
LOOK_S = 1.0
QUIET_LOOKS = 5
DRAIN_S = 120.0  # clients end what they have begun


class Cluster(Fleet):
    """`violations`: what was wrong, after a `run`. Without `traffic` there are no proxies."""

    def __init__(self, loop: SimLoop, plan: Plan, make: MakeAgent = the_agent) -> None:
        super().__init__(loop, plan, make)
        self.violations: list[str] = []
        self.paths = Paths(self)
        self.faults = Faults(self, faults_of(plan), KINDS | OF_USERS)
        self.watch = watch.Watch(self, self.faults)
        self.clients: list[Client] = []
        self._add_clients()
        self.traffic = Traffic(self, self._owner(), self.operator, self.faults, self.paths) if plan.served else None
        self.on_node = self._agents
        self.on_program = self._programs

    # --- what it is made of ------------------------------------------------------------------------------------------

    def _add_clients(self) -> None:
        for number in range(self.plan.clients):
            name = f"client{number + 1}"
            its_api, rng = self.api(name)
            self.net.station(name, REGIONS[number % len(REGIONS)])
            self.clients.append(Client(name, its_api, rng, APPS, REGIONS, self.loop.time))
        for client in self.clients:
            client.others = [other for other in self.clients if other is not client]
        self.net.station("operator", REGIONS[0])
        self.operator = Operator(*self.api("operator"), [node.name for node in self.workers], self.loop.time)

    def _owner(self) -> Owner:
        self.net.station("owner", REGIONS[0])
        return Owner("owner", *self.api("owner"), self.plan.served, self.loop.time)

    def _agents(self, node: Node, what: str, why: str) -> None:
        self.paths.on_node(node, what, why)
        if self.traffic:
            self.traffic.on_node(node, what)

    def _programs(self, node: Node, what: str, spec: InstanceSpec) -> None:
        self.paths.on_program(node, what, spec)
        if self.traffic:
            self.traffic.serving.on_program(node, what, spec)

    # --- a run -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all four parts. What was wrong is in `violations` afterwards."""
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
        self.violations = self._check()

    async def up(self) -> None:
        """Wait until every agent serves, and make the apps."""
        for node in self.nodes.values():
            node.start()
        await self._until(lambda: all(node.serving for node in self.nodes.values()), UP_S, "every agent serves")
        await self.in_process("operator", self.operator.make_apps(APPS))

    async def _drain(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Clients come to an end; those in doubt ask again; an operator opens what is cordoned."""
        _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        if late:
            self.oracle.violations.append(
                f"L2: {len(late)} clients were still waiting {DRAIN_S:g} s after the faults ended"
            )
        settling = [self.in_process(client.name, client.settle()) for client in self.clients]
        settling += [self.in_process("owner", self.traffic.owner.settle())] if self.traffic else []
        settling += [self.in_process("operator", self.operator.open_again(node.name)) for node in self.workers]
        for task in await asyncio.gather(*settling, return_exceptions=True):
            if isinstance(task, BaseException):
                raise task

    async def _rest(self) -> None:
        """Wait until nothing is on its way for a few looks in a row."""
        until, quiet = self.loop.time() + REST_S, 0
        while quiet < QUIET_LOOKS:
            if self.loop.time() > until:
                self.oracle.violations.append(f"L2: not at rest after {REST_S:g} s: {'; '.join(self.busy())[:2000]}")
                return
            await self.in_process("operator", self.operator.retry_parked())
            await asyncio.sleep(LOOK_S)
            quiet = 0 if self.busy() else quiet + 1

    async def _converge(self) -> None:
        """L1, L5: until every replica equals its owners' logs, and every member takes the others for living."""
        until = self.loop.time() + CONVERGE_S
        while wrong := watch.check(self):
            if self.loop.time() > until:
                self.oracle.violations += [f"after {CONVERGE_S:g} s: {what}" for what in wrong[:20]]
                return
            await asyncio.sleep(LOOK_S)

    def _check(self) -> list[str]:
        """Everything that was wrong."""
        self.paths.at_end(self.requests())
        return [
            *self.oracle.violations,
            *self.paths.violations,
            *self.watch.violations,
            *promises.check(self, self.faults),
            *(self.traffic.check() if self.traffic else ()),
        ]

    def requests(self) -> Counter[str]:
        """Users' requests by what came of them."""
        return self.traffic.counts() if self.traffic else Counter()

    def busy(self) -> list[str]:
        """What is still on its way."""
        found = []
        for node in self.nodes.values():
            if not node.serving:
                found.append(f"{node.name} does not serve")
            elif node.agent and node.agent.broker and (left := node.agent.broker.releasing):
                found.append(f"{node.name}: {left} orders are being released")
        for node in self.workers:
            if store := self.store(node):
                runs = store.read.select(RunRow, f"{UNENDED} order by id")
                found += [f"{node.name}: run {run.id} {run.flow} is {run.status}: {run.error}" for run in runs]
                held = store.read.query(f"select count(*) from {ReservationRow.table}")[0][0]
                found += [f"{node.name}: {held} reservations"] * (held > 0)
        return found

    async def _until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        until = self.loop.time() + within_s
        while not condition():
            if self.loop.time() > until:
                raise Stalled(f"within {within_s:g} s it did not come to this: {what}")
            await asyncio.sleep(0.1)

    def end(self) -> None:
        self.faults.over = True
        super().end()


@contextmanager
def lives(loop: SimLoop, plan: Plan, make: MakeAgent = the_agent) -> Iterator[Cluster]:
    """A cluster, until the block ends. What its agents log is in its record."""
    cluster = Cluster(loop, plan, make)
    with logs_into(cluster.record, cluster.paths.on_log):
        try:
            yield cluster
        finally:
            cluster.end()
            loop.discard()


def _steady(program: Program) -> Program:
    """At the end of a run a program runs until it is stopped, or still cannot be started."""
    return Program(fails=program.fails, stops_in_s=program.stops_in_s, listens_s=program.listens_s)

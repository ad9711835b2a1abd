"""A simulated host and the agent on it: power, disk, clock, programs, and a service manager that starts the agent anew.

What survives what: a killed agent leaves the disk and the programs; a power cut takes the agent, the programs and what
was not synced; a lost disk takes the databases. The agent is the live one (`hawker.agent.agent.Agent`), opened over
this host's disk, driver and clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, WorkerRole
from hawker.agent.worker_parts import WorkerParts
from hawker.catalog.base import Catalog, Site
from hawker.catalog.engines import GOSSIP
from hawker.catalog.gossip.node import Node as Member
from hawker.errors import HawkerError
from hawker.host import Host
from hawker.model.values import host_port
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.sockets import SimSockets
from hawker.sim.hosts.world import Program, World
from hawker.sim.platform.disk import CrashDisk
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process
from hawker.worker.settings import Way

EPOCH_S = 1_700_000_000.0
"""The wall clock when a simulation begins."""
RESTART_S = 1.0
"""How long the service manager waits before it starts an agent that ended."""

MakeAgent = Callable[[AgentSettings, Host, "Node"], Agent]


class Clock:
    """A host's wall clock: `ahead_s` of the true one, and gaining on it while it drifts."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.ahead_s = 0.0
        self._drift = 0.0  # seconds gained in a second
        self._since_s = 0.0

    def wall_s(self) -> float:
        now = self._now()
        return EPOCH_S + now + self.ahead_s + (now - self._since_s) * self._drift

    def steady(self) -> Callable[[], float]:
        """The clock, set by nobody, of a process that begins now."""
        began_s = self.wall_s() - self._now()
        return lambda: began_s + self._now()

    def drift_from_now(self, drift: float) -> None:
        now = self._now()
        self.ahead_s += (now - self._since_s) * self._drift
        self._since_s, self._drift = now, drift


class Node:
    """`agent` is the one that serves now, None while there is none. `lives` counts the agents that were started.

    `on_event` is told what happens to the node: "start", "serve", "fail", "end" with why.
    """

    def __init__(
        self, net: Net, seed: str, settings: AgentSettings, programs: Mapping[str, Program], make: MakeAgent
    ) -> None:
        self.name = settings.name
        self.settings = settings
        self.net = net
        self.station = net.station(self.name, settings.region)
        self.disk = CrashDisk(f"{seed}/disk/{self.name}")
        self.clock = Clock(net.loop.time)
        self.world = World(Host(self.clock.wall_s, random.Random(0)), programs)
        self.process: Process | None = None
        self.agent: Agent | None = None
        self.member: Member | None = None  # its agent's, of the built-in engine
        self.host: Host | None = None
        self.lives = 0
        self.recover: Way = ""  # what its operator decided after its database had lost something
        self.wanted = False  # the service manager keeps it running
        self.on_event: Callable[[str, str], None] = lambda what, why: None
        self._seed = seed
        self._make = make
        self.disk.on_cut = self.cut_power

    @property
    def serving(self) -> bool:
        return self.agent is not None

    def start(self) -> None:
        """Power on, if it is off, and run the agent. Nothing happens when it runs."""
        self.wanted = True
        if self.process is not None:
            return
        if self.disk.off:
            self.disk.power_on()
        self.station.up = True
        self.lives += 1
        self.process = Process(f"{self.name}", self.station)
        self.on_event("start", str(self.lives))
        self.net.loop.run_in(self.process, self._live(self.process), f"agent {self.name}")

    async def _live(self, process: Process) -> None:
        rng = random.Random(f"{self._seed}/host/{self.name}/{self.lives}")
        host = self.host = Host(
            self.clock.wall_s, rng, self.disk.name, steady_s=self.clock.steady(), sockets=SimSockets()
        )
        agent = self._make(self.settings, host, self)
        try:
            await agent.open()
        except Exception as error:  # the process ends with a traceback
            why = error.message if isinstance(error, HawkerError) else repr(error)
            self._ended(process, f"could not open: {why}")
            return
        self.agent = agent
        self.recover = ""
        self.on_event("serve", "")
        await agent.failed.wait()
        self.on_event("fail", "")
        self.agent = None
        await agent.close()
        self._ended(process, "failed")

    def _ended(self, process: Process, why: str) -> None:
        """The process ended by itself; the service manager starts another one."""
        self._stop(process, why, silently=False)
        self.start_later(RESTART_S)

    def start_later(self, delay_s: float) -> None:
        def start() -> None:
            if self.wanted:
                self.start()

        self.wanted = True
        self.net.later(delay_s, start)

    # --- what may happen to it ---------------------------------------------------------------------------------------

    def kill(self, why: str = "kill -9") -> None:
        """The agent alone dies; programs run on. It is not started again until somebody does."""
        self.wanted = False
        if self.process:
            self._stop(self.process, why, silently=False)

    def cut_power(self, why: str = "power cut") -> None:
        """The whole host stops, programs too."""
        self.wanted = False
        self.disk.off = True
        self.station.up = False
        if self.process:
            self._stop(self.process, why, silently=True)
        self.world.lose_power()

    def lose_disk(self, files: Mapping[str, bytes] | None = None) -> None:
        """Put another disk in its place, empty or with the `files` of a backup. No agent may run meanwhile."""
        assert self.process is None
        self.disk.restore(files or {})

    def pause(self) -> None:
        if self.process:
            self.net.loop.pause(self.process)

    def resume(self) -> None:
        if self.process:
            self.net.loop.resume(self.process)

    def _stop(self, process: Process, why: str, *, silently: bool) -> None:
        self.on_event("end", why)
        self.process = self.agent = self.member = None
        self.world.listener = None
        self.net.loop.kill(process)
        self.net.close_all(process, silently=silently)


def the_agent(settings: AgentSettings, host: Host, node: Node) -> Agent:
    """The live agent over a simulated host."""

    async def parts(settings: AgentSettings, role: WorkerRole, host: Host) -> WorkerParts:
        driver = FakeDriver(node.world)
        return WorkerParts(driver.for_all(), driver.images)

    def catalog(site: Site) -> Catalog:
        node.member = Member(site)
        return node.member

    return Agent(
        settings,
        host,
        make_worker_parts=parts,
        make_catalog=catalog if settings.catalog.engine == GOSSIP else None,
        bind=lambda address: host_port("listen", address),
        recover=node.recover,
    )


DIRECTORY = Path("/var/lib/hawker")
"""Agents keep their databases here, each on its own simulated disk."""

"""Twelve agents in three regions on one machine, each a process in a network namespace of its own.

A region has three workers and a broker. Its agents are on a switch of its own below a backbone; `syd` is two rooms, the
one with its broker and `syd-1` behind the other. The client reaches every broker over a network of its own, which is
never cut. What the agents know is read from their catalogs' files, and compared with what the workers' databases say.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import apsw
import msgspec
from tests.kit.markets import SLEEPER, Answer, Client
from tests.kit.namespaces import Network

REGIONS = ("ord", "mad", "syd")
WORKERS = 3
PORT = 4280
CLUSTER, USER = "cluster-token-of-three-regions", "user-token-of-three-regions"
LOOK_S = 0.05
QUICK_LOOK_S = 0.002
BUSY_MS = 1000
AGREE_S = 120.0
FAR_ROOM = "syd-far"
Rows = list[tuple[Any, ...]]


class Agent(msgspec.Struct):
    """One agent. `desk` is where the client reaches a broker."""

    name: str
    region: str
    address: str
    directory: Path
    desk: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def catalog(self) -> Path:
        return self.directory / "catalog.db"


class Fleet:
    """The agents and the network between them. `machines`: those whose orders were filled and
    whose hosts were not lost."""

    def __init__(self, home: Path, network: Network) -> None:
        self.network = network
        self.agents: dict[str, Agent] = {}
        self.apps: list[str] = []
        self.machines: list[str] = []
        self._home = home
        self._clients: dict[str, Client] = {}
        for switch, above in (("backbone", None), *((region, "backbone") for region in REGIONS), (FAR_ROOM, "syd")):
            network.switch(switch, above)
        network.switch("desk")
        network.host("client")
        network.plug("client", "172.16.0.1", "desk")
        for number, region in enumerate(REGIONS, 1):
            for n in range(1, WORKERS + 1):
                self._add(f"{region}-{n}", region, f"10.{number}.0.{n}")
            self._add(f"{region}-broker", region, f"10.{number}.0.100", f"172.16.0.{number + 1}")

    def _add(self, name: str, region: str, address: str, desk: str = "") -> None:
        network, agent = self.network, Agent(name, region, address, self._home / name, desk)
        network.host(name)
        network.plug(name, address, FAR_ROOM if name in ("syd-1", "syd-broker") else region)
        if desk:
            network.plug(name, desk, "desk")
        role = {
            "worker": f'[worker]\nlisten = "{address}:{PORT}"\ncgroups = false\ndrivers = ["process"]\n'
            "capacity = { cpus_shared = 400, memory_mib = 400000, disk_mib = 4000000, machines = 400 }",
            "broker": f'[broker]\nlisten = "0.0.0.0:{PORT}"',
        }["broker" if desk else "worker"]
        lines = [
            f'name = "{name}"\nregion = "{region}"\ndirectory = "{agent.directory}"',
            f'[tokens]\ncluster = "{CLUSTER}"\n[tokens.users]\nsomebody = "{USER}"',
            role,
            f'[catalog]\nadvertise = "{address}:{PORT}"',
        ]
        (self._home / f"{name}.toml").write_text("\n".join(lines))
        self.agents[name] = agent

    # --- agents ------------------------------------------------------------------------------------------------------

    def start(self, names: Iterable[str]) -> None:
        """Every agent is told of the first worker of its region and of the fleet's first."""
        for name in names:
            agent = self.agents[name]
            seeds = dict.fromkeys((self.agents[f"{agent.region}-1"].address, self.agents[f"{REGIONS[0]}-1"].address))
            join = [word for seed in seeds if seed != agent.address for word in ("--join", f"{seed}:{PORT}")]
            argv = [sys.executable, "-m", "hawker", "agent", "--config", str(self._home / f"{name}.toml"), *join]
            with (self._home / f"{name}.log").open("ab") as log, self.network.inside(name):
                agent.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, names: Iterable[str]) -> None:
        """kill -9 of the agents alone, all at once: their machines run on."""
        processes = []
        for name in names:
            process, self.agents[name].process = self.agents[name].process, None
            assert process is not None, f"{name} runs"
            process.send_signal(signal.SIGKILL)
            processes.append(process)
        for process in processes:
            process.wait()

    def destroy(self, name: str) -> None:
        """A host and its disk are lost, with its machines."""
        self.network.kill_all(name)
        process, self.agents[name].process = self.agents[name].process, None
        assert process is not None, f"{name} runs"
        process.wait()
        lost = {row[0] for row in read(self.agents[name].directory / "worker.db", _OWN_MACHINES)}
        self.machines = [machine for machine in self.machines if machine not in lost]
        _forget_memory(self.agents[name].directory)
        shutil.rmtree(self.agents[name].directory)

    def programs(self, name: str) -> list[int]:
        """The processes of a worker's machines."""
        return [pid for pid in self.network.processes(name) if _words(pid)[:1] == ["sleep"]]

    def in_region(self, region: str) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.region == region]

    # --- orders ------------------------------------------------------------------------------------------------------

    async def call(self, region: str, method: str, path: str, body: Any = None) -> Answer:
        """Through the region's broker."""
        if region not in self._clients:
            desk = self.agents[f"{region}-broker"].desk
            self._clients[region] = Client(f"http://{desk}:{PORT}", USER)
        return await self._clients[region].call(method, path, body)

    async def make_app(self, name: str) -> None:
        answer = await self.call(REGIONS[0], "POST", "/apps", {"app_name": name, "org_slug": "personal"})
        assert answer.status == 201, answer
        self.apps.append(name)

    async def order(self, through: str, app: str, region: str) -> tuple[Answer, float]:
        """Order a machine in a region through the broker of one. Returns the answer and the seconds it took."""
        began = monotonic()
        answer = await self.call(through, "POST", f"/apps/{app}/machines", {"region": region, "config": SLEEPER})
        if answer.status == 200:
            self.machines.append(answer.body["id"])
        return answer, monotonic() - began

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    # --- what the agents know ----------------------------------------------------------------------------------------

    async def up(self, seconds: float = AGREE_S) -> float:
        """Until every agent has opened its catalog. Returns the seconds it took."""
        began = monotonic()
        while down := [agent.name for agent in self.agents.values() if not agent.catalog.exists()]:
            self.check_running()
            assert monotonic() - began < seconds, f"not within {seconds:g} s up: {down}"
            await asyncio.sleep(LOOK_S)
        return monotonic() - began

    async def agreed(self, seconds: float = AGREE_S) -> float:
        """Until every running agent knows all that it should. Returns the seconds it took. Fails with what one of them
        does not know."""
        began = monotonic()
        while wrong := self.wrong():
            self.check_running()
            assert monotonic() - began < seconds, f"not within {seconds:g} s: {wrong}"
            await asyncio.sleep(LOOK_S)
        return monotonic() - began

    async def seen(self, query: str, names: Iterable[str], rows: int = 1, seconds: float = AGREE_S) -> list[float]:
        """Until a query of each of these agents' catalogs finds so many rows. Returns the moments at which they first
        did, one for each agent."""
        waiting = {name: _open(self.agents[name].catalog) for name in names}
        began, moments = monotonic(), []
        try:
            while waiting:
                for name, db in list(waiting.items()):
                    if len(list(db.execute(query))) == rows:
                        moments.append(monotonic())
                        waiting.pop(name).close()
                assert monotonic() - began < seconds, f"not within {seconds:g} s at {sorted(waiting)}: {query}"
                await asyncio.sleep(QUICK_LOOK_S)
        finally:
            for db in waiting.values():
                db.close()
        return moments

    def ask(self, name: str, query: str) -> Rows:
        """A query of one agent's catalog."""
        return read(self.agents[name].catalog, query)

    def check_running(self) -> None:
        for agent in self.agents.values():
            if agent.process is not None and agent.process.poll() is not None:
                said = (self._home / f"{agent.name}.log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"{agent.name} ended with status {agent.process.returncode}; it said: {said}")

    def wrong(self) -> str:
        """What some agent does not know, or "". The truth about machines is in the workers' own databases."""
        workers = [agent for agent in self.agents.values() if not agent.desk]
        directory = [(agent.name, agent.region, agent.address, PORT) for agent in workers]
        truth = {agent.name: read(agent.directory / "worker.db", _OWN_MACHINES) for agent in workers}
        lost = set(self.machines) - {row[0] for rows in truth.values() for row in rows}
        if lost:
            return f"the workers lack {sorted(lost)}"
        having: dict[tuple[str, str], int] = {}  # workers of a region that have machines of an app
        for agent in workers:
            for app in {row[1] for row in truth[agent.name]}:
                having[app, agent.region] = having.get((app, agent.region), 0) + 1
        for agent in self.agents.values():
            if not agent.running:
                continue
            near = self.in_region(agent.region)
            wanted: dict[str, Rows] = {
                "select name, region, host, port from workers": directory,
                "select name, status from members": [(a.name, "alive") for a in near if a is not agent],
                "select id, app, state, worker from machines": [
                    (*row, a.name) for a in near for row in truth.get(a.name, [])
                ],
                "select app, region, workers from app_regions": [(*key, count) for key, count in having.items()],
                "select id from apps": [(app,) for app in self.apps],
            }
            for query, rows in wanted.items():
                if (found := sorted(read(agent.catalog, query))) != (rows := sorted(rows)):
                    more, less = [r for r in found if r not in rows], [r for r in rows if r not in found]
                    return f"{agent.name}: {query}: it has {more[:3]}, and lacks {less[:3]}"
        return ""


@asynccontextmanager
async def three_regions(home: Path) -> AsyncIterator[Fleet]:
    """A fleet of which no agent runs yet. At the end every process of it is killed. This thread is at the client's
    desk meanwhile."""
    with Network() as network:
        fleet = Fleet(home, network)
        try:
            with network.inside("client"):
                yield fleet
        finally:
            await fleet.close()
            network.close()
            for agent in fleet.agents.values():
                if agent.process is not None:
                    agent.process.wait()
                _forget_memory(agent.directory)


def _forget_memory(directory: Path) -> None:
    """What a host's supervisors kept in its memory is lost with the host."""
    for link in directory.glob("*/run"):
        if link.is_symlink():
            shutil.rmtree(link.resolve(), ignore_errors=True)


def read(path: Path, query: str) -> Rows:
    """The rows of a query, none while there is no such database or table."""
    if not path.exists():
        return []
    try:
        db = _open(path)
        try:
            return list(db.execute(query))
        finally:
            db.close()
    except (apsw.SQLError, apsw.CantOpenError):  # in the making
        return []


def _open(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    db.set_busy_timeout(BUSY_MS)
    return db


def _words(pid: int) -> list[str]:
    try:
        return [os.path.basename(w) for w in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")]
    except OSError:  # it has ended
        return []


_OWN_MACHINES = "select id, app, state from machine where state <> 'destroyed'"

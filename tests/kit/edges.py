"""A region's workers, each with its proxy, and edge proxies before them: every agent a process of its own.

    async with region(tmp_path, workers=2, edges=2) as it:
        machine = await it.machine("web")               # through the broker of the first edge, stopped
        await it.known("web")
        status, body = await it.get("web")

On loopback, or, with a `Network`, each on a host of its own that can be cut off. The machines are small programs that
answer at once with their own id and process.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from tests.kit import stallable
from tests.kit.belongings import argv
from tests.kit.load import Address, parsed
from tests.kit.markets import Client, free_port
from tests.kit.namespaces import Network
from tests.kit.processes import PYTHON
from tests.kit.regions import read
from tests.kit.waiting import eventually

CLUSTER, USER = "cluster-token-of-a-region", "user-token-of-a-region"
DOWN_S = 30.0

SERVER = """
import asyncio, os
me = b"%b %d" % (os.environb[b"FLY_MACHINE_ID"], os.getpid())
async def serve(r, w):
    try:
        while True:
            head = await r.readuntil(b"\\r\\n\\r\\n")
            _, _, rest = head.lower().partition(b"content-length:")
            await r.readexactly(int(rest.split()[0]) if rest else 0)
            await asyncio.sleep(float(os.environ.get("ANSWER_S", "0")))
            w.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(me), me))
    except (OSError, EOFError):
        pass
    finally:
        w.close()
async def main():
    await asyncio.start_server(serve, os.environ.get("BIND", "127.0.0.1"), int(os.environ["PORT"]), backlog=4096)
    await asyncio.Event().wait()
asyncio.run(main())
"""
"""Answers any number of requests on any number of connections with the machine's id and the process's."""


STARTS = (
    "select run from log where kind = 'run.started' and flow in ('machine.start', 'machine.resume') "
    "and resource = '{machine}' and cause like '{cause}%'"
)
"""Of a machine with a cause, in its worker's log."""


class Agent(msgspec.Struct):
    """`http` is where an edge takes users' requests. `host` names its place on the network, if there is one."""

    name: str
    address: str
    port: int
    config: Path
    http: Address = ("", 0)
    host: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        return self.config.with_suffix("")

    @property
    def log(self) -> Path:
        return self.config.with_suffix(".log")


class Region:
    """`workers`, `edges` and `doors` by name; doors are proxies of workers that are processes of their own."""

    def __init__(self, home: Path, network: Network | None = None) -> None:
        self.home = home
        self.network = network
        self.agents: dict[str, Agent] = {}
        self._client: Client | None = None
        self._apps: set[str] = set()
        self._hosts = 0

    def add(self, name: str, role: dict[str, Any], proxy: dict[str, Any], **more: Any) -> Agent:
        address = self._place(name)
        port = free_port()
        agent = Agent(name, address, port, self.home / f"{name}.toml", host=name if self.network else "")
        if "listen" in proxy:
            agent.http = address, free_port()
            proxy = {**proxy, "listen": {"80": f"{address}:{agent.http[1]}"}, "tcp": address}
        if "backhaul" in proxy and not proxy["backhaul"]:
            proxy = {**proxy, "backhaul": f"{address}:{free_port()}"}
        kind = "worker" if "capacity" in role else "broker"
        settings = {
            "name": name,
            "region": "ord",
            "directory": str(agent.directory),
            "stop_machines_on_exit": True,
            "tokens": {"cluster": CLUSTER, "users": {"somebody": USER}},
            kind: {"listen": f"{address}:{port}", **role},
            "catalog": {"join": [f"{each.address}:{each.port}" for each in list(self.agents.values())[:2]]},
            **({"proxy": proxy} if proxy else {}),
            **more,
        }
        agent.config.write_text(toml(settings))
        self.agents[name] = agent
        return agent

    def _place(self, name: str) -> str:
        if self.network is None:
            return "127.0.0.1"
        self._hosts += 1
        address = f"10.1.0.{self._hosts}"
        self.network.host(name)
        self.network.switch(f"of-{name}", "region")
        self.network.plug(name, address, f"of-{name}")
        return address

    # --- agents ------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        agent = self.agents[name]
        argv = [sys.executable, stallable.PROGRAM, "hawker", "agent", "--config", str(agent.config)]
        inside = self.network.inside(name) if self.network else nullcontext()
        with agent.log.open("ab") as log, inside:
            agent.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def up(self, name: str) -> None:
        """Until it takes requests, or for a worker calls."""
        agent = self.agents[name]

        async def listens() -> bool:
            assert agent.process is not None
            assert agent.process.poll() is None, agent.log.read_text(errors="replace")[-2000:]
            try:
                _, writer = await asyncio.open_connection(
                    *(agent.http if agent.http[1] else (agent.address, agent.port))
                )
            except OSError:
                return False
            writer.close()
            return True

        await eventually(listens, f"{name} is up", 60.0)

    def signal(self, name: str, number: int) -> None:
        process = self.agents[name].process
        assert process is not None
        process.send_signal(number)

    def times(self, name: str, event: str) -> int:
        """How often an agent's log has an event."""
        return self.agents[name].log.read_text(errors="replace").count(f'"event": "{event}"')

    async def ended(self, name: str) -> int:
        agent = self.agents[name]
        process, agent.process = agent.process, None
        assert process is not None
        return await asyncio.to_thread(process.wait, DOWN_S)

    async def kill(self, name: str) -> None:
        """kill -9; its machines run on."""
        self.signal(name, signal.SIGKILL)
        await self.ended(name)

    async def together(self) -> None:
        """Until every agent knows all workers."""
        workers = sorted(name for name in self.agents if name.startswith("worker"))

        async def all_know() -> bool:
            return all(
                sorted(name for (name,) in read(agent.directory / "catalog.db", "select name from workers")) == workers
                for agent in self.agents.values()
            )

        await eventually(all_know, "every agent knows all workers", 60.0)

    # --- machines ----------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        if self._client is None:
            broker = next(agent for agent in self.agents.values() if agent.http[1])
            self._client = Client(f"http://{broker.address}:{broker.port}", USER)
        return self._client

    async def machine(
        self,
        app: str,
        *,
        worker: str = "",
        started: bool = False,
        env: dict[str, str] | None = None,
        service: dict[str, Any] | None = None,
        program: str = SERVER,
        **config: Any,
    ) -> str:
        """Its id. `worker`: where it must be, which is so by being tried again. Without `started` it has never run."""
        if app not in self._apps:
            await self.client.ok("POST", "/apps", {"app_name": app, "org_slug": "personal"})
            self._apps.add(app)
        others = []
        try:
            for _ in range(30):
                port = free_port()  # each time another one: those that were placed elsewhere have theirs until the end
                raw = {
                    "image": "host",
                    "init": {"exec": [PYTHON, "-S", "-E", "-c", program]},
                    "env": {"PORT": str(port), **(env or {})},
                    "services": [
                        {
                            "protocol": "tcp",
                            "internal_port": port,
                            "ports": [{"port": 80, "handlers": ["http"]}],
                            **(service or {}),
                        }
                    ],
                    "restart": {"policy": "no"},
                    "guest": {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256},
                    **config,
                }
                body = {"region": "ord", "config": raw, "skip_launch": not started}
                made = await self.client.filled(app, body)
                if worker in ("", self.worker_of(made["id"])):
                    own: str = made["id"]
                    return own
                others.append(made["id"])
            raise AssertionError(f"none of 30 machines was placed on {worker}")
        finally:
            for other in others:
                await self.client.ok("DELETE", f"/apps/{app}/machines/{other}?force=true")

    def worker_of(self, machine: str) -> str:
        for name, agent in self.agents.items():
            if read(agent.directory / "worker.db", f"select id from machine where id = '{machine}'"):
                return name
        return ""

    async def known(self, machines: Iterable[str], state: str, names: Iterable[str] = ()) -> None:
        """Until agents, all of them if none is named, show these machines in this state."""
        wanted = sorted(machines)
        agents = [self.agents[name] for name in names] or list(self.agents.values())
        query = f"select id from machines where state = '{state}' order by id"

        async def shown() -> bool:
            return all(
                set(wanted) <= {own for (own,) in read(agent.directory / "catalog.db", query)} for agent in agents
            )

        await eventually(shown, f"{wanted} are {state} to all", 60.0)

    async def stop(self, app: str, machine: str) -> None:
        await self.client.ok("POST", f"/apps/{app}/machines/{machine}/stop")
        await self.known([machine], "stopped")

    def state(self, machine: str) -> str:
        """As its worker has it."""
        rows = read(self._worker_db(machine), f"select state from machine where id = '{machine}'")
        return str(rows[0][0]) if rows else ""

    def starts(self, machine: str, cause: str = "proxy autostart") -> int:
        """Those with such a cause, by its worker's log."""
        return len(read(self._worker_db(machine), STARTS.format(machine=machine, cause=cause)))

    def events(self, machine: str) -> list[tuple[Any, ...]]:
        """Of a machine, the oldest first: when in milliseconds, type and status."""
        query = f"select at_ms, type, status from event where machine = '{machine}' order by id"
        return read(self._worker_db(machine), query)

    def _worker_db(self, machine: str) -> Path:
        return self.agents[self.worker_of(machine)].directory / "worker.db"

    def programs(self, name: str) -> list[int]:
        """The processes of a worker's machines."""
        assert self.network is not None
        return [pid for pid in self.network.processes(name) if "-c" in argv(pid)]

    # --- requests ----------------------------------------------------------------------------------------------------

    async def get(self, app: str, edge: str = "edge-1", *, seconds: float = 30.0) -> tuple[int, str]:
        """Status and body of a request over a connection of its own."""
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(*self.agents[edge].http)
            try:
                writer.write(f"GET / HTTP/1.1\r\nhost: {app}.localhost\r\nconnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
        return parsed(head)[0], body.decode()

    async def close(self) -> None:
        """In order: the edges first, then the workers, which stop their machines. Those that were killed do so, too."""
        if self._client is not None:
            await self._client.close()
        for agent in self.agents.values():
            if agent.process is None and (agent.directory / "worker.db").exists():
                self.start(agent.name)
                await self.up(agent.name)
        running = [agent for agent in reversed(self.agents.values()) if agent.process is not None]
        for agent in running:
            assert agent.process is not None
            agent.process.send_signal(signal.SIGCONT)
            agent.process.send_signal(signal.SIGTERM)
        statuses = [await self.ended(agent.name) for agent in running]
        assert not any(statuses), dict(zip([agent.name for agent in running], statuses, strict=True))


@asynccontextmanager
async def region(
    home: Path,
    *,
    workers: int = 2,
    edges: int = 1,
    doors: bool = False,
    routing: dict[str, Any] | None = None,
    embedded: dict[str, Any] | None = None,
    network: Network | None = None,
    agent: dict[str, Any] | None = None,
) -> AsyncIterator[Region]:
    """A region in which every agent runs and knows all workers. `home` exists. `doors`: the workers' proxies are agents
    of their own."""
    it = Region(home, network)
    shared = {"routing": routing or {}, "embedded": {"drain_s": 3.0, **(embedded or {})}}
    capacity = {"cpus_shared": 1000, "cpus_dedicated": 0, "memory_mib": 400000, "disk_mib": 4000000, "machines": 1000}
    for n in range(1, workers + 1):
        ports = f"{20000 + 1000 * n}-{20999 + 1000 * n}"
        role = {"cgroups": False, "drivers": ["process"], "ports": ports, "capacity": capacity}
        if doors:
            port = free_port()
            it.add(f"worker-{n}", {**role, "proxy_port": port}, {}, **(agent or {}))
            proxy = {"backhaul": f"127.0.0.1:{port}", "worker": f"worker-{n}", **shared}
            it.add(f"door-{n}", {}, proxy, **(agent or {}))
        else:
            it.add(f"worker-{n}", role, {"backhaul": "", **shared}, **(agent or {}))
    for n in range(1, edges + 1):
        it.add(f"edge-{n}", {"policy": "spread"}, {"listen": {}, **shared}, **(agent or {}))
    try:
        for name in it.agents:
            it.start(name)
        for name in it.agents:
            await it.up(name)
        await it.together()
        yield it
    finally:
        for each in it.agents.values():
            if each.process is not None and each.process.poll() is not None:
                each.process = None
        await it.close()


@asynccontextmanager
async def region_of_hosts(home: Path, **options: Any) -> AsyncIterator[Region]:
    """The same with every agent on a host of its own, and this thread on another one. Needs root."""
    with Network() as network:
        network.switch("region")
        network.host("client")
        network.plug("client", "10.1.0.250", "region")
        with network.inside("client"):
            async with region(home, network=network, **options) as it:
                yield it


def toml(settings: dict[str, Any], prefix: str = "") -> str:
    lines = []
    for key, value in settings.items():
        if not isinstance(value, dict):
            lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{msgspec.json.encode(key).decode()}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)

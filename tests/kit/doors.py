"""A real worker with the process driver, its catalog member, and a proxy before it, all in this process; programs,
sockets and databases are real.

    async with house(tmp_path) as it:
        machine = await it.machine("web")              # of an app of that name; stopped
        answer = await it.get("web")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tests.kit.markets import Client
from tests.kit.ports import free_port as free_port
from tests.kit.processes import PYTHON
from tests.kit.waiting import until

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, CatalogSettings, TokenSettings, WorkerRole
from hawker.host import live
from hawker.model.config import check_config
from hawker.model.market import Order
from hawker.model.rows import AppRow, EventRow, MachineRow
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.machines.calls import Own
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings, RouterSettings
from hawker.worker.daemon import Worker

TOKEN = "cluster-token"
PORT = 80

ANSWERS = """
import os, socket, sys, time
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
time.sleep(float(os.environ.get("BEFORE_S", "0")))
s.bind(("127.0.0.1", int(os.environ["PORT"])))
s.listen(1024)
while True:
    c, _ = s.accept()
    head = c.recv(65536)
    if head:
        time.sleep(float(os.environ.get("ANSWER_S", "0")))
        c.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\nconnection: close\\r\\n\\r\\nok")
    c.close()
"""
"""A program that answers each connection's one request with 200, one after the other."""


class House:
    """`worker` is the daemon, `proxy` the proxy before it."""

    def __init__(self, agent: Agent, proxy: Proxy) -> None:
        assert agent.worker is not None
        self.agent = agent
        self.worker: Worker = agent.worker
        self.proxy = proxy
        self._orders = count(1)
        self._apps: dict[str, AppRow] = {}

    @property
    def router(self) -> ProxyRouter:
        return self.proxy.router

    async def machine(
        self,
        app: str,
        *,
        port: int = 0,
        program: str = ANSWERS,
        env: dict[str, str] | None = None,
        started: bool = False,
        service: dict[str, Any] | None = None,
        **config: Any,
    ) -> str:
        """Its id. Without `started` it has never run."""
        port = port or free_port()
        services = [
            {
                "protocol": "tcp",
                "internal_port": port,
                "ports": [{"port": PORT, "handlers": ["http"]}],
                **(service or {}),
            }
        ]
        raw = {
            "image": "host",
            "init": {"exec": [PYTHON, "-S", "-E", "-c", program]},
            "env": {"PORT": str(port), **(env or {})},
            "restart": {"policy": "no"},
            "services": services,
            **config,
        }
        checked = check_config(raw)
        key = f"order-{next(self._orders)}"
        order = Order(
            key=key,
            app=app,
            region="ord",
            name=key,
            config=checked.raw,
            resources=checked.resources(),
            owner="tester",
            request=key,
            hold_s=30.0,
            skip_launch=not started,
        )
        await self.worker.parts.market.reserve(order)
        row, _, run = await self.worker.parts.market.confirm(key, self._app(app), None)
        if run:
            await self.worker.parts.runner.wait_ended(run)
        await until(lambda: self.shown(row.id) == self.row(row.id).state)
        return row.id

    def _app(self, name: str) -> AppRow:
        return self._apps.setdefault(
            name,
            AppRow(
                name=name,
                id=f"id-{name}",
                org="personal",
                network="default",
                number=len(self._apps) + 1,
                created_at_ms=len(self._apps) + 1,
                stamp_ms=1,
            ),
        )

    async def stop(self, machine: str) -> None:
        """By order, until the catalog shows it."""
        app = self.row(machine).app
        calls = Client(f"http://{self.agent.settings.listens[0]}", TOKEN)
        try:
            await calls.ok("POST", f"/apps/{app}/machines/{machine}/stop")
        finally:
            await calls.close()
        await self.in_state(machine, "stopped")

    async def destroy(self, machine: str) -> None:
        """Until the catalog shows it no more."""
        app = self.row(machine).app
        async with asyncio.timeout(15):
            calls = Client(f"http://{self.agent.settings.listens[0]}", TOKEN)
            try:
                await calls.ok("DELETE", f"/apps/{app}/machines/{machine}?force=true")
            finally:
                await calls.close()
        await self.in_state(machine, "")

    def row(self, machine: str) -> MachineRow:
        row = self.worker.store.read.get(MachineRow, machine)
        assert row is not None
        return row

    def shown(self, machine: str) -> str:
        """Its state as the catalog has it."""
        assert self.agent.catalog is not None
        found = self.agent.catalog.view.rows("select state from machines where id = ?", (machine,))
        return str(found[0][0]) if found else ""

    def story(self, machine: str) -> list[str]:
        """The machine's events, e.g. "start started"."""
        rows = self.worker.store.read.select(EventRow, "machine = ? order by id", (machine,))
        return [f"{event.type} {event.status}" for event in rows]

    def at_ms(self, machine: str, what: str) -> int:
        """When something happened that is in the machine's story once."""
        rows = self.worker.store.read.select(EventRow, "machine = ? order by id", (machine,))
        (at_ms,) = (event.at_ms for event in rows if f"{event.type} {event.status}" == what)
        return at_ms

    def causes(self, machine: str) -> list[str]:
        rows = self.worker.store.read.select(EventRow, "machine = ? order by id", (machine,))
        return [event.cause for event in rows]

    async def in_state(self, machine: str, state: str) -> None:
        """Until the catalog shows it."""
        await until(lambda: self.shown(machine) == state)

    async def rest(self, machine: str, how: Literal["stop", "suspend"]) -> bool:
        """As the proxy puts an idle machine to rest."""
        door = self.proxy.app_table.doors[machine]
        await self.in_state(machine, "started")
        await until(lambda: not door.in_flight and not door.opening)
        return await door.rest(how)

    async def get(self, app: str, *, headers: str = "") -> tuple[int, bytes]:
        """Status and body of a request over a connection of its own."""
        status, _, body = await self.asked(app, headers=headers)
        return status, body

    async def asked(self, app: str, *, headers: str = "", seconds: float = 30.0) -> tuple[int, dict[str, str], bytes]:
        """The same with the answer's headers, names in lower case."""
        host, port = self.proxy.listening[PORT]
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                request = f"GET / HTTP/1.1\r\nhost: {app}.localhost\r\nconnection: close\r\n{headers}\r\n"
                writer.write(request.encode())
                raw = await reader.read(-1)
            finally:
                writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), raw
        first, *lines = head.decode().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first[9:12]), {name.lower(): value.strip() for name, _, value in pairs}, body


@asynccontextmanager
async def house(
    directory: Path,
    routing: RouterSettings | None = None,
    *,
    in_process: bool = True,
    name: str = "ord-1",
    join: House | None = None,
    haproxy: HaproxySettings | None = None,
    traces: str = "",
    way: int = 0,
) -> AsyncIterator[House]:
    """At the end all machines are stopped. `in_process`: the proxy calls its worker without a wire between. `join`: one
    whose fleet it becomes a member of. `haproxy`: that carries what needs no decision. `traces`: its
    collector's URL. `way`: another port than the backhaul's own by which others come there."""
    backhaul = free_port()
    settings = AgentSettings(
        name=name,
        region="ord",
        directory=directory / name,
        tokens=TokenSettings(cluster=TOKEN),
        worker=WorkerRole(
            listen=f"127.0.0.1:{free_port()}",
            drivers=["process"],
            cgroups=False,
            capacity={
                "cpus_shared": 640,
                "cpus_dedicated": 0,
                "memory_mib": 1 << 20,
                "disk_mib": 1 << 20,
                "machines": 1000,
            },
            proxy_port=way or backhaul,
        ),
        catalog=CatalogSettings(join=[join.agent.settings.listens[0]] if join else []),
        stop_machines_on_exit=True,
    )
    agent = Agent(settings, live())
    await agent.open()
    try:
        worker = agent.worker
        assert worker is not None
        own = worker.parts.machine.waking if in_process else None
        at = f"127.0.0.1:{backhaul}"
        proxy = await opened(agent, routing, backhaul=at, worker=name, own=own, haproxy=haproxy, traces=traces)
        try:
            yield House(agent, proxy)
        finally:
            await proxy.close()
    finally:
        await agent.close()


@asynccontextmanager
async def edge(
    at: House, routing: RouterSettings | None = None, *, traces: str = "", region: str = "ord"
) -> AsyncIterator[House]:
    """Another proxy that reads the same catalog and is nobody's door, in the place of the first."""
    proxy = await opened(at.agent, routing, traces=traces, region=region)
    try:
        yield House(at.agent, proxy)
    finally:
        await proxy.close()


async def opened(
    agent: Agent,
    routing: RouterSettings | None = None,
    *,
    backhaul: str = "",
    worker: str = "",
    own: Own | None = None,
    haproxy: HaproxySettings | None = None,
    traces: str = "",
    region: str = "ord",
) -> Proxy:
    assert agent.catalog is not None
    settings = ProxySettings(
        tcp="127.0.0.1",
        listen={str(PORT): "127.0.0.1:0"},
        backhaul=backhaul,
        engine="haproxy" if haproxy else "embedded",
        routing=routing or RouterSettings(),
        haproxy=haproxy or HaproxySettings(),
        traces=traces,
    )
    return await Proxy.open(settings, agent.catalog.view, live(), region=region, token=TOKEN, worker=worker, own=own)

"""The owner of the apps that users ask for in a simulation, who orders their machines and looks after them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from hawker.sim.clients.api import SETTLE_TRIES, Api, machine_config
from hawker.sim.clients.oracle import FILLED, Order
from hawker.sim.clients.orderers import Client
from hawker.sim.clients.users import PORT, SILENT_S

HARD = "HARD_LIMIT"
"""The environment variable that tells a machine's program how many requests it may get at a time."""
FIRST_PORT = 8000
"""Processes share the ports of their host, so each machine has a port of its own."""


class Served(NamedTuple):
    """An app that users ask for: its machines in one region. `image` "host" is a process, any other a container."""

    name: str
    region: str
    machines: int
    image: str
    autostop: str
    minimum: int = 0
    soft: int = 2
    hard: int = 4
    program: str = "web"


SERVED = (
    Served("stopper", "ord", 2, "app:1", "stop"),
    Served("napper", "ord", 2, "host", "suspend", program="slow web"),
    Served("steady", "ord", 3, "app:1", "stop", minimum=1),
    Served("distant", "fra", 2, "app:2", "suspend"),
    Served("single", "fra", 1, "host", "stop", soft=1, hard=1, program="slow web"),
)
WEB: dict[str, dict[str, Any]] = {
    "web": {"listens_s": 0.05, "stops_in_s": 0.6},
    "slow web": {"listens_s": 0.4, "stops_in_s": 2.5},
}
"""The programs of served machines (`sim.hosts.world.Program`)."""


class Owner(Client):
    """Owns the apps that are served."""

    def __init__(
        self, name: str, api: Api, rng: random.Random, served: tuple[Served, ...], now: Callable[[], float]
    ) -> None:
        super().__init__(name, api, rng, [app.name for app in served], [], now)
        self.served = {app.name: app for app in served}
        self.think_s = 2.0
        self._ports: dict[str, int] = {}
        self._cordoned: set[str] = set()

    async def make(self) -> None:
        """Order all machines of all apps, which nobody disturbs."""
        for app in self.served.values():
            for _ in range(app.machines):
                await self._make_one(app)

    async def _make_one(self, app: Served) -> None:
        self._number += 1
        label = f"{app.name}-{self._number}"
        self._ports[label] = FIRST_PORT + self._number
        order = self._oracle.orders[label] = Order(
            label=label,
            key=f"key-{label}",
            app=app.name,
            owner=self.name,
            regions=(app.region,),
            program=app.program,
            began_s=self._now(),
        )
        for _ in range(SETTLE_TRIES):
            await self._attempt(order)
            if order.outcome == FILLED:
                return
            await asyncio.sleep(1)

    def acts(self) -> dict[Callable[[], Awaitable[None]], int]:
        return {
            self.stop: 5,
            self.start: 5,
            self.restart: 3,
            self.suspend: 3,
            self.update: 3,
            self.cordon: 3,
            self.look: 3,
            self.order_anew: 3,
            self.renew: 3,
        }

    async def renew(self) -> None:
        """Replace a machine by another one."""
        order = self._one()
        if order is None:
            return
        await self._make_one(self.served[order.app])
        if self._may_go(order):
            order.destroy_asked = True
            began = self._now()
            if (await self._on(order, "destroy", "DELETE", "?force=true")).status == 200:
                order.destroyed = began, self._now()

    def _may_go(self, order: Order) -> bool:
        """Whether another machine of its app is open."""
        others = [other for other in self._there() if other.app == order.app and other is not order]
        return any(other.label not in self._cordoned for other in others)

    async def cordon(self) -> None:
        """Cordon a machine, or open it again. Every app keeps a machine that is open."""
        order = self._one()
        if order is None:
            return
        if order.label in self._cordoned:
            self._cordoned.discard(order.label)
            await self._on(order, "cordon", "POST", "/uncordon", wanted=False)
        elif self._may_go(order):
            self._cordoned.add(order.label)
            await self._on(order, "cordon", "POST", "/cordon", wanted=True)

    async def update(self) -> None:
        if order := self._one():
            await self._on(order, "update", "POST", "", {"config": self._config(order)}, wanted=order.program)

    async def settle(self) -> None:
        """When faults are over: see to it that every app has a machine that may be started, and none is cordoned."""
        await super().settle()
        for order in self._there():
            began = self._now()
            for _ in range(SETTLE_TRIES):
                answer = await self._on(order, "cordon", "POST", "/uncordon", wanted=False)
                if answer.definite:
                    break
                await asyncio.sleep(1)
            shown = await self._on(order, "look", "GET", "")
            if shown.status == 404:  # gone with its worker's disk
                order.destroyed = began, self._now()
            elif shown.status == 200 and shown.body["state"] == "failed":
                await self._on(order, "start", "POST", "/start")
        for app in self.served.values():
            if not any(order.app == app.name for order in self._there()):
                await self._make_one(app)

    # --- what is ordered ---------------------------------------------------------------------------------------------

    def _config(self, order: Order, program: str = "") -> dict[str, Any]:
        app = self.served[order.app]
        service = {
            "protocol": "tcp",
            "internal_port": self._ports[order.label],
            "ports": [{"port": PORT, "handlers": ["http"], "http_options": {"idle_timeout": int(SILENT_S)}}],
            "autostart": True,
            "autostop": app.autostop,
            "min_machines_running": app.minimum,
            "concurrency": {"type": "requests", "soft_limit": app.soft, "hard_limit": app.hard},
        }
        return machine_config(
            program or order.program,
            order.label,
            image=app.image,
            env={HARD: str(app.hard)},
            services=[service],
            restart={"policy": "on-failure", "max_retries": 3},
        )

    def _body(self, order: Order) -> dict[str, Any]:
        return {"name": order.label, "region": order.regions[0], "config": self._config(order)}

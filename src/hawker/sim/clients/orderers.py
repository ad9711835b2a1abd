"""Clients of the market: they order machines and look after them through the brokers, over HTTP, with retries.

Each is a process of its own on a host of its own, and never fails: what it was told is what promises are measured by.
A request whose outcome is in doubt is made again where that is safe: an order with a key until the answer is definite,
one without a key never.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import Any

from hawker.sim.clients.api import ANSWER_S, SETTLE_TRIES, Answer, Api, machine_config
from hawker.sim.clients.oracle import DOUBT, FILLED, REFUSED, Acknowledged, Order

PATIENCE_S = 45.0
"""How long a patient client waits: longer than all the time limits of an order together, in three regions and with a
key."""
IMAGES = ("app:1", "app:2", "db:1")


class Client:
    """One client, with the machines it ordered. `others` are all clients: now and then one touches another's."""

    def __init__(
        self, name: str, api: Api, rng: random.Random, apps: list[str], regions: list[str], now: Callable[[], float]
    ) -> None:
        self.name = name
        self.api = api
        self.others: list[Client] = []
        self.think_s = 0.4
        self._rng = rng
        self._apps = apps
        self._regions = regions
        self._now = now
        self._number = 0
        self._oracle = api.oracle

    def acts(self) -> dict[Callable[[], Awaitable[None]], int]:
        """What the client does, and how often."""
        return {
            self.order: 40,
            self.stop: 9,
            self.start: 9,
            self.restart: 5,
            self.update: 7,
            self.note: 4,
            self.resize: 2,
            self.suspend: 4,
            self.destroy: 14,
            self.cordon: 3,
            self.lease: 3,
            self.look: 4,
            self.order_anew: 4,
            self.storm: 1,
            self.order_twice: 3,
            self.make_app: 1,
        }

    async def run(self, until_s: float) -> None:
        acts = self.acts()
        while self._now() < until_s:
            await asyncio.sleep(self._rng.expovariate(1 / self.think_s))
            [act] = self._rng.choices(list(acts), list(acts.values()))
            await act()

    async def settle(self) -> None:
        """Ask again about every order with a key until the answer is definite. For when faults are over."""
        for order in [o for o in self._mine() if o.key and o.outcome == DOUBT]:
            for _ in range(SETTLE_TRIES):
                await self._attempt(order)
                if order.outcome != DOUBT:
                    break
                await asyncio.sleep(1)
            else:
                self._oracle.violations.append(f"L2: order {order.label} never came to a definite answer")

    # --- orders ------------------------------------------------------------------------------------------------------

    async def order(self, *, regions: list[str] | None = None) -> None:
        order = self._new_order(regions or self._some_regions(), keyed=self._rng.random() < 0.5)
        await self._attempt(order)
        await self._until_definite(order)

    def _some_regions(self) -> list[str]:
        return self._rng.choice([*([region] for region in self._regions), self._regions[:2], self._regions])

    def _one_region(self) -> list[str]:
        return [self._rng.choice(self._regions)]

    def _new_order(self, regions: list[str], *, keyed: bool) -> Order:
        self._number += 1
        label = f"{self.name}-{self._number}"
        order = self._oracle.orders[label] = Order(
            label=label,
            key=f"key-{label}" if keyed else "",
            app=self._rng.choice(self._apps),
            owner=self.name,
            regions=tuple(regions),
            program=self._rng.choices(PROGRAM_NAMES, PROGRAM_WEIGHTS)[0],
            began_s=self._now(),
        )
        return order

    async def _until_definite(self, order: Order) -> None:
        """Ask again a few times, longer and longer after each other, if that is safe."""
        for attempt in range(3):
            if order.outcome != DOUBT or not order.key:
                return
            await asyncio.sleep(self._rng.uniform(0.1, 1.0) * 2**attempt)
            await self._attempt(order)

    async def order_twice(self) -> None:
        """Send the same order through two brokers at once, as an impatient client does."""
        order = self._new_order(self._one_region(), keyed=True)
        await asyncio.gather(self._attempt(order), self._attempt(order))
        await self._until_definite(order)

    async def order_anew(self) -> None:
        """Look at a few machines; the first whose worker does not answer is ordered anew: the same id elsewhere."""
        for _ in range(5):
            order = self._one()
            if order and (await self._on(order, "look", "GET", "")).word == "unreachable":
                await self._replace(order)
                return

    async def _replace(self, order: Order) -> None:
        self._oracle.replaced[order.machine] = inf
        body = {"config": self._config(order), "replaces": order.machine}
        for attempt in range(3):
            began = self._now()
            answer = await self.api.ask("POST", f"/v1/apps/{order.app}/machines", body)
            self._oracle.answers[f"order anew {answer.status} {answer.word}".rstrip()] += 1
            if answer.status == 200 and answer.body["id"] == order.machine:
                self._oracle.paths["a machine was ordered anew"] += 1
                order.worker, order.region = answer.body["hawker"]["worker"], answer.body["region"]
                order.asked_s, order.filled_s = began, self._now()
            elif answer.status == 200:
                self._violated(f"S4: machine {order.machine} was ordered anew and became {answer.body['id']}")
            if answer.definite:
                self._oracle.replaced[order.machine] = self._now()
                return
            await asyncio.sleep(self._rng.uniform(0.1, 1.0) * 2**attempt)

    def _config(self, order: Order, program: str = "") -> dict[str, Any]:
        return machine_config(program or order.program, order.label)

    def _body(self, order: Order) -> dict[str, Any]:
        rng = random.Random(order.label)  # the same at each attempt
        config = self._config(order)
        if rng.random() < 0.3:
            config["guest"] = {"cpu_kind": "shared", "cpus": 2, "memory_mb": 512}
        elif rng.random() < 0.1:
            config["guest"] = {"cpu_kind": "performance", "cpus": 1, "memory_mb": 2048}
        policy = rng.choice(("no", "on-failure", "on-failure", "always"))
        config["restart"] = {"policy": policy, "max_retries": 3}
        if rng.random() < 0.05:
            order.auto_destroy = True
            config["auto_destroy"] = True
        drawn = random.Random(f"{order.label}/image")
        if drawn.random() < 0.3:
            config["image"] = drawn.choice(IMAGES)
            config["services"] = [{"internal_port": 80, "checks": [{"type": "tcp", "interval": "5s"}]}]
        body: dict[str, Any] = {"name": order.label, "region": ",".join(order.regions), "config": config}
        if rng.random() < 0.1:
            body["skip_launch"] = True
        return body

    async def _attempt(self, order: Order) -> None:
        """Ask once; note what became of it."""
        order.attempts += 1
        headers = {"idempotency-key": order.key} if order.key else {}
        path = f"/v1/apps/{order.app}/machines"
        timeout_s = PATIENCE_S if self._rng.random() < 0.2 else ANSWER_S
        began = self._now()
        answer = await self.api.ask("POST", path, self._body(order), headers=headers, order=True, timeout_s=timeout_s)
        self._oracle.answers[f"order {answer.status} {answer.word}".rstrip()] += 1
        if answer.status == 0 and answer.sent and self._now() - began >= PATIENCE_S - 0.001:
            order.late.append((began, answer.broker))
        if answer.status == 200:
            self._filled(order, answer.body, began)
        elif order.outcome == FILLED:
            pass  # two attempts at once: the other one has told
        elif not answer.sent:
            order.outcome = DOUBT if order.key or order.doubtful else REFUSED
        elif answer.word == "conflict" and order.key:
            order.outcome, order.doubtful = DOUBT, True  # another attempt is in progress, or was a moment ago
        elif answer.definite:
            order.outcome = REFUSED
        else:
            order.outcome, order.doubtful = DOUBT, True
            if answer.status == 500 and answer.word == "unreachable":
                order.undoing = answer.broker, began  # it may have died before its answer arrived

    def _filled(self, order: Order, body: Any, began: float) -> None:
        machine, worker, region = body["id"], body["hawker"]["worker"], body["region"]
        if order.machine and order.machine != machine:
            self._violated(f"S4: order {order.label} was filled by machine {order.machine}, then by {machine}")
        if region not in order.regions:
            self._violated(f"S7: order {order.label} for {order.regions} was filled in {region}")
        if body["name"] != order.label:
            self._violated(f"S4: order {order.label} was answered with machine {machine} named {body['name']}")
        if order.doubtful:
            self._oracle.paths["an order in doubt was found again by its key"] += 1
        order.outcome, order.machine, order.worker, order.region = FILLED, machine, worker, region
        order.asked_s, order.filled_s = began, self._now()

    async def storm(self) -> None:
        """Many orders at once for one region: they race for what is left there."""
        region = self._rng.choice(self._regions)
        async with asyncio.TaskGroup() as orders:
            for _ in range(self._rng.randrange(4, 12)):
                orders.create_task(self.order(regions=[region]))

    # --- machines ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._act("start", "POST", "/start")

    async def stop(self) -> None:
        await self._act("stop", "POST", "/stop", {})

    async def restart(self) -> None:
        await self._act("restart", "POST", "/restart")

    async def suspend(self) -> None:
        await self._act("suspend", "POST", "/suspend")

    async def cordon(self) -> None:
        cordoned = self._rng.random() < 0.5
        await self._act("cordon", "POST", "/cordon" if cordoned else "/uncordon", wanted=cordoned)

    async def look(self) -> None:
        await self._act("look", "GET", self._rng.choice(("", "/events", "/wait?state=settled&timeout=5")))

    async def update(self) -> None:
        order = self._one()
        if order:
            program = self._rng.choices(PROGRAM_NAMES, PROGRAM_WEIGHTS)[0]
            config = self._config(order, program)
            if self._rng.random() < 0.3:
                config["image"] = self._rng.choice(IMAGES)
            await self._on(order, "update", "POST", "", {"config": config}, wanted=program)

    async def note(self) -> None:
        """Set a word of the metadata, or take it away."""
        self._number += 1
        value = f"{self.name}-{self._number}" if self._rng.random() < 0.8 else None
        method, body = ("POST", {"value": value}) if value else ("DELETE", None)
        await self._act("metadata", method, "/metadata/note", body, wanted=("note", value))

    async def resize(self) -> None:
        if order := self._one():
            limit_mb = self._rng.choice((256, 512))
            await self._on(order, "resize", "PUT", "/memory", {"limit_mb": limit_mb}, wanted=limit_mb)

    async def destroy(self) -> None:
        """Destroy the machine: ask a few times, until the client is told that it is gone."""
        order = self._one()
        if order is None:
            return
        force = "?force=true" if self._rng.random() < 0.7 else ""
        order.destroy_asked = True
        for _ in range(3):
            began = self._now()
            answer = await self._on(order, "destroy", "DELETE", force)
            if answer.status == 200:
                order.destroyed = began, self._now()
            if answer.definite:
                return
            await asyncio.sleep(self._rng.uniform(0.2, 1.0))

    async def lease(self) -> None:
        """Take a lease; while it is held, a change without its nonce must be refused."""
        order = self._one()
        if order is None:
            return
        began, machine = self._now(), (order.machine, order.worker)
        taken = await self._on(order, "lease", "POST", "/lease", {"ttl": 60})
        if taken.status != 201:
            return
        nonce = taken.body["data"]["nonce"]
        self._oracle.acknowledged.append(Acknowledged("lease", *machine, taken.request, began, self._now(), nonce))
        headers = {"fly-machine-lease-nonce": nonce}
        began = self._now()
        intruder = await self._on(order, "stop", "POST", "/stop", {})
        if intruder.status == 200:
            self._oracle.leaks.append((began, order))
        await self._on(order, "start", "POST", "/start", headers=headers)
        await self._on(order, "release lease", "DELETE", "/lease", headers=headers)

    async def make_app(self) -> None:
        self._number += 1
        answer = await self.api.ask("POST", "/v1/apps", {"app_name": f"app-{self.name}-{self._number}"})
        self._oracle.answers[f"make app {answer.status}"] += 1

    async def _act(self, name: str, method: str, path: str, body: Any = None, *, wanted: Any = None) -> None:
        if order := self._one():
            answer = await self._on(order, name, method, path, body, wanted=wanted)
            if answer.word == "unreachable" and self._rng.random() < 0.4:
                await self._replace(order)

    async def _on(
        self,
        order: Order,
        name: str,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        wanted: Any = None,
    ) -> Answer:
        """Ask, and write down what was acknowledged: `wanted` is what the machine is to become."""
        began, machine = self._now(), (order.machine, order.worker)
        target = f"/v1/apps/{order.app}/machines/{order.machine}{path}"
        answer = await self.api.ask(method, target, body, headers=headers)
        self._oracle.answers[f"{name} {answer.status} {answer.word}".rstrip()] += 1
        if method != "GET" and 200 <= answer.status < 300 and name != "lease":
            self._oracle.acknowledged.append(Acknowledged(name, *machine, answer.request, began, self._now(), wanted))
        return answer

    def _mine(self) -> list[Order]:
        return [order for order in self._oracle.orders.values() if order.owner == self.name]

    def _one(self) -> Order | None:
        """A machine that is there, as far as anybody knows; seldom another client's."""
        if self.others and self._rng.random() < 0.1:
            return self._rng.choice(self.others)._one()
        there = self._there()
        return self._rng.choice(there) if there else None

    def _there(self) -> list[Order]:
        """Its orders whose machines are there, as far as anybody knows."""
        return [order for order in self._mine() if order.machine and order.destroyed is None]

    def _violated(self, what: str) -> None:
        self._oracle.violations.append(f"{self._now():.3f}: {what}")


PROGRAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "serve": (60, {}),
    "job": (10, {"runs_s": 6.0, "code": 0}),
    "crash": (8, {"runs_s": 2.0, "code": 1}),
    "killed": (3, {"runs_s": 4.0, "signal": 9, "oom_killed": True}),
    "missing": (4, {"fails": "no such program"}),
    "slow": (8, {"stops_in_s": 2.0}),
    "stubborn": (7, {"stops_in_s": None}),
}
"""The programs of this world: how often each is ordered, and how it behaves (`sim.hosts.world.Program`)."""
PROGRAM_NAMES = list(PROGRAMS)
PROGRAM_WEIGHTS = [weight for weight, _ in PROGRAMS.values()]

"""A client of a worker that may be killed at any moment: it repeats what was not acknowledged, without doing it twice.

An order is repeated with its key. Any other request is repeated after a look at the machine's events: they tell whether
the one before was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tests.kit.sim_worker import APP, SimWorker, machine_config, order

from hawker.errors import PreconditionFailed
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import EventRow, MachineRow, RunRow
from hawker.sim.hosts.world import World
from hawker.worker.flows.runner import Busy
from hawker.worker.request import Request

T = TypeVar("T")

LOOK_S = 0.25
LOOKS_MOST = 4000


class Asks(Protocol):
    """How the client reaches the worker that is there now."""

    async def __call__(self, ask: Callable[[SimWorker], Awaitable[T]]) -> T: ...


class Client:
    """Machines go by the key of their order. A request that the machine's state forbids is passed over when
    `tolerant`: a fault has changed the course of things."""

    def __init__(self, ask: Asks, world: World, *, tolerant: bool) -> None:
        self.ask = ask
        self.world = world
        self._tolerant = tolerant
        self.machines: dict[str, str] = {}

    # --- orders ------------------------------------------------------------------------------------------------------

    async def reserve(self, key: str, program: str = "serve", **options: Any) -> None:
        await self.ask(lambda worker: worker.market.reserve(order(key, program, **options)))

    async def confirm(self, key: str) -> None:
        row, _, _ = await self.ask(lambda worker: worker.market.confirm(key, APP, None))
        self.machines[key] = row.id

    async def create(self, key: str, program: str = "serve", **options: Any) -> None:
        await self.reserve(key, program, **options)
        await self.confirm(key)

    async def release(self, key: str) -> None:
        await self.ask(lambda worker: worker.market.release(key, "the client gave up"))

    async def sweep(self) -> None:
        await self.ask(lambda worker: worker.market.sweep())

    # --- requests ----------------------------------------------------------------------------------------------------

    async def start(self, key: str) -> None:
        await self._once(key, "start", lambda worker, *names: worker.machines.start(*names))

    async def stop(self, key: str, timeout_s: float | None = None) -> None:
        await self._once(key, "stop", lambda worker, *names: worker.machines.stop(*names, timeout_s=timeout_s))

    async def restart(self, key: str) -> None:
        await self._once(key, "restart", lambda worker, *names: worker.machines.restart(*names))

    async def suspend(self, key: str) -> None:
        await self._once(key, "suspend", lambda worker, *names: worker.machines.suspend(*names))

    async def update(self, key: str, program: str = "serve", *, skip_launch: bool = False, **fields: Any) -> None:
        config = check_config(machine_config(program, **fields))
        await self._once(
            key,
            "update",
            lambda worker, *names: worker.updates.update(*names, config=config, skip_launch=skip_launch),
        )

    async def resize(self, key: str, memory_mb: int) -> None:
        await self._once(key, "resize", lambda worker, *names: worker.updates.resize(*names, memory_mb=memory_mb))

    async def destroy(self, key: str, *, force: bool = False) -> None:
        await self._once(key, "destroy", lambda worker, *names: worker.machines.destroy(*names, force=force))

    async def _once(
        self, key: str, event: str, request: Callable[[SimWorker, str, str, Request], Awaitable[Any]]
    ) -> None:
        machine = self.machines[key]
        named = Request(id=f"req-{event}-{key}", owner="tester")
        seen = await self.ask(lambda worker: _last_event(worker, machine))

        async def unless_taken(worker: SimWorker) -> None:
            where = "machine = ? and id > ? order by id"
            since = worker.store.read.select(EventRow, where, (machine, seen))
            if not any(e.type == event and e.cause == named.cause for e in since):
                await request(worker, APP.name, machine, named)

        while True:
            try:
                return await self.ask(unless_taken)
            except Busy:
                await self.rest()  # a parked run: somebody looks at it
            except PreconditionFailed:
                if not self._tolerant:
                    raise
                return

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Until nothing is on its way, and for a while after it. Runs that a fault has parked are unparked."""
        for _ in range(10):
            await self.ask(_unpark)
            await self.ask(lambda worker: worker.at_rest())
            await asyncio.sleep(1)
            if await self.ask(_is_quiet):
                return
        raise AssertionError("the worker does not come to rest")

    async def until(self, key: str, seen: Callable[[MachineRow, list[str]], bool]) -> None:
        """Until a look at the machine and its events (as "type status") shows what is waited for.

        A tolerant client gives up after a minute.
        """
        last: tuple[SimWorker, int] | None = None  # what the last look saw: nothing is new without a commit

        async def look(worker: SimWorker) -> bool:
            nonlocal last
            if (worker, worker.store.commits) == last:
                return False
            await _unpark(worker)
            last = worker, worker.store.commits
            return seen(worker.machine(self.machines[key]), worker.story(self.machines[key]))

        for _ in range(int(60 / LOOK_S) if self._tolerant else LOOKS_MOST):
            if await self.ask(look):
                return
            await asyncio.sleep(LOOK_S)
        if not self._tolerant:
            raise AssertionError(f"{key} never came to what was waited for: {await self.ask(self._story(key))}")

    async def until_state(self, key: str, state: State) -> None:
        await self.until(key, lambda row, story: row.state is state)

    def _story(self, key: str) -> Callable[[SimWorker], Awaitable[list[str]]]:
        async def story(worker: SimWorker) -> list[str]:
            return worker.story(self.machines[key])

        return story


async def _last_event(worker: SimWorker, machine: str) -> str:
    events = worker.events(machine)
    return events[-1].id if events else ""


async def _is_quiet(worker: SimWorker) -> bool:
    return not any(run.status == "active" or _by_a_fault(run) for run in worker.runs())


async def _unpark(worker: SimWorker) -> None:
    for run in worker.runs():
        if _by_a_fault(run):
            await worker.runner.unpark(run.id, "tester")


def _by_a_fault(run: RunRow) -> bool:
    return run.status == "parked" and "injected" in run.error

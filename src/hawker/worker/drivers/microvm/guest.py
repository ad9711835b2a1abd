"""One machine as this daemon knows it: its record, its end, and the session with its guest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from hawker.errors import Unreachable
from hawker.worker.drivers.base import Exit, Instance, Refused, UnknownInstance
from hawker.worker.drivers.microvm import frames
from hawker.worker.drivers.microvm.agent import Agent, AgentLost, AgentRefused
from hawker.worker.drivers.microvm.hypervisors import of
from hawker.worker.drivers.microvm.records import MEMORY, STATE, Record

ANSWER_S = 15.0
_T = TypeVar("_T")


class Guest:
    """`ended` is done once it has ended. `acknowledged`: the worker has been told of its start, so it will be told of
    its end."""

    def __init__(self, record: Record, directory: Path, *, acknowledged: bool = True) -> None:
        self.record = record
        self.directory = directory
        self.acknowledged = acknowledged
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.moving = asyncio.Lock()  # held by what changes where it is: suspending and resuming
        self._agent: Agent | None = None
        self._connecting = asyncio.Lock()

    def start_over(self) -> None:
        """Forget an end: the hypervisor ended before it was a machine, and another one is started in its place."""
        self.ended = asyncio.get_running_loop().create_future()

    def must_run(self) -> None:
        """Raises `UnknownInstance`, `Refused`."""
        if self.ended.done():
            raise UnknownInstance(f"{self.record.key} has ended")
        if self.record.suspended:
            raise Refused(f"{self.record.key} is suspended")

    async def agent(self) -> Agent:
        """The session with the guest. Waits until it answers, or for ever."""
        async with self._connecting:
            if self._agent and not self._agent.open:
                await self._agent.close()
                self._agent = None
            if self._agent is None:
                vm = self.record.vm
                self._agent = await Agent.connect(of(vm).dial(vm, self.directory))
            return self._agent

    async def hang_up(self) -> None:
        if self._agent:
            agent, self._agent = self._agent, None
            await agent.close()

    async def ask(self, ask: Callable[[Agent], Awaitable[_T]]) -> _T:
        """Raises what `refusals` makes of what goes wrong."""

        async def asking() -> _T:
            return await ask(await self.agent())

        with self.refusals():
            return await self.unless_ended(asking(), ANSWER_S)

    async def unless_ended(self, work: Awaitable[_T], seconds: float) -> _T:
        """Raises `AgentLost` when the machine ends first, TimeoutError."""
        task = asyncio.ensure_future(work)
        waiting: list[asyncio.Future[Any]] = [task, self.ended]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AgentLost("its hypervisor ended")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """A guest's refusals and silence as the driver's exceptions."""
        key = self.record.key
        try:
            yield
        except AgentRefused as error:
            raise UnknownInstance(f"{key}: {error}") from error
        except AgentLost as error:
            raise UnknownInstance(f"{key} has ended") from error
        except TimeoutError as error:
            raise Unreachable(f"{key}: its guest does not answer") from error
        except frames.Malformed as error:
            raise Unreachable(f"{key}: its guest answers nonsense: {error}") from error

    def forget_state(self) -> None:
        """Remove what the machine was suspended to: it runs."""
        for name in (STATE, MEMORY):
            (self.directory / name).unlink(missing_ok=True)

    def shown(self, seen: Instance | None) -> Instance:
        """The instance, where `seen` is its hypervisor's as the supervisor shows it, if there is one."""
        record = self.record
        if seen:
            ended = seen.exit and of(record.vm).ended(record.vm, self.directory, seen.exit)
            started_at_ms = record.started_at_ms or seen.started_at_ms
            return replace(seen, started_at_ms=started_at_ms, exit=ended, note=record.note)
        return Instance(
            key=record.key,
            machine=record.machine,
            pid=None,
            started_at_ms=record.started_at_ms,
            suspended=record.suspended is not None,
            exit=record.exit,
            note=record.note,
        )

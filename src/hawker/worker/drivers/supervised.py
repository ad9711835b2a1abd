"""What drivers share whose instances belong to a supervisor: the calls that the supervisor carries out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from hawker.supervisor import calls
from hawker.worker.drivers.base import ExecResult, Exit, Instance, Limits, LogLine, Process, Stats, Terminal
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.terminal import converse


class SupervisedDriver:
    """What every driver of a supervisor does in the same way: see `hawker.worker.drivers.driver.Driver`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._starting: dict[str, tuple[asyncio.Lock, list[None]]] = {}  # the lock of a key, and who is at it

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        await self.supervisor.open(on_exit)

    async def close(self) -> None:
        await self.supervisor.close()

    def stand_by(self) -> None:
        """Have a supervisor soon, so that the first start need not wait for it."""
        self.supervisor.stand_by()

    @contextlib.asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """Let one start of a key run at a time."""
        lock, there = self._starting.setdefault(key, (asyncio.Lock(), []))
        there.append(None)
        try:
            async with lock:
                yield
        finally:
            there.pop()
            if not there:
                del self._starting[key]

    async def recover(self) -> Sequence[Instance]:
        return [] if self.supervisor.unused else await self.supervisor.call(calls.ListInstances(), list[Instance])

    async def inspect(self, key: str) -> Instance:
        return await self.supervisor.call(calls.Inspect(key=key), Instance)

    async def wait(self, key: str) -> Exit:
        return await self.supervisor.call(calls.Wait(key=key), Exit)

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        return await self.supervisor.call(calls.Stop(key=key, signal=signal, grace_s=grace_s), Exit)

    async def destroy(self, key: str, *, force: bool = False) -> None:
        if not self.supervisor.unused:
            await self.supervisor.call(calls.Destroy(key=key, force=force))

    async def purge(self, machine: str) -> None:
        """Every driver is asked, whoever ran the machine: one that has nothing of it starts no supervisor for that."""
        if self._has_anything(machine):
            await self.supervisor.call(calls.Purge(machine=machine))

    def _has_anything(self, machine: str) -> bool:
        there = str(self.supervisor.directory)  # of paths `Path` would make three, and it is asked for each life
        return any(os.path.exists(f"{there}/{place}/{machine}") for place in ("logs", "work", "roots"))

    async def signal(self, key: str, signal: int) -> None:
        await self.supervisor.call(calls.Signal(key=key, signal=signal))

    async def suspend(self, key: str) -> None:
        await self.supervisor.call(calls.Suspend(key=key))

    async def resume(self, key: str) -> None:
        await self.supervisor.call(calls.Resume(key=key))

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        data = base64.b64encode(stdin).decode()
        request = calls.Execute(key=key, argv=argv, env=env or {}, stdin=data, timeout_s=timeout_s)
        return await self.supervisor.call(request, ExecResult, once=True)

    async def terminal(
        self,
        key: str,
        argv: Sequence[str],
        *,
        tty: bool,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> Terminal:
        request = calls.Converse(key=key, argv=argv, env=env or {}, tty=tty, columns=columns, rows=rows)
        return await converse(self.supervisor, request)

    async def resize(self, key: str, limits: Limits) -> None:
        await self.supervisor.call(calls.Resize(key=key, limits=limits))

    async def stats(self, key: str) -> Stats:
        return await self.supervisor.call(calls.ReadStats(key=key), Stats)

    async def processes(self, key: str) -> Sequence[Process]:
        return await self.supervisor.call(calls.ListProcesses(key=key), list[Process])

    def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        return self.supervisor.logs(machine, tail=tail, follow=follow)

    async def stop_all(self, *, grace_s: float) -> None:
        await self.supervisor.shut_down(grace_s=grace_s)


class Made(msgspec.Struct, frozen=True):
    """A container that waits in front of its program, by the pid of its first process; or the instance, where its
    program runs already."""

    pid: int = 0
    instance: Instance | None = None

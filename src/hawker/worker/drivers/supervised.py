"""What drivers share that leave their instances to a supervisor: the calls that only pass on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

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
        """It has machines that may be started: the first need not wait for the supervisor."""
        self.supervisor.stand_by()

    @contextlib.asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """One start of a key at a time."""
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
        if self.supervisor.unused:
            return []
        return msgspec.convert(await self.supervisor.call("list"), list[Instance])

    async def inspect(self, key: str) -> Instance:
        return msgspec.convert(await self.supervisor.call("inspect", key=key), Instance)

    async def wait(self, key: str) -> Exit:
        return msgspec.convert(await self.supervisor.call("wait", key=key), Exit)

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        ended = await self.supervisor.call("stop", key=key, signal=signal, grace_s=grace_s)
        return msgspec.convert(ended, Exit)

    async def destroy(self, key: str, *, force: bool = False) -> None:
        if not self.supervisor.unused:
            await self.supervisor.call("destroy", key=key, force=force)

    async def purge(self, machine: str) -> None:
        """Every driver is asked, whoever ran the machine: one that has nothing of it starts no supervisor for that."""
        if self._has_anything(machine):
            await self.supervisor.call("purge", machine=machine)

    def _has_anything(self, machine: str) -> bool:
        there = str(self.supervisor.directory)  # of paths `Path` would make three, and it is asked for each life
        return any(os.path.exists(f"{there}/{place}/{machine}") for place in ("logs", "work", "roots"))

    async def signal(self, key: str, signal: int) -> None:
        await self.supervisor.call("signal", key=key, signal=signal)

    async def suspend(self, key: str) -> None:
        await self.supervisor.call("suspend", key=key)

    async def resume(self, key: str) -> None:
        await self.supervisor.call("resume", key=key)

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        result = await self.supervisor.call_once(
            "exec",
            key=key,
            argv=list(argv),
            stdin=base64.b64encode(stdin).decode(),
            env=dict(env or {}),
            timeout_s=timeout_s,
        )
        return msgspec.convert(result, ExecResult)

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
        fields = {"key": key, "argv": list(argv), "env": dict(env or {}), "tty": tty, "columns": columns, "rows": rows}
        return await converse(self.supervisor, fields)

    async def resize(self, key: str, limits: Limits) -> None:
        await self.supervisor.call("resize", key=key, limits=msgspec.to_builtins(limits))

    async def stats(self, key: str) -> Stats:
        return msgspec.convert(await self.supervisor.call("stats", key=key), Stats)

    async def processes(self, key: str) -> Sequence[Process]:
        return msgspec.convert(await self.supervisor.call("processes", key=key), list[Process])

    def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        return self.supervisor.logs(machine, tail=tail, follow=follow)

    async def stop_all(self, *, grace_s: float) -> None:
        await self.supervisor.shut_down(grace_s=grace_s)

"""Opens a driver of machines for a test, and makes the instances it runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count

from tests.kit.oci import Entry
from tests.kit.waiting import eventually

from hawker.supervisor import calls
from hawker.worker.drivers.base import Exit, InstanceSpec, Limits, LogLine, Terminal
from hawker.worker.drivers.driver import Driver, OpensTerminals, Resizes, Suspends, needed
from hawker.worker.drivers.supervised import SupervisedDriver
from hawker.worker.drivers.wire import RunningSupervisor, SupervisorLost

PATH = "/usr/local/bin:/usr/bin:/bin"
AddImage = Callable[[str, Mapping[str, object], Sequence[Sequence[Entry]]], str]
_numbers = count(1)


def spec(*argv: str, image: str = "host", **env: str) -> InstanceSpec:
    """An instance of a machine of its own."""
    n = next(_numbers)
    return InstanceSpec(
        key=f"run{n:04d}/launch",
        machine=f"{n:014x}",
        image=image,
        argv=argv,
        env={"PATH": PATH, **env},
        limits=Limits(cpu_millis=100, memory_mib=64, pids=64, disk_bytes=256 << 20, disk_operations=100_000),
    )


def shell(script: str, image: str = "host", **env: str) -> InstanceSpec:
    return spec("sh", "-c", script, image=image, **env)


class Opened:
    """An open driver and the exits it told of. `image` is one with a shell, for `spec` and `shell`; `add` makes
    further images of it: a reference, fields of its configuration, layers on top."""

    def __init__(self, driver: Driver, image: str = "host", add: AddImage | None = None) -> None:
        self.driver = driver
        self.image = image
        self.exits: dict[str, Exit] = {}
        self._add = add

    @property
    def suspending(self) -> Suspends:
        return needed(self.driver.abilities.suspending, "suspend")

    @property
    def resizing(self) -> Resizes:
        return needed(self.driver.abilities.resizing, "resize")

    @property
    def terminals(self) -> OpensTerminals:
        return needed(self.driver.abilities.terminals, "terminal")

    def spec(self, *argv: str, **env: str) -> InstanceSpec:
        return spec(*argv, image=self.image, **env)

    def shell(self, script: str, **env: str) -> InstanceSpec:
        return shell(script, image=self.image, **env)

    def add_image(self, reference: str, config: Mapping[str, object], *layers: Sequence[Entry]) -> str:
        assert self._add is not None
        return self._add(reference, config, layers)

    def on_exit(self, ended: Exit) -> None:
        self.exits[ended.key] = ended

    async def says(self, machine: str, text: str) -> None:
        """Wait until the machine's log holds a line with this text."""

        async def found() -> bool:
            return any(text in line.text for line in await self.lines(machine))

        await eventually(found, f"{machine} says {text}")

    async def lines(self, machine: str, tail: int = 1000) -> list[LogLine]:
        return [line async for line in self.driver.logs(machine, tail=tail)]

    async def run(self, one: InstanceSpec) -> list[str]:
        """Run it to its end, which must be a good one; what it said, on either stream."""
        await self.driver.start(one)
        ended = await self.driver.wait(one.key)
        lines = [line.text for line in await self.lines(one.machine) if line.instance == one.key]
        assert (ended.code, ended.error) == (0, ""), lines
        return lines

    async def supervisor(self) -> int:
        """The pid of the shim that keeps the instances."""
        assert isinstance(self.driver, SupervisedDriver)
        return (await self.driver.supervisor.call(calls.Hello(), RunningSupervisor)).pid

    async def replaced(self, old: int) -> bool:
        try:
            return await self.supervisor() != old
        except SupervisorLost:
            return False

    async def kill_supervisor(self) -> None:
        killed = await self.supervisor()
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: self.replaced(killed), "another supervisor serves")


@asynccontextmanager
async def opened(driver: Driver, image: str = "host", add: AddImage | None = None) -> AsyncIterator[Opened]:
    """Open a driver; at the end stop everything it runs."""
    it = Opened(driver, image, add)
    await driver.open(it.on_exit)
    try:
        yield it
    finally:
        await driver.stop_all(grace_s=0)
        await driver.close()


async def told(driver: Opened, one: InstanceSpec) -> bool:
    return one.key in driver.exits


class Heard:
    """What a `Terminal` said."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.streams: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    async def until(self, text: str) -> None:
        async with asyncio.timeout(15):
            while text.encode() not in self.streams["stdout"]:
                assert await self._more(), f"{text!r} is not in {self.streams}"

    async def to_the_end(self) -> None:
        async with asyncio.timeout(15):
            while await self._more():
                pass

    async def _more(self) -> bool:
        chunk = await self._terminal.read()
        if chunk is None:
            return False
        self.streams[chunk[0]] += chunk[1]
        return True

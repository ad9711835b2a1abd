"""A driver whose programs are a `World`'s. A `FakeDriver` is one daemon's hold on it and honours the contract in
`hawker.worker.drivers.base`.

    driver = FakeDriver(World(host, {"serve": Program()}))
    drivers = driver.for_all()
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Literal, TypeVar

from hawker.images.base import Missing
from hawker.model.image import Image
from hawker.sim.hosts.world import World
from hawker.worker.drivers.base import (
    Capabilities,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceSpec,
    Limits,
    LogLine,
    Process,
    StartFailed,
    Stats,
    Terminal,
    UnknownInstance,
)
from hawker.worker.drivers.driver import Abilities, StartRelease
from hawker.worker.drivers.driver_set import DriverSet

T = TypeVar("T")

RUNTIMES = ("process", "container", "microvm")
"""What a fake driver runs: a program of the world is the same in each."""


class FakeImages:
    """The images of a world, as one daemon sees them. `holds`: by who holds them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.holds: dict[str, str] = {}

    async def ensure(self, reference: str) -> Image:
        await asyncio.sleep(self._world.delays.get("prepare", 0.0))
        return self._world.fetch(reference)

    def find(self, reference: str) -> Image | None:
        here = self._world.images
        return here.get(reference) or next((image for image in here.values() if image.digest == reference), None)

    def layers(self, image: Image) -> Sequence[Path]:
        return ()

    def missing(self, reference: str) -> Missing:
        return Missing(known=self.find(reference) is not None)

    def hold(self, holder: str, digest: str) -> None:
        self.holds[holder] = digest

    def release(self, holder: str) -> None:
        self.holds.pop(holder, None)


class _Echo:
    """A terminal's other end."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._ended = asyncio.Event()

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        data = await self._said.get()
        if not data:
            self._said.put_nowait(b"")
            return None
        return "stdout", data

    async def write(self, data: bytes) -> None:
        if data and not self._ended.is_set():
            self._said.put_nowait(data)

    async def end_input(self) -> None:
        self._ended.set()
        self._said.put_nowait(b"")

    async def resize(self, columns: int, rows: int) -> None:
        pass

    async def wait(self) -> tuple[int, int | None]:
        await self._ended.wait()
        return 0, None

    async def close(self) -> None:
        await self.end_input()


class FakeDriver:
    """One daemon's hold on a world. `can_suspend` False leaves suspending out of its capabilities, `can_resize` False
    resizing. `images` is the worker's image source over the same world."""

    name = "fake"

    def __init__(self, world: World, *, can_suspend: bool = True, can_resize: bool = True) -> None:
        self._world = world
        self._can_suspend = can_suspend
        self._can_resize = can_resize
        self.images = FakeImages(world)
        self.prespawned: dict[str, InstanceSpec] = {}
        self._dead = False
        self.abilities = Abilities(
            suspending=self,
            resizing=self if can_resize else None,
            terminals=self,
            prespawning=self,
        )

    def die(self) -> None:
        """The daemon is killed: nothing it asked for has an effect from now on, and nobody answers it."""
        self._dead = True
        self._world.listener = None

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        await self._call("open")
        self._world.listener, self._world.listener_context = on_exit, contextvars.copy_context()
        for placed in self._world.instances.values():
            if placed.exit:
                on_exit(placed.exit)

    def for_all(self) -> DriverSet:
        """The drivers of a worker whose every runtime this one is."""
        return DriverSet(dict.fromkeys(RUNTIMES, self))

    async def close(self) -> None:
        if not self._dead:
            self._world.listener = None

    async def fingerprint(self) -> Fingerprint:
        can = Capabilities(suspend=self._can_suspend, exec=True, images=True, terminal=True, resize=self._can_resize)
        return Fingerprint(driver=self.name, healthy=True, capabilities=can)

    def prespawn(self, spec: InstanceSpec) -> bool:
        """This has no effect in a world, but `start` must be called with the same specification."""
        self.prespawned[spec.key] = spec
        return self._world.releases != "no"

    def release_start(self, spec: InstanceSpec) -> StartRelease:
        if not self._dead and self._world.releases == "now":
            with suppress(StartFailed):  # `start` is told
                self._world.point("before", f"release {spec.key}")
                self._world.start(spec)
                self._world.point("after", f"release {spec.key}")
        return "no" if self._dead else self._world.releases

    async def start(self, spec: InstanceSpec) -> Instance:
        assert self.prespawned.pop(spec.key, spec) == spec, f"{spec.key} is not started as it was prespawned"
        return await self._effect("start", spec.key, lambda: self._world.start(spec))

    async def recover(self) -> Sequence[Instance]:
        found = [placed.shown() for placed in self._world.instances.values()]
        await self._call("recover")  # an answer may be old when it comes
        return found

    async def inspect(self, key: str) -> Instance:
        await self._call("inspect")
        return self._world.known(key).shown()

    async def wait(self, key: str) -> Exit:
        await self._call("wait")
        return await self._ended(key)

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        await self._call("stop")
        self._world.point("before", f"stop {key}")
        if self._world.known(key).exit is None:
            self._world.stops.append(key)
            self._world.stop(key, signal, grace_s)
        ended = await self._ended(key)
        await self._alive()
        self._world.point("after", f"stop {key}")
        return ended

    async def destroy(self, key: str, *, force: bool = False) -> None:
        await self._effect("destroy", key, lambda: self._world.destroy(key, force))

    async def purge(self, machine: str) -> None:
        await self._effect("purge", machine, lambda: self._world.purge(machine))

    async def signal(self, key: str, signal: int) -> None:
        await self._call("signal")
        placed = self._world.known(key)
        if placed.exit:
            raise UnknownInstance(key)
        if placed.program.stops_in_s is not None or signal == SIGKILL:
            self._world.end(key, signal=signal)

    async def suspend(self, key: str) -> None:
        await self._effect("suspend", key, lambda: self._world.freeze(key, True))

    async def resume(self, key: str) -> None:
        await self._effect("resume", key, lambda: self._world.freeze(key, False))

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        """Every command is `cat`."""
        await self._call("exec")
        if self._world.known(key).exit:
            raise UnknownInstance(key)
        return ExecResult(code=0, signal=None, stdout=stdin, stderr=b"")

    async def prepare(self, image: str) -> None:
        await self._effect("prepare", image, lambda: self._world.fetch(image))

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
        """Every command says back what it hears, and ends with its input."""
        await self._call("terminal")
        if self._world.known(key).exit:
            raise UnknownInstance(key)
        return _Echo()

    async def resize(self, key: str, limits: Limits) -> None:
        await self._effect("resize", key, lambda: self._world.resize(key, limits))

    async def stats(self, key: str) -> Stats:
        await self._call("stats")
        self._world.known(key)
        return Stats(cpu_s=0.0, memory_bytes=0, processes=1)

    async def processes(self, key: str) -> Sequence[Process]:
        await self._call("processes")
        placed = self._world.known(key)
        command = " ".join(placed.spec.argv)
        at_ms = placed.started_at_ms
        return [Process(pid=1, ppid=0, started_at_ms=at_ms, cpu_s=0.0, rss_bytes=0, directory="/", command=command)]

    async def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        """A program of this world says that it was started, and nothing else."""
        for spec in [s for s in self._world.starts if s.machine == machine][-tail:]:
            yield LogLine(at_ms=self._world.host.now_ms(), stream="stdout", text="started", instance=spec.key)

    async def stop_all(self, *, grace_s: float) -> None:
        running = [key for key, placed in self._world.instances.items() if placed.exit is None]
        for key in running:
            self._world.stop(key, SIGTERM, grace_s)
        for key in running:
            await self._ended(key)

    # --- how every call goes -----------------------------------------------------------------------------------------

    async def _effect(self, operation: str, key: str, act: Callable[[], T]) -> T:
        await self._call(operation)
        self._world.point("before", f"{operation} {key}")
        result = act()
        self._world.point("after", f"{operation} {key}")
        if faults := self._world.late_faults.get(operation):
            raise faults.pop(0)
        return result

    async def _call(self, operation: str) -> None:
        """The way to the driver: it takes a moment, and may fail before anything has happened."""
        await self._alive()
        self._world.calls[operation] += 1
        await asyncio.sleep(self._world.delays.get(operation, 0.0))
        await self._alive()
        if faults := self._world.faults.get(operation):
            raise faults.pop(0)

    async def _ended(self, key: str) -> Exit:
        placed = self._world.known(key)
        await placed.ended.wait()
        assert placed.exit is not None  # set before the event
        return placed.exit

    async def _alive(self) -> None:
        if self._dead:
            await asyncio.get_running_loop().create_future()  # a killed daemon hears nothing any more

"""What is outside a worker, in memory: instances of programs that are values, and a driver over them.

A `World` outlives the worker daemons that come and go over it, as programs outlive a real one: what its programs do by
themselves belongs to no process of the simulation. A `FakeDriver` is one daemon's hold on it and honours the contract
in `hawker.worker.drivers.base`. `World.point` is called before and after every outside effect; the crash tests end the
daemon there.

    world = World(host, {"serve": Program(), "fail": Program(runs_s=2, code=1)})
    driver = FakeDriver(world)
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Literal, TypeVar

from hawker.errors import ImageError, Unreachable
from hawker.host import Host
from hawker.images.base import Missing
from hawker.model.image import Image, ImageConfig, Layer, Platform
from hawker.model.values import ImageRef, pinned
from hawker.sim.loop import PROCESS
from hawker.worker.drivers.base import (
    Capabilities,
    Driver,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    LogLine,
    NotSupported,
    Process,
    Refused,
    StartFailed,
    Stats,
    Terminal,
    UnknownInstance,
)
from hawker.worker.drivers.several import OnLate

T = TypeVar("T")

RUNTIMES = ("process", "container", "microvm")
"""What a fake driver runs: a program of the world is the same in each."""


@dataclass(frozen=True)
class Program:
    """How a program behaves. It runs for `runs_s` (None: until it is ended) and ends with `code` or `signal`.

    `fails`: it cannot be started, and why. `stops_in_s`: how long it takes to end once signalled (None: it ignores
    signals and must be killed). `least_mib`: the memory it needs.
    """

    runs_s: float | None = None
    code: int | None = 0
    signal: int | None = None
    oom_killed: bool = False
    fails: str = ""
    stops_in_s: float | None = 0.0
    least_mib: int = 0


@dataclass
class Placed:
    """One instance."""

    spec: InstanceSpec
    program: Program
    started_at_ms: int
    suspended: bool = False
    exit: Exit | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def shown(self) -> Instance:
        return Instance(
            key=self.spec.key,
            machine=self.spec.machine,
            pid=None if self.exit else 1,
            started_at_ms=self.started_at_ms,
            suspended=self.suspended,
            exit=self.exit,
        )


class World:
    """`programs` by their first argument. `starts` and `stops` list the effects in their order: a repeated start once,
    and no stops of a host that shuts down.

    `faults` are raised by the next calls of an operation, one each, before it has an effect, `late_faults` after it;
    `delays` are seconds an operation takes, `exits_late_s` how long the end of a program takes to be told, and with
    `exits_twice` it is told again. `violations`: what must never happen and did. `on_event` hears of every start and
    end.
    """

    def __init__(self, host: Host, programs: Mapping[str, Program]) -> None:
        self.host = host
        self.programs = dict(programs)
        self.instances: dict[str, Placed] = {}
        self.directories: set[str] = set()  # by machine; gone with `purge`
        self.images: dict[str, Image] = {}  # that are here, by what they were asked for
        self.bad_images: dict[str, str] = {}  # what is wrong with them, by reference without a digest
        self.silent_images: set[str] = set()  # whose registry does not answer
        self.meanings: dict[str, str] = {}  # digests that references mean at their registry, where it is not always one
        self.limits: dict[str, Limits] = {}  # as they were last set of an instance that runs, by key
        self.starts: list[InstanceSpec] = []
        self.stops: list[str] = []
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, list[Exception]] = {}
        self.late_faults: dict[str, list[Exception]] = {}
        self.delays: dict[str, float] = {}
        self.exits_late_s = 0.0
        self.exits_twice = False
        self.violations: list[str] = []
        self.point: Callable[[str, str], None] = lambda when, effect: None
        self.on_event: Callable[[str, InstanceSpec], None] = lambda what, spec: None
        self.listener: Callable[[Exit], None] | None = None
        self.listener_context: contextvars.Context | None = None
        self._nobody = contextvars.copy_context()
        self._nobody.run(PROCESS.set, None)

    # --- what happens by itself --------------------------------------------------------------------------------------

    def end(self, key: str, *, code: int | None = 0, signal: int | None = None, oom_killed: bool = False) -> None:
        """The program ends now. One that has ended, or was destroyed, stays as it is."""
        placed = self.instances.get(key)
        if placed is None or placed.exit:
            return
        ended = Exit(
            key=key,
            machine=placed.spec.machine,
            code=None if signal is not None else code,
            signal=signal,
            oom_killed=oom_killed,
            at_ms=self.host.now_ms(),
        )
        placed.exit = ended
        placed.ended.set()
        self.on_event("ended", placed.spec)
        for _ in range(2 if self.exits_twice else 1):
            self._tell(ended)

    def lose_power(self) -> None:
        """The host goes down with every program on it, and nobody saw them end."""
        for placed in self.instances.values():
            self.on_event("lost", placed.spec)  # of one that had ended, too: the record of its exit
        self.instances.clear()

    def running(self, machine: str) -> list[Placed]:
        return [p for p in self.instances.values() if p.spec.machine == machine and p.exit is None]

    # --- images ------------------------------------------------------------------------------------------------------

    def fetch(self, reference: str) -> Image:
        """As a registry has it: a tag that is here keeps what it meant."""
        if there := self.images.get(reference):
            return there
        name = reference.partition("@")[0]
        if problem := self.bad_images.get(name):
            raise ImageError(reference, problem)
        if name in self.silent_images:
            raise Unreachable(f"the registry of {reference} does not answer")
        ref = ImageRef(reference)
        digest = ref.digest or self.meanings.get(reference) or f"sha256:{sha256(reference.encode()).hexdigest()}"
        layer = Layer(media_type="layer", digest=digest, size=IMAGE_BYTES, diff_id=digest)
        image = Image(digest=digest, platform=Platform(), config=ImageConfig(), layers=(layer,))
        self.images[reference] = self.images[pinned(reference, digest)] = image
        return image

    # --- the effects -------------------------------------------------------------------------------------------------

    def start(self, spec: InstanceSpec) -> Instance:
        if there := self.instances.get(spec.key):
            return there.shown()
        program = self.programs[(spec.argv or [*spec.entrypoint, *spec.cmd])[0]]
        if program.fails:
            raise StartFailed(program.fails)
        if others := self.running(spec.machine):
            self.violations.append(f"{spec.key} started beside {[p.spec.key for p in others]}")
        placed = Placed(spec, program, self.host.now_ms())
        self.instances[spec.key] = placed
        self.directories.add(spec.machine)
        self.starts.append(spec)
        self.limits[spec.key] = spec.limits
        self.on_event("started", spec)
        if program.runs_s is not None:
            self._ends_in(placed, program.runs_s, program.code, program.signal, program.oom_killed)
        return placed.shown()

    def stop(self, key: str, signal: int, grace_s: float) -> None:
        """Signal it; it ends when it does, or is killed when the grace time is over."""
        placed = self.known(key)
        takes_s = placed.program.stops_in_s
        if placed.suspended or grace_s <= 0:
            self.end(key, signal=SIGKILL)
        elif takes_s == 0:
            self.end(key, signal=signal)
        elif takes_s is None or takes_s >= grace_s:
            self._ends_in(placed, grace_s, None, SIGKILL)
        else:
            self._ends_in(placed, takes_s, None, signal)

    def destroy(self, key: str, force: bool) -> None:
        placed = self.instances.get(key)
        if placed and placed.exit is None:
            if not force:
                raise InstanceRunning(key)
            self.end(key, signal=SIGKILL)
        self.instances.pop(key, None)
        self.limits.pop(key, None)

    def purge(self, machine: str) -> None:
        if not any(p.spec.machine == machine for p in self.instances.values()):
            self.directories.discard(machine)

    def freeze(self, key: str, suspended: bool) -> None:
        placed = self.known(key)
        if placed.exit:
            raise UnknownInstance(key)
        placed.suspended = suspended

    def resize(self, key: str, limits: Limits) -> None:
        """Refused below what the program was said to need, in `least_mib`."""
        placed = self.known(key)
        if placed.exit:
            raise UnknownInstance(key)
        if limits.memory_mib < placed.program.least_mib:
            raise Refused(f"{placed.program.least_mib} MiB are in use")
        self.limits[key] = limits

    def known(self, key: str) -> Placed:
        placed = self.instances.get(key)
        if placed is None:
            raise UnknownInstance(key)
        return placed

    def _ends_in(
        self, placed: Placed, seconds: float, code: int | None, signal: int | None, oom_killed: bool = False
    ) -> None:
        def end() -> None:
            if self.instances.get(placed.spec.key) is placed:
                self.end(placed.spec.key, code=code, signal=signal, oom_killed=oom_killed)

        self._later(seconds, end)

    def _tell(self, ended: Exit) -> None:
        """Call the listener there is by then, as the process it belongs to."""
        loop = asyncio.get_running_loop()
        if self.exits_late_s:
            self._later(self.exits_late_s, lambda: loop.call_soon(self._told, ended, context=self.listener_context))
        else:
            loop.call_soon(self._told, ended, context=self.listener_context)

    def _told(self, ended: Exit) -> None:
        if self.listener:
            self.listener(ended)

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, call, context=self._nobody)


IMAGE_BYTES = 50 << 20


class FakeImages:
    """The images of a world, as one daemon sees them. `holds`: by who holds them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.holds: dict[str, str] = {}

    async def ensure(self, reference: str) -> Image:
        await asyncio.sleep(self._world.delays.get("prepare", 0.0))
        return self._world.fetch(reference)

    def find(self, reference: str) -> Image | None:
        return self._world.images.get(reference)

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


async def _never(name: str, instances: Sequence[Instance]) -> None:
    """A fake driver is there from the beginning."""


class FakeDriver:
    """One daemon's hold on a world. `can_suspend` False leaves suspending out of its capabilities, `can_resize` False
    resizing. `images` is the worker's image source over the same world."""

    name = "fake"

    def __init__(self, world: World, *, can_suspend: bool = True, can_resize: bool = True) -> None:
        self._world = world
        self._can_suspend = can_suspend
        self._can_resize = can_resize
        self.images = FakeImages(world)
        self._dead = False
        self.on_late: OnLate = _never

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

    async def close(self) -> None:
        if not self._dead:
            self._world.listener = None

    async def fingerprint(self) -> Fingerprint:
        can = Capabilities(suspend=self._can_suspend, exec=True, images=True, terminal=True, resize=self._can_resize)
        return Fingerprint(driver=self.name, healthy=True, capabilities=can)

    async def fingerprints(self) -> Mapping[str, Fingerprint]:
        found = await self.fingerprint()
        return dict.fromkeys(RUNTIMES, found)

    def of(self, runtime: str) -> Driver:
        return self

    def opened(self) -> frozenset[str]:
        return frozenset(RUNTIMES)

    async def start(self, spec: InstanceSpec) -> Instance:
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
        if not self._can_resize:
            raise NotSupported("resizing")
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

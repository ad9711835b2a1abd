"""What is outside a worker, in memory: instances of programs that are values, and their images.

A `World` outlives the worker daemons that come and go over it, as programs outlive a real one: what its programs do by
themselves belongs to no process of the simulation. `World.point` is called before and after every outside effect; the
crash tests end the daemon there.

    world = World(host, {"serve": Program(), "fail": Program(runs_s=2, code=1)})
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from signal import SIGKILL
from typing import Literal

from hawker.errors import ImageError, Unreachable
from hawker.host import Host
from hawker.model.image import Image, ImageConfig, Layer, Platform
from hawker.model.values import ImageRef, pinned
from hawker.sim.platform.processes import PROCESS
from hawker.worker.drivers.base import (
    Exit,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    Refused,
    StartFailed,
    UnknownInstance,
)

IMAGE_BYTES = 50 << 20


@dataclass(frozen=True)
class Program:
    """How a program behaves. It runs for `runs_s` (None: until it is ended) and ends with `code` or `signal`.

    `fails`: it cannot be started, and why. `stops_in_s`: how long it takes to end once signalled (None: it ignores
    signals and must be killed). `least_mib`: the memory it needs. `listens_s`: how long it boots before it takes
    requests at its ports (`sim.traffic.serving`); None: it never does.
    """

    runs_s: float | None = None
    code: int | None = 0
    signal: int | None = None
    oom_killed: bool = False
    fails: str = ""
    stops_in_s: float | None = 0.0
    least_mib: int = 0
    listens_s: float | None = None


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
            note=self.spec.note,
        )


class World:
    """`programs` by their first argument. `starts` and `stops` list the effects in their order: a repeated start once,
    and no stops of a host that shuts down.

    `faults` are raised by the next calls of an operation, one each, before it has an effect, `late_faults` after it;
    `delays` are seconds an operation takes, `exits_late_s` how long the end of a program takes to be told, and with
    `exits_twice` it is told again. `violations`: what must never happen and did. `on_event` hears of every start and
    end, `on_sign` of what a program that runs is made to do: "stop", "suspend", "resume". `on_hang` makes the programs
    that run take what comes and do nothing, or go on where they were.
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
        self.releases: Literal["now", "soon", "no"] = "no"  # see `hawker.worker.drivers.driver.StartRelease`
        self.exits_late_s = 0.0
        self.exits_twice = False
        self.violations: list[str] = []
        self.point: Callable[[str, str], None] = lambda when, effect: None
        self.on_event: Callable[[str, InstanceSpec], None] = lambda what, spec: None
        self.on_sign: Callable[[str, Placed], None] = lambda what, placed: None
        self.on_hang: Callable[[bool], None] = lambda hung: None
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
            self.on_event("lost", placed.spec)  # also if it had ended: the record of its exit is lost
        self.instances.clear()

    def running(self, machine: str) -> list[Placed]:
        return [p for p in self.instances.values() if p.spec.machine == machine and p.exit is None]

    # --- images ------------------------------------------------------------------------------------------------------

    def fetch(self, reference: str) -> Image:
        """Fetch an image as its registry has it now. A tag that is here already keeps its meaning."""
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
        """Signal a program. It ends when its `Program` says so, or is killed when the grace time is over."""
        placed = self.known(key)
        if placed.exit is None:
            self.on_sign("stop", placed)
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
        if placed.suspended != suspended:
            self.on_sign("suspend" if suspended else "resume", placed)
        placed.suspended = suspended

    def resize(self, key: str, limits: Limits) -> None:
        """Set an instance's limits. Raises `Refused` for less memory than the program's `least_mib`."""
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
        """Call the listener that there will be then, as the process that it belongs to."""
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

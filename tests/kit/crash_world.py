"""The outside of a worker, for crash tests: programs that survive it, and the places where it can be cut off.

`World` holds what a crash does not touch: programs by instance key, and how they ended. `WorldDriver` is a driver over
it, made anew with every worker. Before and after every outside effect, and every commit, `World.point` is passed; it
counts them and, at the ones that were chosen, cuts the worker off.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from hawker.errors import Abort, Retry
from hawker.worker.drivers.base import (
    Capabilities,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceRunning,
    InstanceSpec,
    LogLine,
    NotSupported,
    Process,
    Stats,
    UnknownInstance,
)


class Cut(BaseException):
    """The worker's process ended here, as by kill -9."""


class World:
    """Programs, and the points passed so far. `cuts` are the numbers of points at which the worker is cut off."""

    def __init__(self, cuts: Sequence[int] = (), *, fail: tuple[str, int] | None = None, repeat: int = 0) -> None:
        self.instances: dict[str, Instance] = {}
        self.starts: list[str] = []
        self.points: list[str] = []
        self.effects = 0
        self._cuts = list(cuts)
        self._fail = fail
        self._repeat = repeat
        self.cut_off = False

    def point(self, name: str) -> None:
        """Raises `Cut` at a chosen point, and at every point after it until the worker is started again."""
        if self.cut_off:
            raise Cut
        self.points.append(name)
        if self._cuts and len(self.points) == self._cuts[0]:
            self._cuts.pop(0)
            self.cut_off = True
            raise Cut

    def effect(self, name: str, act: Callable[[], None]) -> None:
        """One outside effect, between two points. One may be chosen to fail before it, or to happen twice."""
        self.point(f"before {name}")
        self.effects += 1
        if self._fail and self._fail[1] == self.effects:
            kind = self._fail[0]
            raise Abort(f"injected at {name}") if kind == "abort" else Retry(f"injected at {name}")
        act()
        if self._repeat == self.effects:
            act()
        self.point(f"after {name}")

    def running(self) -> dict[str, str]:
        """Machines of running programs, by instance key."""
        return {key: i.machine for key, i in self.instances.items() if i.exit is None}


class WorldDriver:
    """A driver over a world. See `hawker.worker.drivers.base.Driver`."""

    name = "process"

    def __init__(self, world: World, now_ms: Callable[[], int]) -> None:
        self._world = world
        self._now_ms = now_ms
        self._on_exit: Callable[[Exit], None] = lambda exit_: None
        self._suspended: set[str] = set()

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        for instance in self._world.instances.values():
            if instance.exit:
                on_exit(instance.exit)

    async def close(self) -> None: ...

    async def fingerprint(self) -> Fingerprint:
        return Fingerprint(driver=self.name, healthy=True, capabilities=Capabilities(suspend=True))

    def end(self, key: str, *, code: int | None = 0, signal: int | None = None, oom: bool = False) -> None:
        """The program ends by itself."""
        self._ended(key, Exit(key=key, machine=self._get(key).machine, code=code, signal=signal, oom_killed=oom))

    async def start(self, spec: InstanceSpec) -> Instance:
        def act() -> None:
            if spec.key not in self._world.instances:
                self._world.starts.append(spec.key)
                self._world.instances[spec.key] = Instance(
                    key=spec.key, machine=spec.machine, pid=1, started_at_ms=self._now_ms()
                )

        self._world.effect(f"start {spec.key.rpartition('/')[2]}", act)
        return self._get(spec.key)

    async def recover(self) -> Sequence[Instance]:
        return list(self._world.instances.values())

    async def inspect(self, key: str) -> Instance:
        return self._get(key)

    async def wait(self, key: str) -> Exit:
        if (ended := self._get(key).exit) is None:
            raise NotSupported("nothing of a worker waits for a program by its key")
        return ended

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        def act() -> None:
            if self._get(key).exit is None:
                self._ended(key, Exit(key=key, machine=self._get(key).machine, signal=signal))

        self._world.effect("stop", act)
        ended = self._get(key).exit
        assert ended
        return ended

    async def destroy(self, key: str, *, force: bool = False) -> None:
        there = self._world.instances.get(key)
        if there and there.exit is None and not force:
            raise InstanceRunning(key)
        self._world.effect("destroy", lambda: self._remove(key))

    async def purge(self, machine: str) -> None:
        self._world.effect("purge", lambda: None)

    async def signal(self, key: str, signal: int) -> None:
        self._get(key)

    async def suspend(self, key: str) -> None:
        if self._get(key).exit:
            raise UnknownInstance(key)
        self._world.effect("suspend", lambda: self._suspended.add(key))

    async def resume(self, key: str) -> None:
        if self._get(key).exit:
            raise UnknownInstance(key)
        self._world.effect("resume", lambda: self._suspended.discard(key))

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        raise NotSupported("exec")

    async def stats(self, key: str) -> Stats:
        raise NotSupported("stats")

    async def processes(self, key: str) -> Sequence[Process]:
        raise NotSupported("processes")

    async def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        if self._world.cut_off:
            yield LogLine(at_ms=0, stream="stdout", text="")  # never: there are no logs here

    async def stop_all(self, *, grace_s: float) -> None:
        for key in list(self._world.running()):
            self._ended(key, Exit(key=key, machine=self._get(key).machine, signal=15))

    def _get(self, key: str) -> Instance:
        try:
            return self._world.instances[key]
        except KeyError:
            raise UnknownInstance(key) from None

    def _remove(self, key: str) -> None:
        self._world.instances.pop(key, None)

    def _ended(self, key: str, ended: Exit) -> None:
        i = self._get(key)
        ended = Exit(
            key=ended.key,
            machine=ended.machine,
            code=ended.code,
            signal=ended.signal,
            oom_killed=ended.oom_killed,
            at_ms=self._now_ms(),
        )
        self._world.instances[key] = Instance(
            key=key, machine=i.machine, pid=None, started_at_ms=i.started_at_ms, exit=ended
        )
        self._on_exit(ended)

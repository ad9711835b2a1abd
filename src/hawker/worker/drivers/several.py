"""The drivers of one worker behind one: each call goes to the driver that has the instance.

A driver that cannot be opened keeps none of the others from working. It is tried again in the background, and until
then nothing is said about its instances: calls for them raise `DriverDown`, so that whoever asked asks again, and
nobody takes a machine for lost because its driver is. Once such a driver is there, `on_late` is told what it has,
before anything can be asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, cast

from hawker.errors import Unreachable
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import (
    Capabilities,
    Driver,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceSpec,
    Limits,
    LogLine,
    Process,
    Stats,
    Terminal,
    UnknownInstance,
)

RETRY_S = 5.0

OnLate = Callable[[str, Sequence[Instance]], Awaitable[None]]

Release = Literal["now", "soon", "no"]
"""What became of what was foreseen. "now": it was let go. It runs, or cannot, which `start` tells, and what runs is the
instance of that key, also for who asks for it after a crash. "soon": `start` lets it go, and nothing is in its way.
"no": `start` has to see."""


class DriverDown(Unreachable):
    """The driver that has this, or may have it, is not there now. What it runs may be running."""


class DriverOff(Unreachable):
    """The configuration does not ask for this driver."""


class Runtimes(Driver, Protocol):
    """What a worker has: a driver for each runtime that its machines may name, and all of them as one."""

    on_late: OnLate
    """Told, by its name, of a driver that is there only now, with its instances; it takes other calls afterwards."""

    def of(self, runtime: str) -> Driver:
        """Raises `DriverDown` when it is not there, now or ever."""

    def opened(self) -> frozenset[str]:
        """The runtimes that are there."""

    async def fingerprints(self) -> Mapping[str, Fingerprint]:
        """By runtime, also of those that are not healthy."""

    def foresee(self, spec: InstanceSpec) -> bool:
        """A start of this will be asked for as soon as the order for it is durable. A driver that knows how may begin
        what leaves nothing when that does not come, be it that we are killed. False: this one does not."""

    def release(self, spec: InstanceSpec) -> Release:
        """Now the order is durable: what was foreseen may run. `start` is to be called in any case."""

    def stand_by(self, runtimes: Iterable[str]) -> None:
        """Machines with these runtimes may be started: drivers that have something to get ready for the first one may
        do so."""


async def capabilities(drivers: Runtimes, runtime: str) -> Capabilities:
    """Raises `DriverDown`: what a driver can do that is not there, nobody knows."""
    return (await drivers.of(runtime).fingerprint()).capabilities


class Foresees(Protocol):
    """What a driver may do beside what all do: get ready what is about to be asked of it."""

    def foresee(self, spec: InstanceSpec) -> bool: ...

    def release(self, spec: InstanceSpec) -> Release: ...

    def stand_by(self) -> None: ...


class Several:
    """See `hawker.worker.drivers.base.Driver`, `Runtimes`, and the module's text. `drivers` by their names."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self.name = ",".join(sorted(drivers))
        self._drivers = dict(drivers)
        self._opened: set[str] = set()
        self._problems: dict[str, str] = {}  # of those that could not be opened
        self._instances: dict[str, str] = {}  # driver by key; an instance that was destroyed is taken out
        self._machines: dict[str, str] = {}  # the driver that a machine's last instance was at
        self._opening: dict[str, asyncio.Task[None]] = {}
        self.on_late: OnLate = _nobody

    # --- the whole ---------------------------------------------------------------------------------------------------

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        """Raises what kept the drivers from opening only when not one of them could be."""
        names = list(self._drivers)
        results = await asyncio.gather(*(self._open(name, on_exit) for name in names), return_exceptions=True)
        failed = {name: result for name, result in zip(names, results, strict=True) if result is not None}
        for name, error in failed.items():
            if isinstance(error, Exception):
                self._failed(name, error)
        for error in failed.values():
            if not isinstance(error, Exception) or len(failed) == len(names):
                await self.close()
                raise error
        for name in (name for name, error in failed.items() if not isinstance(error, DriverOff)):
            task = asyncio.get_running_loop().create_task(self._open_later(name, on_exit), name=f"open driver {name}")
            self._opening[name] = task

    async def close(self) -> None:
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        self._opening.clear()
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))
        self._opened.clear()

    async def stop_all(self, *, grace_s: float) -> None:
        await asyncio.gather(*(self._drivers[name].stop_all(grace_s=grace_s) for name in sorted(self._opened)))

    def of(self, runtime: str) -> Driver:
        if runtime not in self._opened:
            raise DriverDown(
                f"the {runtime} driver of this worker is not available"
                + (f": {why}" if (why := self._problems.get(runtime)) else ""),
                hint="hawker doctor tells what this host lacks",
            )
        # Through this object, which remembers what is where.
        return cast(Driver, _Of(self, runtime, self._drivers[runtime]))

    def opened(self) -> frozenset[str]:
        return frozenset(self._opened)

    async def fingerprints(self) -> Mapping[str, Fingerprint]:
        found = await asyncio.gather(*(self._fingerprint(name) for name in self._drivers))  # the first looks are slow
        return dict(zip(self._drivers, found, strict=True))

    async def _fingerprint(self, name: str) -> Fingerprint:
        """One that cannot even say what it can is not healthy, and keeps none of the others from saying it."""
        problem = self._problems.get(name, "it has not been opened")
        if name in self._opened:
            try:
                return await self._drivers[name].fingerprint()
            except Exception as error:
                problem = f"it does not say what it can: {str(error) or type(error).__name__}"
                _logger.error("driver.not_looked_at", driver=name, why=problem, cause="it was asked what it can")
        return Fingerprint(driver=name, healthy=False, problem=problem)

    async def fingerprint(self) -> Fingerprint:
        """What at least one of them can."""
        found = await self.fingerprints()
        healthy = [fingerprint for fingerprint in found.values() if fingerprint.healthy]
        can = Capabilities(
            **{
                field: any(getattr(fingerprint.capabilities, field) for fingerprint in healthy)
                for field in Capabilities.__struct_fields__
            }
        )
        return Fingerprint(
            driver=self.name,
            healthy=bool(healthy),
            problem="; ".join(f"{name}: {one.problem}" for name, one in found.items() if one.problem),
            capabilities=can,
            attributes={f"{name}.{key}": text for name, one in found.items() for key, text in one.attributes.items()},
        )

    async def recover(self) -> Sequence[Instance]:
        """Of the drivers that are there."""
        found = await asyncio.gather(*(self._recover(name) for name in sorted(self._opened)))
        return [instance for instances in found for instance in instances]

    # --- by driver ---------------------------------------------------------------------------------------------------

    async def prepare(self, image: str) -> None:
        """By every driver that runs images; `of` names one."""
        for name in sorted(self._opened):
            driver = self._drivers[name]
            fingerprint = await driver.fingerprint()
            if fingerprint.healthy and fingerprint.capabilities.images:
                await driver.prepare(image)

    async def start(self, spec: InstanceSpec) -> Instance:
        self.of(spec.driver)
        self._remember(spec.driver, spec.key, spec.machine)  # first: a start that was cut off may have happened
        return await self._drivers[spec.driver].start(spec)

    def foresee(self, spec: InstanceSpec) -> bool:
        if spec.driver in self._opened and hasattr(self._drivers[spec.driver], "foresee"):
            return cast(Foresees, self._drivers[spec.driver]).foresee(spec)
        return False

    def release(self, spec: InstanceSpec) -> Release:
        """Of one that `foresee` was true for."""
        self._remember(spec.driver, spec.key, spec.machine)
        return cast(Foresees, self._drivers[spec.driver]).release(spec) if spec.driver in self._opened else "no"

    def stand_by(self, runtimes: Iterable[str]) -> None:
        for name in self._opened.intersection(runtimes):
            if hasattr(self._drivers[name], "stand_by"):
                cast(Foresees, self._drivers[name]).stand_by()

    # --- by instance -------------------------------------------------------------------------------------------------

    async def inspect(self, key: str) -> Instance:
        return await self._having(key).inspect(key)

    async def wait(self, key: str) -> Exit:
        return await self._having(key).wait(key)

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        return await self._having(key).stop(key, signal=signal, grace_s=grace_s)

    async def destroy(self, key: str, *, force: bool = False) -> None:
        """A key that none of those that are there knows: success, unless another may know it."""
        try:
            driver = self._having(key)
        except UnknownInstance:
            return
        await driver.destroy(key, force=force)
        self._instances.pop(key, None)

    async def signal(self, key: str, signal: int) -> None:
        await self._having(key).signal(key, signal)

    async def suspend(self, key: str) -> None:
        await self._having(key).suspend(key)

    async def resume(self, key: str) -> None:
        await self._having(key).resume(key)

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        return await self._having(key).exec(key, argv, stdin=stdin, env=env, timeout_s=timeout_s)

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
        return await self._having(key).terminal(key, argv, tty=tty, env=env, columns=columns, rows=rows)

    async def resize(self, key: str, limits: Limits) -> None:
        await self._having(key).resize(key, limits)

    async def stats(self, key: str) -> Stats:
        return await self._having(key).stats(key)

    async def processes(self, key: str) -> Sequence[Process]:
        return await self._having(key).processes(key)

    # --- by machine --------------------------------------------------------------------------------------------------

    async def purge(self, machine: str) -> None:
        """By every driver: a machine may have changed its runtime."""
        down = self._drivers.keys() - self._opened
        if (name := self._machines.get(machine)) in down:
            self.of(name or "")
        for name in sorted(self._opened):
            await self._drivers[name].purge(machine)
        self._machines.pop(machine, None)

    async def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        """Of the driver that runs the machine, or ran it last; where that is not known, of the first that has lines."""
        if name := self._machines.get(machine):
            lines = self.of(name).logs(machine, tail=tail, follow=follow)
            async for line in lines:
                yield line
            return
        for name in sorted(self._opened):
            told = False
            async for line in self._drivers[name].logs(machine, tail=tail):
                told = True
                yield line
            if told:
                return

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _open(self, name: str, on_exit: Callable[[Exit], None]) -> None:
        await self._drivers[name].open(on_exit)
        self._opened.add(name)
        self._problems.pop(name, None)

    async def _open_later(self, name: str, on_exit: Callable[[Exit], None]) -> None:
        driver = self._drivers[name]
        opened = False
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                if not opened:
                    await driver.open(on_exit)
                    opened = True
                await self.on_late(name, await self._recover(name))
            except Exception as error:
                self._failed(name, error)
                continue
            self._opened.add(name)
            self._problems.pop(name, None)
            self._opening.pop(name, None)
            _logger.warning("driver.opened", driver=name, cause="local rule: a driver is tried again")
            return

    def _failed(self, name: str, error: BaseException) -> None:
        why = str(error) or type(error).__name__
        if self._problems.get(name) != why and not isinstance(error, DriverOff):
            _logger.error("driver.down", driver=name, why=why, cause="it could not be opened")
        self._problems[name] = why

    async def _recover(self, name: str) -> Sequence[Instance]:
        found = await self._drivers[name].recover()
        for instance in found:
            self._remember(name, instance.key, instance.machine)
        return found

    def _remember(self, name: str, key: str, machine: str) -> None:
        self._instances[key] = name
        self._machines[machine] = name

    def _having(self, key: str) -> Driver:
        """Raises `UnknownInstance`, or `DriverDown` while a driver that may have it is not there."""
        name = self._instances.get(key)
        if name is not None:
            return self._drivers[name]
        if down := sorted(self._drivers.keys() - self._opened):
            raise DriverDown(f"the {' and '.join(down)} driver of this worker may have {key} and is not available")
        raise UnknownInstance(key)


class _Of:
    """One driver of several: what it starts and destroys is remembered by `Several`."""

    def __init__(self, several: Several, name: str, driver: Driver) -> None:
        self._several = several
        self._name = name
        self._driver = driver

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)

    async def start(self, spec: InstanceSpec) -> Instance:
        self._several._remember(self._name, spec.key, spec.machine)
        return await self._driver.start(spec)

    async def destroy(self, key: str, *, force: bool = False) -> None:
        await self._driver.destroy(key, force=force)
        self._several._instances.pop(key, None)


async def _nobody(name: str, instances: Sequence[Instance]) -> None:
    """Nobody wants to know."""


_logger = get_logger()

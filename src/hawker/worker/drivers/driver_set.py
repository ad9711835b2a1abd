"""The drivers of one worker. The set opens them and hands out the one that a machine's row names.

Callers then call that driver itself.

A driver that cannot be opened keeps none of the others from working. The set tries it again in the background and until
then knows nothing of its instances: `of` raises `DriverDown`, so that callers ask again later and no machine counts as
lost because its driver is down. When such a driver opens at last, `on_late` is told of its instances before `of` hands
the driver out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from hawker.errors import Unreachable
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import Capabilities, Exit, Fingerprint, Instance
from hawker.worker.drivers.driver import Driver

RETRY_S = 5.0

OnLate = Callable[[str, Sequence[Instance]], Awaitable[None]]


async def _nobody(name: str, instances: Sequence[Instance]) -> None:
    """Nobody wants to know."""


class DriverDown(Unreachable):
    """This driver is not there now. The programs that it runs may be running."""


class DriverOff(Unreachable):
    """The configuration does not ask for this driver."""


class DriverSet:
    """`drivers` by the runtimes that machines name. A driver may stand under several of them."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self.name = ",".join(sorted(drivers))
        self._drivers = dict(drivers)
        self._opened: set[Driver] = set()
        self._problems: dict[Driver, str] = {}  # why a driver could not be opened
        self._opening: dict[Driver, asyncio.Task[None]] = {}

    async def open(self, on_exit: Callable[[Exit], None], on_late: OnLate = _nobody) -> None:
        """Open each driver. Raises what kept them from opening only when not one of them could be opened.

        `on_late` is told the name and the instances of a driver that opens only later; the driver takes other calls
        once `on_late` has returned.
        """
        drivers = self._once(self._drivers)
        results = await asyncio.gather(*(self._open(each, on_exit) for each in drivers), return_exceptions=True)
        failed = {each: error for each, error in zip(drivers, results, strict=True) if error is not None}
        for driver, error in failed.items():
            if isinstance(error, Exception):
                self._failed(driver, drivers[driver], error)
        for error in failed.values():
            if not isinstance(error, Exception) or len(failed) == len(drivers):
                await self.close()
                raise error
        for driver in (driver for driver, error in failed.items() if not isinstance(error, DriverOff)):
            later = self._open_later(driver, drivers[driver], on_exit, on_late)
            name = f"open driver {drivers[driver]}"
            self._opening[driver] = asyncio.get_running_loop().create_task(later, name=name)

    async def close(self) -> None:
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        self._opening.clear()
        await asyncio.gather(*(driver.close() for driver in self._once(self._drivers)))
        self._opened.clear()

    async def stop_all(self, *, grace_s: float) -> None:
        await asyncio.gather(*(driver.stop_all(grace_s=grace_s) for driver in self._once(self.opened())))

    def of(self, runtime: str) -> Driver:
        """Raises `DriverDown` when the driver is not there now, or there is no such driver."""
        driver = self._drivers.get(runtime)
        if driver is None or driver not in self._opened:
            why = self._problems.get(driver) if driver else None
            raise DriverDown(
                f"the {runtime} driver of this worker is not available{f': {why}' if why else ''}",
                hint="hawker doctor tells what this host lacks",
            )
        return driver

    def opened(self) -> frozenset[str]:
        """The runtimes whose driver is there."""
        return frozenset(name for name, driver in self._drivers.items() if driver in self._opened)

    async def fingerprints(self) -> Mapping[str, Fingerprint]:
        """What each driver found on this host, by runtime, also those that are not healthy."""
        drivers = self._once(self._drivers)
        asked = await asyncio.gather(*(self._fingerprint(driver, name) for driver, name in drivers.items()))
        found = dict(zip(drivers, asked, strict=True))
        return {name: found[driver] for name, driver in self._drivers.items()}

    async def fingerprint(self) -> Fingerprint:
        """What at least one of the drivers can do, as the fingerprint of a single driver."""
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

    async def recover(self) -> Mapping[str, Sequence[Instance]]:
        """The instances of the drivers that are there, by the name of the driver that has them."""
        drivers = self._once(self.opened())
        found = await asyncio.gather(*(driver.recover() for driver in drivers))
        return dict(zip(drivers.values(), found, strict=True))

    async def purge(self, machine: str) -> None:
        """Purge the machine in every driver: it may have changed its runtime."""
        for driver in self._once(self.opened()):
            await driver.purge(machine)

    def stand_by(self, runtimes: Iterable[str]) -> None:
        """Machines with these runtimes may be started."""
        for driver in self._once(self.opened() & frozenset(runtimes)):
            if ability := driver.abilities.standing_by:
                ability.stand_by()

    def _once(self, runtimes: Iterable[str]) -> dict[Driver, str]:
        """The drivers of these runtimes, each with the first of its names."""
        drivers: dict[Driver, str] = {}
        for name in sorted(runtimes):
            drivers.setdefault(self._drivers[name], name)
        return drivers

    async def _fingerprint(self, driver: Driver, name: str) -> Fingerprint:
        """A driver that cannot even say what it can do is not healthy, and keeps none of the others from saying it."""
        problem = self._problems.get(driver, "it has not been opened")
        if driver in self._opened:
            try:
                return await driver.fingerprint()
            except Exception as error:
                problem = f"it does not say what it can: {str(error) or type(error).__name__}"
                _logger.error("driver.not_looked_at", driver=name, why=problem, cause="it was asked what it can")
        return Fingerprint(driver=name, healthy=False, problem=problem)

    async def _open(self, driver: Driver, on_exit: Callable[[Exit], None]) -> None:
        await driver.open(on_exit)
        self._opened.add(driver)

    async def _open_later(self, driver: Driver, name: str, on_exit: Callable[[Exit], None], on_late: OnLate) -> None:
        opened = False
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                if not opened:
                    await driver.open(on_exit)
                    opened = True
                await on_late(name, await driver.recover())
            except Exception as error:
                self._failed(driver, name, error)
                continue
            self._opened.add(driver)
            self._problems.pop(driver, None)
            self._opening.pop(driver, None)
            _logger.warning("driver.opened", driver=name, cause="local rule: a driver is tried again")
            return

    def _failed(self, driver: Driver, name: str, error: BaseException) -> None:
        why = str(error) or type(error).__name__
        if self._problems.get(driver) != why and not isinstance(error, DriverOff):
            _logger.error("driver.down", driver=name, why=why, cause="it could not be opened")
        self._problems[driver] = why


async def capabilities(drivers: DriverSet, runtime: str) -> Capabilities:
    """Raises `DriverDown`: nobody knows what a driver can do that is not there."""
    return (await drivers.of(runtime).fingerprint()).capabilities


_logger = get_logger()

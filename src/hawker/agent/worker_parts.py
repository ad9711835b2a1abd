"""What a worker runs machines with: its drivers, the images and the network that they share.

A driver that this host cannot run is there all the same, not healthy, and says why: `hawker doctor` and a refused order
repeat it. What is imported for containers is imported only where containers can run.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hawker.agent.settings import AgentSettings, WorkerRole
from hawker.errors import HawkerError, Invalid, Unreachable
from hawker.host import Host
from hawker.model.config import PROCESS
from hawker.network.base import NetworkError
from hawker.plugins import installed
from hawker.services import Service
from hawker.telemetry import get_logger

if TYPE_CHECKING:
    from hawker.catalog.view import View
    from hawker.images.base import ImageSource
    from hawker.network.base import HostNetwork
    from hawker.network.forward import Forwarder
    from hawker.network.manager import Manager
    from hawker.worker.drivers.base import Exit
    from hawker.worker.drivers.driver import Driver
    from hawker.worker.drivers.driver_set import DriverSet
    from hawker.worker.drivers.users import Users

GROUP = "hawker.drivers"
_UNASKED = "it runs commands on the host itself, so a worker has it only if worker.drivers names it"
_RUNTIMES = ("crun", "runc")
_VMMS = ("qemu-system-x86_64", "qemu-system-aarch64", "firecracker")


@dataclass(frozen=True)
class Site:
    """What a driver is made of. Third parties' drivers are found under the entry point group `hawker.drivers`: a
    callable that takes a `Site` and returns a driver. `directory` is the driver's own, `settings` its table of the
    configuration."""

    worker: str
    directory: Path
    settings: Mapping[str, Any]
    host: Host
    images: ImageSource | None = None
    network: HostNetwork | None = None
    cgroups: bool = True
    users: Users | None = None
    """Which users of the host the worker's machines have; None: those of this driver alone have their own."""
    programs: Path | None = None
    """Where what is compiled once is kept for all workers of the host; None: there is no such place."""


@dataclass
class WorkerParts(Service):
    """They are open when they are made. They close after the worker, which opens and closes the drivers itself."""

    drivers: DriverSet
    images: ImageSource | None = None
    network: HostNetwork | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    remove_network: Callable[[], Awaitable[None]] | None = None
    """Lets nothing of it be left on the host, once every machine has ended."""

    async def close(self) -> None:
        await self.stack.aclose()


MakeWorkerParts = Callable[[AgentSettings, WorkerRole, Host], Awaitable[WorkerParts]]


async def live_worker_parts(settings: AgentSettings, role: WorkerRole, host: Host) -> WorkerParts:
    """The real ones. Raises `Invalid` for a driver that does not exist or does not take its settings."""
    from hawker.init.place import shared
    from hawker.worker.drivers.driver_set import DriverOff, DriverSet
    from hawker.worker.drivers.users import Users

    names = _chosen(role)
    async with AsyncExitStack() as stack:
        images, network, programs, problem = None, None, shared(), ""
        users = Users(settings.directory / "users")
        if set(names) != {"process"}:
            images, problem = await _images(stack, settings, host)
        if any(name != "process" and not _lacks(name) for name in names):
            network = await _network(stack, settings, role)
        drivers: dict[str, Driver] = {}
        for name in names:
            if why := _lacks(name) or (problem if name != "process" else ""):
                drivers[name] = cast("Driver", Absent(name, why))
                continue
            site = Site(
                worker=settings.name,
                directory=settings.directory / name,
                settings=role.settings.get(name, {}),
                host=host,
                images=images,
                network=network,
                cgroups=role.cgroups,
                programs=programs,
                users=users,
            )
            drivers[name] = _make(name, site)
        if PROCESS not in names and not role.drivers:
            drivers[PROCESS] = cast("Driver", Absent(PROCESS, _UNASKED, DriverOff))
        remove = partial(_remove, network, settings.name) if network else None
        return WorkerParts(DriverSet(drivers), images, network, stack.pop_all(), remove)
    raise AssertionError("an exit stack lets nothing through")


def load(role: WorkerRole) -> None:
    """Import what a worker with these drivers imports when it starts. Raises `Invalid` for a driver that does not
    exist, and whatever else would keep the worker from starting: a driver that lacks a package does not."""
    names = [name for name in _chosen(role) if not _lacks(name)]
    for module in _MODULES if set(names) != {"process"} else ():
        import_module(module)
    for name in names:
        with suppress(ImportError):
            if name in _OURS:
                import_module(_OURS_IN[name])
            else:
                installed(GROUP, _OURS)[name].load()


def _chosen(role: WorkerRole) -> Sequence[str]:
    """The drivers that are wanted; with no word about it, those that isolate what they run and others' that are
    installed. The process driver runs any command of any user of the API on the host itself: only who says so has it.
    """
    known = [*_OURS, *installed(GROUP, _OURS)]
    for name in [*role.drivers, *role.settings]:
        if name not in known:
            raise Invalid("worker.drivers", name, f"there is no such driver; there are {', '.join(known)}")
    return role.drivers or [name for name in known if name != PROCESS or PROCESS in role.settings]


def _lacks(name: str) -> str:
    """Why a driver of ours cannot run here at all, or "". Looks at nothing but the programs it needs."""
    if name == "container" and not any(shutil.which(program) for program in _RUNTIMES):
        return f"neither {' nor '.join(_RUNTIMES)} is installed"
    if name == "microvm" and not any(shutil.which(program) for program in _VMMS):
        return f"neither {_VMMS[0]} nor {_VMMS[-1]} is installed"
    return ""


async def _images(stack: AsyncExitStack, settings: AgentSettings, host: Host) -> tuple[ImageSource | None, str]:
    from hawker.images.service import Images

    try:
        images = await Images(settings.directory / "images", settings.images, host).open()
    except (HawkerError, OSError) as error:
        _logger.error("images.not_opened", worker=settings.name, why=str(error), cause="agent start")
        return None, f"the worker's images cannot be opened: {error}"
    stack.push_async_callback(images.close)
    return images, ""


async def _network(stack: AsyncExitStack, settings: AgentSettings, role: WorkerRole) -> Manager | None:
    """Without it machines that need none still run, and the others say why they do not."""
    from hawker.network.manager import Manager

    network = Manager(str(settings.directory), role.network)
    try:
        await network.open()
    except NetworkError as error:
        _logger.warning("network.not_opened", worker=settings.name, why=str(error), cause="agent start")
        return None
    stack.push_async_callback(network.close)
    return network


async def _remove(network: Manager, worker: str) -> None:
    try:
        await network.close(remove=True)
    except NetworkError as error:
        _logger.warning("network.not_removed", worker=worker, why=str(error), cause="agent stop")


class Resolving(Service):
    """Answers machines that ask for names. Where that cannot be, they run without."""

    def __init__(self, network: HostNetwork, view: View, settings: AgentSettings, host: Host) -> None:
        self._network = network
        self._view = view
        self._settings = settings
        self._host = host
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        from hawker.network.resolver import Resolver
        from hawker.network.zone import Zone

        zone = Zone(self._view, self._settings.region)
        resolver = Resolver(self._network.own, zone.network, self._forwarder, self._host.rng)
        try:
            await resolver.open()
        except OSError as error:
            zone.close()
            name = self._settings.name
            _logger.error("resolver.not_opened", worker=name, why=str(error), cause="agent start")
            return
        self._stack.callback(zone.close)
        self._stack.push_async_callback(resolver.close)

    async def close(self) -> None:
        await self._stack.aclose()

    def _forwarder(self) -> Forwarder:
        from hawker.network.forward import Forwarder, Upstream

        role = self._settings.worker
        return Forwarder(self._host.rng, [Upstream(address) for address in (role.network.resolvers if role else [])])


def _make(name: str, site: Site) -> Driver:
    try:
        if make := _OURS.get(name):
            return make(site)
        return cast("Driver", installed(GROUP, _OURS)[name].load()(site))
    except ImportError as error:
        return cast("Driver", Absent(name, f"it cannot be loaded: {error}"))
    except TypeError as error:
        raise Invalid(
            f"worker.{name}", dict(site.settings), f"the {name} driver does not take this: {error}"
        ) from error


def process(site: Site) -> Driver:
    from hawker.worker.drivers.process import ProcessDriver

    options = {"images": site.images, "programs": site.programs, "users": site.users, **site.settings}
    return ProcessDriver(site.directory, cgroups=site.cgroups, **options)


def container(site: Site) -> Driver:
    from hawker.worker.drivers.container.driver import ContainerDriver

    assert site.images is not None
    options = {"programs": site.programs, **site.settings}
    return ContainerDriver(site.directory, site.images, site.network, users=site.users, **options)


def microvm(site: Site) -> Driver:
    from hawker.worker.drivers.microvm.driver import MicrovmDriver
    from hawker.worker.drivers.microvm.settings import Settings

    assert site.images is not None
    settings = Settings.of(site.settings, cgroups=site.cgroups)
    return MicrovmDriver(
        site.directory, site.images, site.network, site.host, settings, programs=site.programs, users=site.users
    )


_OURS: Mapping[str, Callable[[Site], Driver]] = {"process": process, "container": container, "microvm": microvm}
_OURS_IN = {
    "process": "hawker.worker.drivers.process",
    "container": "hawker.worker.drivers.container.driver",
    "microvm": "hawker.worker.drivers.microvm.driver",
}
_MODULES = (
    "hawker.images.service",
    "hawker.network.manager",
    "hawker.network.resolver",
    "hawker.network.zone",
)
"""What every driver but that for processes needs besides."""


class Absent:
    """A driver that this host cannot run, or that its worker is not to have. It does not open: whether it left machines
    running, nobody knows."""

    def __init__(self, name: str, problem: str, kind: type[Unreachable] = Unreachable) -> None:
        self.name = name
        self._problem = problem
        self._kind = kind

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        raise self._kind(self._problem)

    async def close(self) -> None:
        """There is nothing to close."""


_logger = get_logger()

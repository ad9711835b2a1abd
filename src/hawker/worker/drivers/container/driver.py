"""The container driver: machines from OCI images, run by crun or runc.

The containers belong to a supervisor of their own that outlives this daemon (`hawker.supervisor.container`). A start
makes the container, gives its network namespace an interface, and lets the program go; killed in between, nothing of it
is left. What is in the container's configuration is in `spec`, what it may do in `seccomp` and `CAPABILITIES`.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from hawker.images.base import ImageSource
from hawker.model.guest import ROOT_DISK_MIB
from hawker.model.image import Image
from hawker.network.base import HostNetwork, NetworkError
from hawker.supervisor.calls import DiscardContainer, MakeContainer, NamedFile, ReleaseContainer, RootLayer
from hawker.supervisor.making import GROUP, PLACE
from hawker.supervisor.mounts import IdMap
from hawker.supervisor.roots import can_bound
from hawker.worker.drivers.base import (
    Capabilities,
    Exit,
    Fingerprint,
    Instance,
    InstanceSpec,
    StartFailed,
    UnknownInstance,
)
from hawker.worker.drivers.container.command import Command, NoCommand, resolve
from hawker.worker.drivers.container.runtimes import Host, Runtime, configuration, look
from hawker.worker.drivers.container.spec import BadSpec, Place
from hawker.worker.drivers.container.users import UnknownUser, User, resolve_user
from hawker.worker.drivers.driver import Abilities
from hawker.worker.drivers.networks import hosts, must_publish, resolv_conf, wanted_of
from hawker.worker.drivers.supervised import Made, SupervisedDriver
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.users import COUNT, FIRST, MANY, NoUsers, Users
from hawker.worker.drivers.wire import RuntimeKilled, SupervisorLost

TRIES: Final = 3  # at making a container whose runtime was killed


class ContainerDriver(SupervisedDriver):
    """See `hawker.worker.drivers.driver.Driver`. `directory` is kept between runs.

    `runtime` is "crun", "runc", or "auto": crun where it really runs a container, else runc. `user_namespaces`
    False lets a machine's root be the host's. `root_mib` bounds what a machine writes whose configuration does not
    say; 0 does not, and no ordinary user can. Without `network` machines get no interface but their loopback.
    `programs` is where the init is kept that is compiled once, and what was found out about runtimes; workers may
    share it. `users` are those of the host that the worker's machines have, whatever driver runs them.
    """

    name = "container"

    def __init__(
        self,
        directory: Path,
        images: ImageSource,
        network: HostNetwork | None = None,
        *,
        runtime: str = "auto",
        user_namespaces: bool = True,
        root_mib: int = ROOT_DISK_MIB,
        programs: Path | str | None = None,
        users: Users | None = None,
    ) -> None:
        options = ["--mounts", *([] if os.geteuid() == 0 else ["--own-users"])]
        super().__init__(Supervisor(directory, *options))
        self.abilities = Abilities(suspending=self, resizing=self, terminals=self, standing_by=self)
        self._probing = Supervisor(directory / "probe", *options)
        self._images = images
        self._network = network if os.geteuid() == 0 else None  # an ordinary user may not make interfaces
        self._wanted_runtime = runtime
        self._wants_ids = user_namespaces
        self._root_mib = root_mib if can_bound() else 0
        self._programs = Path(programs or directory / "programs")
        self._users = users or Users(directory / "users")
        self._users.hold(self._may_own)
        self._host: Host | None = None
        self._looking = asyncio.Lock()
        self._connected: dict[str, str] = {}  # machines whose network was made, or begun, for an instance, by its key

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        self._host = None  # something may have been installed
        if os.geteuid() == 0:
            there = _names(self.supervisor.directory / "roots")
            self._users.keep({machine: users_of_before(machine) for machine in there})
        await super().open(on_exit)

    async def fingerprint(self) -> Fingerprint:
        host = await self._looked()
        if host.runtime is None:
            return Fingerprint(driver=self.name, healthy=False, problem=host.problem)
        return Fingerprint(
            driver=self.name,
            healthy=True,
            capabilities=Capabilities(
                suspend=True,
                exec=True,
                limits=bool(host.cgroups),
                images=True,
                terminal=True,
                resize=bool(host.cgroups),
                network=self._network is not None,
            ),
            attributes={
                "runtime": host.runtime.name,
                "cgroups": host.cgroups or "none",
                "user namespaces": "yes" if host.runtime.ids or os.geteuid() != 0 else "no",
            },
        )

    async def prepare(self, image: str) -> None:
        await self._images.ensure(image)

    async def start(self, spec: InstanceSpec) -> Instance:
        async with self.alone(spec.key):
            return await self._start(spec)

    async def destroy(self, key: str, *, force: bool = False) -> None:
        try:
            instance = await self.inspect(key) if not self.supervisor.unused else None
        except UnknownInstance:
            instance = None
        await super().destroy(key, force=force)
        machine = instance.machine if instance else self._connected.get(key)  # else an earlier try has failed since
        if machine and self._network:
            self._connected[key] = machine
            await self._network.detach(machine)
        self._connected.pop(key, None)

    async def purge(self, machine: str) -> None:
        await super().purge(machine)
        if os.geteuid() == 0:
            self._users.release(machine)

    def _may_own(self, machine: str) -> bool:
        """Whether files of a machine may be left, perhaps on their way to be removed."""
        return (self.supervisor.directory / "roots" / machine).exists() or bool(
            _names(self.supervisor.directory / "trash")
        )

    # --- starting ----------------------------------------------------------------------------------------------------

    async def _start(self, spec: InstanceSpec) -> Instance:
        if not self.supervisor.unused:
            try:
                instance = await self.inspect(spec.key)
            except UnknownInstance:
                pass
            else:  # the daemon that started it was killed before it had noted that
                await self._attach_running(spec, instance)
                return instance
        host = await self._looked()
        if host.runtime is None:
            raise StartFailed(host.problem)
        image = await self._images.ensure(spec.image)
        request = self._container_of(spec, image, host, host.runtime)
        killed = False
        for attempt in range(1, TRIES + 1):
            try:
                return await self._make_and_release(spec, request)
            except RuntimeKilled as error:
                killed = True
                if attempt == TRIES:
                    raise StartFailed(str(error)) from error
            except StartFailed:  # what a killed runtime was about may get in the way of the next
                if not killed or attempt == TRIES:
                    raise
            except (SupervisorLost, UnknownInstance):
                if attempt == TRIES:
                    raise
        raise AssertionError

    async def _make_and_release(self, spec: InstanceSpec, request: MakeContainer) -> Instance:
        try:
            made = await self.supervisor.call(request, Made, once=True)
        except asyncio.CancelledError:  # the supervisor would make it all the same, and let it wait
            await asyncio.shield(self._give_up(spec))
            raise
        if made.instance:  # it was released before its supervisor was lost
            await self._attach_running(spec, made.instance)
            return made.instance
        try:
            await self._attach(spec, made.pid)
            return await self.supervisor.call(ReleaseContainer(key=spec.key), Instance, once=True)
        except BaseException as error:
            was_there = await asyncio.shield(self._give_up(spec))
            if isinstance(error, NetworkError):
                if not was_there:  # that is why
                    raise SupervisorLost() from error
                raise StartFailed(f"the machine's network: {error}") from error
            raise

    async def _attach_running(self, spec: InstanceSpec, instance: Instance) -> None:
        if instance.exit is None and instance.pid:
            await self._attach(spec, instance.pid)

    async def _attach(self, spec: InstanceSpec, pid: int) -> None:
        if self._network and (wanted := wanted_of(spec)):
            self._connected[spec.key] = spec.machine
            await self._network.attach_namespace(wanted, pid)

    async def _give_up(self, spec: InstanceSpec) -> bool:
        """Remove what was made. False when it was gone already, perhaps with its supervisor."""
        was_there = False
        try:
            with suppress(UnknownInstance, SupervisorLost):
                await self.supervisor.call(DiscardContainer(key=spec.key), once=True)
                was_there = True
        finally:
            if self._network and spec.network:
                await self._network.detach(spec.machine)
                self._connected.pop(spec.key, None)
        return was_there

    def _container_of(self, spec: InstanceSpec, image: Image, host: Host, runtime: Runtime) -> MakeContainer:
        """What the supervisor is asked to make."""
        if spec.root.size_mib and os.geteuid() != 0:
            raise StartFailed(
                "rootfs.size_gb: only a worker that runs as root can bound the size of a root file system"
            )
        must_publish(spec, self._network)
        layers = self._images.layers(image)
        try:
            ids = IdMap(self._users.of(spec.machine)) if runtime.ids else None
        except NoUsers as error:
            raise StartFailed(str(error)) from error
        files = self._files(spec)
        try:
            user = resolve_user(layers, spec.user or image.config.user)
            command = resolve(spec, image.config, home=user.home)
            config = self._config(spec, command, user, list(files), host, runtime, ids)
        except (UnknownUser, NoCommand, BadSpec) as error:
            raise StartFailed(str(error)) from error
        outside = ids.outside if ids else int
        return MakeContainer(
            key=spec.key,
            machine=spec.machine,
            runtime=runtime.path,
            init=host.init,
            config=msgspec.json.encode(config).decode(),
            layers=[str(path) for path in layers],
            root=RootLayer(persist=spec.root.persist, size_mib=spec.root.size_mib or self._root_mib),
            ids=ids.base if ids else None,
            mounts=[(source, False) for source in sources(spec)],  # the configuration says which are read-only
            files=[
                NamedFile(name=str(number), content=base64.b64encode(content).decode(), mode=mode, owner=outside(0))
                for number, (content, mode) in enumerate(files.values())
            ],
            owner=outside(user.uid),
            limits=spec.limits,
            note=spec.note,
        )

    def _config(
        self,
        spec: InstanceSpec,
        command: Command,
        user: User,
        files: Sequence[str],
        host: Host,
        runtime: Runtime,
        ids: IdMap | None,
    ) -> dict[str, Any]:
        place = Place(
            rootfs=f"{PLACE}/rootfs",
            init=f"{PLACE}/init" if ids else host.init,
            cgroup=GROUP,
            files={path: f"{PLACE}/files/{number}" for number, path in enumerate(files)},
            mounts={source: f"{PLACE}/mount-{number}" for number, source in enumerate(sources(spec))},
        )
        return configuration(host, runtime, spec, command, user, place, ids)

    def _files(self, spec: InstanceSpec) -> dict[str, tuple[bytes, int]]:
        """Content and mode by path inside."""
        name = spec.hostname or spec.machine
        address = spec.network.address if spec.network else ""
        files = {
            "/etc/hostname": (f"{name}\n".encode(), 0o644),
            "/etc/hosts": (hosts(name, address).encode(), 0o644),
        }
        resolver = ""
        if self._network and (wanted := wanted_of(spec)):
            resolver = self._network.plan(wanted).resolver
        if spec.dns.nameservers or resolver:  # else the image's own is left
            files["/etc/resolv.conf"] = (resolv_conf(spec.dns, resolver).encode(), 0o644)
        return files | {file.path: (file.content, file.mode) for file in spec.files}

    async def _looked(self) -> Host:
        async with self._looking:
            if self._host is None or _cleared(self._host):
                self._host = await look(
                    self._probing, self._wanted_runtime, self._programs, user_namespaces=self._wants_ids
                )
            return self._host


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _cleared(host: Host) -> bool:
    """Whether what was compiled has been removed: a cache may be, at any time."""
    return bool(host.init) and not os.path.exists(host.init)


def users_of_before(machine: str) -> int:
    """The first of the users of a machine that was made before they were noted. Two machines might have got the same
    users."""
    number = int.from_bytes(blake2b(machine.encode(), digest_size=8).digest(), "big") % MANY
    return FIRST + number * COUNT


def sources(spec: InstanceSpec) -> list[str]:
    """Name each source once: a volume may be mounted at several places."""
    return list(dict.fromkeys(mount.source for mount in spec.mounts))

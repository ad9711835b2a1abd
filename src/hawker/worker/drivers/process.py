"""The process driver: runs programs of the host itself, anywhere, as any user; and, as root, those of an image, from
its tree. When root runs them, each machine has users of its own: one for programs of the host, as many as an image
needs for those of an image. There is no other isolation.

The programs belong to a supervisor, one process per worker that outlives this daemon; see
`hawker.worker.drivers.supervisor` and, for images, `hawker.supervisor.tree`.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from hawker.errors import Unreachable
from hawker.images.base import ImageSource
from hawker.init.build import NoCompiler, program
from hawker.model.image import Image
from hawker.network.holders import holder, is_free
from hawker.supervisor import cgroups as groups
from hawker.supervisor.calls import (
    DiscardContainer,
    FileAt,
    MakeTree,
    ReleaseContainer,
    RootLayer,
    Start,
    TmpfsAt,
)
from hawker.supervisor.mounts import IdMap
from hawker.supervisor.programs import CannotStart, which
from hawker.worker.drivers.base import (
    Capabilities,
    Exit,
    File,
    Fingerprint,
    Instance,
    InstanceSpec,
    StartFailed,
    UnknownInstance,
)
from hawker.worker.drivers.container.command import NoCommand, resolve, terminal_options
from hawker.worker.drivers.container.users import UnknownUser, User, resolve_user
from hawker.worker.drivers.driver import Abilities, StartRelease
from hawker.worker.drivers.supervised import Made, SupervisedDriver
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.users import NoUsers, Users
from hawker.worker.drivers.wire import SupervisorLost

HOST: Final = "host"
"""The image of programs that are the host's own."""
OF_THE_HOST: Final = "programs of the host"
"""Stands for a machine in the list of users: all machines of the image `host` share out its users, one each
(`supervisor.users`)."""
_TRIES: Final = 3
PRESPAWNED_MAX: Final = 1024


class ProcessDriver(SupervisedDriver):
    """See `hawker.worker.drivers.driver.Driver`. `directory` is kept between runs; `cgroups` False does without them.

    `images` are those that programs may be run from. `programs` is where the init is kept that is compiled once.
    `users` are those of the host that the worker's machines have, whatever driver runs them.
    """

    name = "process"

    def __init__(
        self,
        directory: Path,
        *,
        cgroups: bool = True,
        images: ImageSource | None = None,
        programs: Path | None = None,
        users: Users | None = None,
        own_users: bool = True,
    ) -> None:
        """`own_users` False: programs of the host run as the worker's own user, be it root."""
        root = os.geteuid() == 0
        self._own_users = root and own_users
        self._mounts = images is not None and root
        options = ["--mounts"] * self._mounts + ["--user-each"] * root + ["--no-cgroups"] * (not cgroups)
        super().__init__(Supervisor(directory, *options))
        self.abilities = Abilities(suspending=self, resizing=self, terminals=self, prespawning=self, standing_by=self)
        self._users = (users or Users(directory / "users")) if root else None
        if self._users:
            self._users.hold(self._may_own)
        self._kind = groups.usable() if cgroups else ""
        self._images = images
        self._programs = programs or directory / "programs"
        self._shared = programs
        self._finding: asyncio.Task[None] | None = None
        self._released: set[str] = set()  # keys whose start has still to be asked for
        self._prespawned: dict[str, tuple[InstanceSpec, Start]] = {}  # by key

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        if self._shared is not None:
            self._finding = asyncio.get_running_loop().create_task(
                self._find_standby(self._shared), name="find standby"
            )
        await super().open(on_exit)

    async def close(self) -> None:
        if self._finding is not None:
            await self._finding
        await super().close()

    async def _find_standby(self, programs: Path) -> None:
        """Find the program of standby processes. Without a compiler there is none, and programs start a little
        later."""
        with suppress(NoCompiler, OSError):
            self.supervisor.keep_standby(str(await asyncio.to_thread(program, "standby", programs)))

    async def fingerprint(self) -> Fingerprint:
        limited = bool(self._kind)
        return Fingerprint(
            driver=self.name,
            healthy=True,
            capabilities=Capabilities(
                suspend=True, exec=True, limits=limited, images=self._mounts, terminal=True, resize=limited
            ),
            attributes={
                "cgroups": self._kind or "none: limits of cpu and memory are counted, not enforced",
                "user": "one for each machine" if self._own_users else "the agent's own",
            },
        )

    async def prepare(self, image: str) -> None:
        """An image is fetched and unpacked; programs of the host need nothing."""
        if image != HOST:
            await self._sources(image).ensure(image)

    async def start(self, spec: InstanceSpec) -> Instance:
        if spec.key in self._released:
            self._released.discard(spec.key)  # its ports were free, and are its own by now
        else:
            await self._refuse_held(spec)
        if spec.image != HOST:
            async with self.alone(spec.key):
                return await self._start_from_image(spec)
        before, request = self._prespawned.pop(spec.key, (None, None))
        if request is None or before != spec:
            argv, env = await self._with_terminal(spec) if spec.tty else (spec.argv, spec.env)
            request = self._start_of(spec, argv, env)
        return await self.supervisor.call(request, Instance)

    def prespawn(self, spec: InstanceSpec) -> bool:
        """Have the supervisor make the process, which takes longest of a start."""
        if spec.image != HOST or spec.tty:
            return False
        try:
            request = self._start_of(spec, spec.argv, spec.env)
        except (StartFailed, OSError, Unreachable):  # the start meets the same, and tells
            return False
        if not self.supervisor.prespawn(request):
            return False
        if len(self._prespawned) >= PRESPAWNED_MAX:
            self._prespawned.clear()  # their starts did not come
        self._prespawned[spec.key] = spec, request
        return True

    def release_start(self, spec: InstanceSpec) -> StartRelease:
        if not all(is_free(port.protocol, port.host_port) for port in spec.listens):
            return "no"
        self._released.add(spec.key)
        return "now" if self.supervisor.release_start(spec.key) else "soon"  # the supervisor is not so far yet

    async def destroy(self, key: str, *, force: bool = False) -> None:
        self._released.discard(key)
        self._prespawned.pop(key, None)
        await super().destroy(key, force=force)

    async def purge(self, machine: str) -> None:
        await super().purge(machine)
        if self._users:
            self._users.release(machine)

    def _may_own(self, machine: str) -> bool:
        """Whether files of a machine of an image may be left, perhaps on their way to be removed."""
        places = (self.supervisor.directory / "roots" / machine, self.supervisor.directory / "trash")
        return any(place.is_dir() and any(place.iterdir()) for place in places)

    def _start_of(self, spec: InstanceSpec, argv: Sequence[str], env: Mapping[str, str]) -> Start:
        """The start of a program of the host."""
        return Start(
            key=spec.key,
            machine=spec.machine,
            argv=argv,
            env=env,
            limits=spec.limits,
            users=self._first_user(OF_THE_HOST) if self._own_users else None,
            status=spec.tty,
            note=spec.note,
        )

    def _first_user(self, machine: str) -> int | None:
        try:
            return self._users.of(machine) if self._users else None
        except NoUsers as error:
            raise StartFailed(str(error)) from error

    async def _refuse_held(self, spec: InstanceSpec) -> None:
        """Refuse a machine whose port another program has: that program would get its requests and answer its checks.
        The program may be the machine's own, when its start is repeated."""
        for port in spec.listens:
            if is_free(port.protocol, port.host_port):
                continue
            if not self.supervisor.unused:
                with suppress(UnknownInstance):
                    await self.inspect(spec.key)
                    return
            if held := await asyncio.to_thread(holder, port.protocol, port.host_port):
                raise StartFailed(f"services: {held}; stop that, or give the machine another port")

    async def _with_terminal(self, spec: InstanceSpec) -> tuple[list[str], dict[str, str]]:
        """Start the program by way of the init, which holds the terminal: if the supervisor held it, the terminal would
        be lost with the supervisor."""
        try:
            init = await asyncio.to_thread(program, "container", self._programs)
            which(spec.argv[0], spec.env.get("PATH", os.defpath))  # else it would be started, and end at once
        except (NoCompiler, CannotStart) as error:
            raise StartFailed(str(error)) from error
        options = ["--status-fd", "{status}", *(["--user", "{user}:{user}"] if self._own_users else [])]
        options += terminal_options(spec)
        return [str(init), *options, "--", *spec.argv], {"TERM": "xterm", **spec.env}

    # --- from an image -----------------------------------------------------------------------------------------------

    async def _start_from_image(self, spec: InstanceSpec) -> Instance:
        with suppress(UnknownInstance):
            if not self.supervisor.unused:
                return await self.inspect(spec.key)
        images = self._sources(spec.image)
        image = await images.ensure(spec.image)
        try:
            init = await asyncio.to_thread(program, "container", self._programs)
            request = tree_of(spec, image, images.layers(image), init, IdMap(self._first_user(spec.machine) or 0))
        except (NoCompiler, NoCommand, UnknownUser) as error:
            raise StartFailed(str(error)) from error
        for attempt in range(1, _TRIES + 1):
            try:
                made = await self.supervisor.call(request, Made, once=True)
                return made.instance or await self._release_made(spec.key)
            except (SupervisorLost, UnknownInstance):
                if attempt == _TRIES:
                    raise
        raise AssertionError

    async def _release_made(self, key: str) -> Instance:
        try:
            return await self.supervisor.call(ReleaseContainer(key=key), Instance, once=True)
        except asyncio.CancelledError:
            with suppress(UnknownInstance, SupervisorLost):
                await asyncio.shield(self.supervisor.call(DiscardContainer(key=key), once=True))
            raise

    def _sources(self, image: str) -> ImageSource:
        if self._images is None or not self._mounts:
            why = "it has no images" if self._images is None else "running an image's program takes root"
            raise StartFailed(f"{image}: this worker runs only the host's own programs as plain processes: {why}")
        return self._images


def tree_of(spec: InstanceSpec, image: Image, layers: Sequence[Path], init: Path, ids: IdMap) -> MakeTree:
    """What the supervisor is asked to make of an image. Raises `NoCommand`, `UnknownUser`."""
    user: User = resolve_user(layers, spec.user or image.config.user)
    command = resolve(spec, image.config, home=user.home)
    groups = ",".join(str(number) for number in (user.gid, *user.groups))
    try:
        owner, *_ = map(ids.outside, (user.uid, user.gid, *user.groups))
    except ValueError as error:
        raise UnknownUser(f"user {spec.user or image.config.user!r}: {error}") from error
    return MakeTree(
        key=spec.key,
        machine=spec.machine,
        init=str(init),
        options=terminal_options(spec),
        argv=command.argv,
        env=command.env,
        cwd=command.cwd,
        user=f"{user.uid}:{groups}",
        owner=owner,
        layers=[str(path) for path in layers],
        root=RootLayer(persist=spec.root.persist, size_mib=spec.root.size_mib),
        read_only=spec.root.read_only,
        users=ids.base,
        mounts=spec.mounts,
        tmpfs=[TmpfsAt(path=tmpfs.path, size_mib=tmpfs.size_mib) for tmpfs in spec.tmpfs],
        files=[
            FileAt(path=file.path, content=base64.b64encode(file.content).decode(), mode=file.mode)
            for file in (*_resolver(), *spec.files)
        ],
        limits=spec.limits,
        note=spec.note,
    )


def _resolver() -> list[File]:
    """The host's own: its network is the program's."""
    with suppress(OSError):
        return [File(path="/etc/resolv.conf", content=Path("/etc/resolv.conf").read_bytes())]
    return []

"""Which container runtime this host has, found out by running a container with it.

What a kernel, its control groups and a runtime can do together is not to be read off their versions: crun 1.8 refuses
hosts with both versions of control groups, user namespaces may be switched off, idmapped mounts not be there. So an
empty container is run in each way, the best first, and the first that works is taken until the next boot.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from hawker.init.build import NoCompiler, program
from hawker.model.image import ImageConfig
from hawker.supervisor import cgroups, ordinary
from hawker.supervisor.calls import Destroy, MakeContainer, Purge, ReleaseContainer, RootLayer
from hawker.supervisor.making import GO_FD, GROUP, PLACE
from hawker.supervisor.mounts import IdMap
from hawker.worker.drivers.base import Instance, InstanceSpec, Limits, StartFailed
from hawker.worker.drivers.container.command import Command, resolve, terminal_options
from hawker.worker.drivers.container.spec import INIT, Place, runtime_spec
from hawker.worker.drivers.container.users import User
from hawker.worker.drivers.supervised import Made
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.wire import RuntimeKilled

Name = Literal["crun", "runc"]
NAMES: Final[tuple[Name, ...]] = ("crun", "runc")
PROBE: Final = "probe"
TRYING_S: Final = 0.05  # between two looks whether another worker has found it out
_PROBE_IDS: Final = 1 << 20


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """`ids`: in user namespaces."""

    name: Name
    path: str
    ids: bool


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What this host has for containers. `runtime` None: they cannot be run, `problem` says why and what helps. `init`
    is the path of the program that is process 1, `swap` whether the kernel can limit it."""

    runtime: Runtime | None = None
    problem: str = ""
    init: str = ""
    cgroups: Literal["v1", "v2", ""] = ""
    swap: bool = True


def configuration(
    host: Host, runtime: Runtime, spec: InstanceSpec, command: Command, user: User, place: Place, ids: IdMap | None
) -> dict[str, Any]:
    """The OCI configuration of a container that this runtime makes on this host, and that waits to be released. Raises
    `BadSpec`."""
    config = runtime_spec(
        spec,
        command,
        user,
        place,
        ids=ids,
        hard_limits={"RLIMIT_NOFILE": resource.getrlimit(resource.RLIMIT_NOFILE)[1]},
        runtime=runtime.name,
        cgroups=host.cgroups,
        architecture=os.uname().machine,
        swap=host.swap,
    )
    config["process"]["args"][1:1] = ["--go-fd", str(GO_FD), *terminal_options(spec)]
    return config


async def look(supervisor: Supervisor, wanted: str, programs: Path, *, user_namespaces: bool) -> Host:
    """`wanted`: a runtime's name, or "auto". `programs`: where compiled ones are kept, and what was found out, for all
    that have this directory. `supervisor` is only to try with: it is ended, and its directory removed."""
    if wanted not in (*NAMES, "auto"):
        return Host(problem=f"runtime {wanted!r}: must be auto, {' or '.join(NAMES)}")
    kind: Literal["v1", "v2", ""] = ""
    names: Sequence[Name] = NAMES if wanted == "auto" else [name for name in NAMES if name == wanted]
    if os.geteuid() != 0:
        if without := ordinary.missing():
            return Host(problem=f"an ordinary user's containers need a user namespace: {without}")
        if "crun" not in names:
            return Host(problem="an ordinary user's containers need crun: runc makes none without control groups")
        names, user_namespaces = ("crun",), False  # for they are in the supervisor's
    elif not (kind := cgroups.usable()):
        return Host(problem="control groups for memory, cpu and processes are not there, or may not be written to")
    found = {name: path for name in names if (path := shutil.which(name))}
    if not found:
        return Host(problem=f"no container runtime: apt install {' or '.join(names)}")
    if os.geteuid() == 0 and not shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin:/bin"):
        return Host(problem="root file systems of bounded size need mke2fs: apt install e2fsprogs")
    try:
        init = await asyncio.to_thread(program, "container", programs)
    except NoCompiler as error:
        return Host(problem=str(error))
    host = Host(init=str(init), cgroups=kind, swap=_counts_swap(kind))
    found_out = programs / f"runtime-{_conditions(host, found, supervisor.directory.parent, user_namespaces)}.json"
    if not (runtime := _noted(found_out)):
        async with _alone(programs):  # workers that start together let one try
            if not (runtime := _noted(found_out)):
                try:
                    await supervisor.open(lambda ended: None)
                    return await _find(supervisor, host, found, found_out, user_namespaces=user_namespaces)
                finally:
                    await asyncio.shield(_end(supervisor))
    if supervisor.directory.exists():
        await _end(supervisor)  # of a daemon that was killed
    return msgspec.structs.replace(host, runtime=runtime)


async def _find(
    supervisor: Supervisor, host: Host, found: Mapping[Name, str], found_out: Path, *, user_namespaces: bool
) -> Host:
    problems = []
    for name, path in found.items():
        for ids in (True, False) if user_namespaces else (False,):
            runtime = Runtime(name=name, path=path, ids=ids)
            problem = await _try(supervisor, host, runtime)
            if not problem:
                with suppress(OSError):  # then it is found out again
                    _note(found_out, runtime)
                return msgspec.structs.replace(host, runtime=runtime)
            problems.append(f"{name}{' in a user namespace' if ids else ''}: {problem}")
    return msgspec.structs.replace(host, problem="no container can be run here: " + "; ".join(problems))


async def _try(supervisor: Supervisor, host: Host, runtime: Runtime) -> str:
    """Run a container of nothing but our init. Gives what kept it from running."""
    key = f"{PROBE}/{runtime.name}{'-ids' if runtime.ids else ''}"
    ids = IdMap(_PROBE_IDS) if runtime.ids else None
    limits = Limits(cpu_millis=1000, memory_mib=64)
    spec = InstanceSpec(key=key, machine=PROBE, image="", argv=[INIT, "--", INIT], env={}, limits=limits)
    place = Place(rootfs=f"{PLACE}/rootfs", init=f"{PLACE}/init" if ids else host.init, cgroup=GROUP)
    config = configuration(host, runtime, spec, resolve(spec, ImageConfig()), User(), place, ids)
    tree = supervisor.directory.absolute() / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    request = MakeContainer(
        key=key,
        machine=PROBE,
        runtime=runtime.path,
        init=host.init,
        config=msgspec.json.encode(config).decode(),
        layers=[str(tree)],  # to see that one can be shown with other owners
        root=RootLayer(),
        ids=ids.base if ids else None,
        mounts=[],
        files=[],
        owner=ids.base if ids else 0,
        limits=limits,
    )
    await supervisor.call(Destroy(key=key, force=True))  # one that a killed daemon left
    try:
        await supervisor.call(request, Made, once=True)
        await supervisor.call(ReleaseContainer(key=key), Instance, once=True)
    except (StartFailed, RuntimeKilled) as error:
        return str(error)
    await supervisor.call(Destroy(key=key, force=True))
    await supervisor.call(Purge(machine=PROBE))
    return ""


async def _end(supervisor: Supervisor) -> None:
    """End the supervisor that was only used for the trial: it would keep twenty megabytes."""
    await supervisor.open(lambda ended: None)
    await supervisor.shut_down(grace_s=0)
    await supervisor.close()
    await asyncio.to_thread(shutil.rmtree, supervisor.directory, ignore_errors=True)


@asynccontextmanager
async def _alone(programs: Path) -> AsyncIterator[None]:
    """Hold the lock of `hawker.init.place.alone` without blocking the event loop."""
    held = os.open(programs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(TRYING_S)
        yield
    finally:
        os.close(held)


def _noted(found_out: Path) -> Runtime | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(found_out.read_bytes(), type=Runtime)
    return None


def _conditions(host: Host, found: Mapping[Name, str], directory: Path, user_namespaces: bool) -> str:
    """A digest of everything that the answer depends on: this boot, this user, our namespaces, the file system, these
    programs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    where = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("user", "mnt", "pid", "cgroup")]
    directory.mkdir(parents=True, exist_ok=True)
    system = f"{os.uname().release} {host.cgroups} {host.swap} {os.stat(directory).st_dev}"
    us = f"{os.geteuid()} {where} {host.init}"
    programs = [f"{path} {os.stat(path).st_mtime_ns} {os.stat(path).st_size}" for path in found.values()]
    return blake2b("\n".join([boot, system, us, *programs, str(user_namespaces)]).encode(), digest_size=8).hexdigest()


def _note(path: Path, runtime: Runtime) -> None:
    for old in path.parent.glob("runtime-*.json"):
        if old.stat().st_mtime < Path("/proc/1").stat().st_mtime:
            old.unlink(missing_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(msgspec.json.encode(runtime))
    new.rename(path)


def _counts_swap(kind: str) -> bool:
    return kind != "v1" or Path("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists()

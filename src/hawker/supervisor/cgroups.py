"""Control groups, version 1 and 2, behind one small interface: limits, counting, freezing and killing of whole trees.

A process is put into its group without a race: the supervisor has a single thread, so it moves itself into the group,
spawns, and moves itself back; the child is born inside. That costs 0.08 ms where a fork in Python costs 1.4 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """An instance's limits; see `hawker.worker.drivers.base.Limits`."""

    cpu_millis: int
    memory_mib: int
    dedicated: bool
    pids: int


class CannotResize(Exception):
    """The limits cannot be changed to these now; the text says why."""


class Groups(Protocol):
    """The groups of one supervisor, one for each instance, named by it."""

    kind: str

    def create(self, name: str, limits: Limits) -> None: ...

    def entered(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The supervisor itself inside the group: what it spawns meanwhile is born there."""

    def attach(self, name: str, pid: int) -> None:
        """Put a process that runs already into the group."""

    def names(self) -> list[str]:
        """All groups that are there."""

    def pids(self, name: str) -> list[int]: ...

    def kill(self, name: str) -> bool:
        """Kill everything inside, also what forks meanwhile. True once nothing is left; call again until then."""

    def freeze(self, name: str, frozen: bool) -> None: ...

    def resize(self, name: str, limits: Limits) -> None:
        """Raises `CannotResize`, and then nothing was changed."""

    def oom_kills(self, name: str) -> int: ...

    def usage(self, name: str) -> tuple[float, int]:
        """Cpu seconds and bytes of memory."""

    def remove(self, name: str) -> None: ...

    def close(self) -> None:
        """Remove the parent group, if nothing is left in it."""


def find(prefix: str, root: Path = ROOT) -> Groups | None:
    """The groups that can be used here, None without the rights or the controllers."""
    for make in (V2, V1):
        with contextlib.suppress(OSError, LookupError):
            return make(root, prefix)
    return None


def usable(root: Path = ROOT) -> Literal["v1", "v2", ""]:
    """Which version `find` would take, "" for none. Changes nothing."""
    if (root / "cgroup.controllers").exists():
        there = {"cpu", "memory", "pids"} <= set((root / "cgroup.controllers").read_text().split())
        return "v2" if there and os.access(root / "cgroup.subtree_control", os.W_OK) else ""
    return "v1" if all(os.access(root / name / "cgroup.procs", os.W_OK) for name in V1.NEEDED) else ""


class V1:
    """Version 1: a hierarchy for each controller. memory, cpu, pids and freezer must be there; cpuacct counts cpu
    time."""

    kind = "v1"
    NEEDED = ("memory", "cpu", "pids", "freezer")

    def __init__(self, root: Path, prefix: str) -> None:
        self._parents: dict[str, str] = {}
        self._home: dict[str, str] = {}
        own = _own_groups()
        for name in (*self.NEEDED, "cpuacct"):
            if not (root / name / "cgroup.procs").exists():
                raise LookupError(name)
            self._parents[name] = f"{root}/{name}/{prefix}"
            self._home[name] = f"{root}/{name}{own.get(name, '/').rstrip('/')}"
        # A container runtime makes groups in all hierarchies.
        others = [name for name in os.listdir(root) if name not in self._parents]
        self._others = [f"{root}/{name}/{prefix}" for name in others if os.path.exists(f"{root}/{name}/cgroup.procs")]
        for parent in self._parents.values():
            os.makedirs(parent, exist_ok=True)

    def create(self, name: str, limits: Limits) -> None:
        for parent in self._parents.values():
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{parent}/{name}")
        self._limit_memory(name, limits.memory_mib << 20)
        self._limit_others(name, limits, quota=limits.dedicated)

    def resize(self, name: str, limits: Limits) -> None:
        wanted = limits.memory_mib << 20
        group = f"{self._parents['memory']}/{name}"
        _check_use(limits, self.usage(name)[1], _read(f"{group}/memory.stat"))
        before = int(_read(f"{group}/memory.limit_in_bytes") or 0)
        try:
            self._limit_memory(name, wanted, grow=wanted >= before)
        except OSError as error:  # EBUSY: so much could not be freed
            with contextlib.suppress(OSError):
                self._limit_memory(name, before)
            raise CannotResize(f"memory cannot be limited to {limits.memory_mib} MiB: {error.strerror}") from error
        self._limit_others(name, limits)

    def _limit_memory(self, name: str, wanted: int, *, grow: bool = False) -> None:
        """The limit of memory and swap together may never be below that of memory."""
        group = f"{self._parents['memory']}/{name}"
        files = [f"{group}/memory.limit_in_bytes", f"{group}/memory.memsw.limit_in_bytes"]
        if not os.path.exists(files[1]):  # without swap accounting
            files.pop()
        for file in reversed(files) if grow else files:
            _write(file, wanted)

    def _limit_others(self, name: str, limits: Limits, *, quota: bool = True) -> None:
        cpu = f"{self._parents['cpu']}/{name}"
        _write(f"{cpu}/cpu.shares", max(2, limits.cpu_millis * 1024 // 1000))
        if quota:
            part = limits.cpu_millis * 100 if limits.dedicated else -1  # of the period, 100 ms
            _write(f"{cpu}/cpu.cfs_quota_us", part)
        _write(f"{self._parents['pids']}/{name}/pids.max", limits.pids)

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        # "0" into `tasks`, a thread moving itself, is the one move for which the kernel takes no lock over all
        # processes; through `cgroup.procs` each move waits for an RCU grace period, 1.5 ms and more on a quiet
        # machine.
        try:
            for parent in self._parents.values():
                _write(f"{parent}/{name}/tasks", 0)
            yield
        finally:
            for home in self._home.values():
                _write(f"{home}/tasks", 0)

    def attach(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            for parent in self._parents.values():
                _write(f"{parent}/{name}/cgroup.procs", pid)

    def names(self) -> list[str]:
        return sorted({name for parent in self._parents.values() for name in _directories(parent)})

    def pids(self, name: str) -> list[int]:
        return _pids(f"{self._parents['freezer']}/{name}/cgroup.procs")

    def kill(self, name: str) -> bool:
        pids = self.pids(name)
        if not pids:
            return True
        self.freeze(name, True)  # so that nothing forks between reading and killing
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.freeze(name, False)
        return False

    def freeze(self, name: str, frozen: bool) -> None:
        _write(f"{self._parents['freezer']}/{name}/freezer.state", "FROZEN" if frozen else "THAWED")

    def oom_kills(self, name: str) -> int:
        return _field(_read(f"{self._parents['memory']}/{name}/memory.oom_control"), "oom_kill")

    def usage(self, name: str) -> tuple[float, int]:
        cpu = int(_read(f"{self._parents['cpuacct']}/{name}/cpuacct.usage") or 0) / 1e9
        return cpu, int(_read(f"{self._parents['memory']}/{name}/memory.usage_in_bytes") or 0)

    def remove(self, name: str) -> None:
        for parent in (*self._parents.values(), *self._others):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{parent}/{name}")

    def close(self) -> None:
        for parent in (*self._parents.values(), *self._others):
            with contextlib.suppress(OSError):
                os.rmdir(parent)


class V2:
    """Version 2: one hierarchy. The parent's controllers are switched on for its children."""

    kind = "v2"

    def __init__(self, root: Path, prefix: str) -> None:
        controllers = (root / "cgroup.controllers").read_text().split()
        if not {"cpu", "memory", "pids"} <= set(controllers):
            raise LookupError("cpu, memory and pids are not all there")
        self._parent = f"{root}/{prefix}"
        self._home = f"{root}{_own_groups().get('', '/').rstrip('/')}"
        _write(f"{root}/cgroup.subtree_control", "+cpu +memory +pids")
        os.makedirs(self._parent, exist_ok=True)
        _write(f"{self._parent}/cgroup.subtree_control", "+cpu +memory +pids")

    def create(self, name: str, limits: Limits) -> None:
        group = f"{self._parent}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(group)
        with contextlib.suppress(OSError):  # without swap the file is missing
            _write(f"{group}/memory.swap.max", 0)
        self._limit(group, limits, quota=limits.dedicated)

    def resize(self, name: str, limits: Limits) -> None:
        group = f"{self._parent}/{name}"
        _check_use(limits, self.usage(name)[1], _read(f"{group}/memory.stat"))  # the kernel would kill to make room
        self._limit(group, limits)

    def _limit(self, group: str, limits: Limits, *, quota: bool = True) -> None:
        _write(f"{group}/memory.max", limits.memory_mib << 20)
        _write(f"{group}/cpu.weight", min(10_000, max(1, limits.cpu_millis // 10)))
        if quota:
            part = str(limits.cpu_millis * 100) if limits.dedicated else "max"
            _write(f"{group}/cpu.max", f"{part} 100000")
        _write(f"{group}/pids.max", limits.pids)

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        try:
            _write(f"{self._parent}/{name}/cgroup.procs", 0)
            yield
        finally:
            _write(f"{self._home}/cgroup.procs", 0)

    def attach(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            _write(f"{self._parent}/{name}/cgroup.procs", pid)

    def names(self) -> list[str]:
        return _directories(self._parent)

    def pids(self, name: str) -> list[int]:
        return _pids(f"{self._parent}/{name}/cgroup.procs")

    def kill(self, name: str) -> bool:
        if not self.pids(name):
            return True
        _write(f"{self._parent}/{name}/cgroup.kill", 1)
        return False

    def freeze(self, name: str, frozen: bool) -> None:
        _write(f"{self._parent}/{name}/cgroup.freeze", int(frozen))

    def oom_kills(self, name: str) -> int:
        return _field(_read(f"{self._parent}/{name}/memory.events"), "oom_kill")

    def usage(self, name: str) -> tuple[float, int]:
        cpu = _field(_read(f"{self._parent}/{name}/cpu.stat"), "usage_usec") / 1e6
        return cpu, int(_read(f"{self._parent}/{name}/memory.current") or 0)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(f"{self._parent}/{name}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._parent)


def _check_use(limits: Limits, usage: int, stat: str) -> None:
    """Raises `CannotResize` when more is in use than the kernel can take back by forgetting what files hold, too."""
    used = usage - _field(stat, "inactive_file") - _field(stat, "active_file")
    if used > limits.memory_mib << 20:
        raise CannotResize(f"memory cannot be limited to {limits.memory_mib} MiB: {-(-used >> 20)} MiB are in use")


def _own_groups() -> dict[str, str]:
    """The supervisor's own group by controller; "" is version 2's."""
    found = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[name] = path
    return found


def _write(path: str, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    """ "" when the group is gone."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _directories(path: str) -> list[str]:
    with os.scandir(path) as found:
        return [entry.name for entry in found if entry.is_dir()]


def _pids(path: str) -> list[int]:
    return [int(line) for line in _read(path).split()]


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

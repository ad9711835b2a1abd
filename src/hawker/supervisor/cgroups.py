"""Control groups, version 1 and 2, behind one small interface: limits, counting, freezing and killing of whole trees.

A process is put into its group without a race: the supervisor has a single thread, so it moves itself into the group,
spawns, and moves itself back; the child is born inside. That costs 0.08 ms where a fork in Python costs 1.4 ms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from hawker.supervisor.disks import forget_unused, hold_later_writes, is_loop
from hawker.supervisor.disks import write as _write

ROOT = Path("/sys/fs/cgroup")
_OPERATIONS_A_WEIGHT = 40  # of the disk: the smallest machine has the kernel's own default, 100


@dataclass(frozen=True)
class Limits:
    """An instance's limits; see `hawker.worker.drivers.base.Limits`."""

    cpu_millis: int
    memory_mib: int
    dedicated: bool
    pids: int
    disk_bytes: int = 0
    disk_operations: int = 0

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Limits:
        """What a daemon asks for. One of another version may know other limits: an older one has no word of the last
        ones, and what a newer one knows besides is not held here."""
        return cls(**{name: asked[name] for name in _LIMITS if name in asked})

    @property
    def disk_weight(self) -> int:
        """A machine's part of a disk that many want, 1 to 1000."""
        return min(1000, max(1, self.disk_operations // _OPERATIONS_A_WEIGHT))


_LIMITS = tuple(field.name for field in fields(Limits))


class CannotResize(Exception):
    """The limits cannot be changed to these now; the text says why."""


class Groups(Protocol):
    """The groups of one supervisor, one for each instance, named by it."""

    kind: str

    def create(self, name: str, limits: Limits, disks: Collection[str] = ()) -> None:
        """`disks` as `hawker.supervisor.disks` names them."""

    def limit_disks(self, name: str, limits: Limits, disks: Collection[str]) -> None:
        """Of a group that is there: limit what it reads and writes of each of these disks. `resize` renews that."""

    def entered(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The supervisor itself inside the group: what it spawns meanwhile is born there."""

    def entrances(self, name: str) -> list[str]:
        """Files by which a process of one thread goes into the group, all of them: it writes "0" to each."""

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

    def tidy(self) -> None:
        """Take away what outlives a group: call it once what was mounted for one is gone, too. May be repeated."""

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


_ANY_SPEED = Limits(cpu_millis=0, memory_mib=0, dedicated=False, pids=0)
"""For a group that is killed: a process dies only once the disk has done what it asked for, perhaps hours later."""
_RULES = ("read_bps", "write_bps", "read_iops", "write_iops")


class V1:
    """Version 1: a hierarchy for each controller. memory, cpu, pids and freezer must be there; cpuacct counts cpu
    time, blkio limits disks where the kernel can."""

    kind = "v1"
    NEEDED = ("memory", "cpu", "pids", "freezer")

    def __init__(self, root: Path, prefix: str) -> None:
        self._parents: dict[str, str] = {}
        self._home: dict[str, str] = {}
        own = _own_groups()
        throttles = (root / "blkio" / f"blkio.throttle.{_RULES[0]}_device").exists()
        for name in (*self.NEEDED, "cpuacct", *(("blkio",) if throttles else ())):
            if not (root / name / "cgroup.procs").exists():
                raise LookupError(name)
            self._parents[name] = f"{root}/{name}/{prefix}"
            self._home[name] = f"{root}/{name}{own.get(name, '/').rstrip('/')}"
        # A container runtime makes groups in all hierarchies.
        others = [name for name in os.listdir(root) if name not in self._parents]
        self._others = [f"{root}/{name}/{prefix}" for name in others if os.path.exists(f"{root}/{name}/cgroup.procs")]
        self._disks = f"{root}/blkio" if throttles else ""
        for parent in self._parents.values():
            os.makedirs(parent, exist_ok=True)
        self.tidy()

    def create(self, name: str, limits: Limits, disks: Collection[str] = ()) -> None:
        for parent in self._parents.values():
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{parent}/{name}")
        self._limit_memory(name, limits.memory_mib << 20)
        self._limit_others(name, limits, quota=limits.dedicated)
        self.limit_disks(name, limits, disks)

    def limit_disks(self, name: str, limits: Limits, disks: Collection[str]) -> None:
        if not self._disks:
            return
        group = f"{self._parents['blkio']}/{name}"
        for disk in disks:
            for rule in _RULES:
                most = limits.disk_bytes if rule.endswith("bps") else limits.disk_operations
                with _no_such_disk():
                    _write(f"{group}/blkio.throttle.{rule}_device", f"{disk} {most}")
            if is_loop(disk):
                hold_later_writes(self._disks, disk, limits.disk_bytes, limits.disk_operations)
        if limits.disk_operations:
            with contextlib.suppress(OSError):  # only with the scheduler BFQ
                _write(f"{group}/blkio.bfq.weight", limits.disk_weight)

    def _limited_disks(self, name: str) -> list[str]:
        rules = _read(f"{self._parents['blkio']}/{name}/blkio.throttle.{_RULES[0]}_device") if self._disks else ""
        return [line.split(" ")[0] for line in rules.splitlines()]

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
        self.limit_disks(name, limits, self._limited_disks(name))

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
            for entrance in self.entrances(name):
                _write(entrance, 0)
            yield
        finally:
            for home in self._home.values():
                _write(f"{home}/tasks", 0)

    def entrances(self, name: str) -> list[str]:
        return [f"{parent}/{name}/tasks" for parent in self._parents.values()]

    def attach(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            for controller, parent in self._parents.items():
                if controller == "blkio" and not os.path.exists(f"{parent}/{name}"):
                    continue  # it was made by a supervisor from before disks were limited
                _write(f"{parent}/{name}/cgroup.procs", pid)

    def names(self) -> list[str]:
        return sorted({name for parent in self._parents.values() for name in _directories(parent)})

    def pids(self, name: str) -> list[int]:
        return _pids(f"{self._parents['freezer']}/{name}/cgroup.procs")

    def kill(self, name: str) -> bool:
        pids = self.pids(name)
        if not pids:
            return True
        self.limit_disks(name, _ANY_SPEED, self._limited_disks(name))
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

    def tidy(self) -> None:
        if self._disks:
            forget_unused(self._disks)

    def close(self) -> None:
        self.tidy()
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
        self._disks = "io" in controllers
        wanted = "+cpu +memory +pids" + " +io" * self._disks
        _write(f"{root}/cgroup.subtree_control", wanted)
        os.makedirs(self._parent, exist_ok=True)
        _write(f"{self._parent}/cgroup.subtree_control", wanted)

    def create(self, name: str, limits: Limits, disks: Collection[str] = ()) -> None:
        group = f"{self._parent}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(group)
        with contextlib.suppress(OSError):  # without swap the file is missing
            _write(f"{group}/memory.swap.max", 0)
        self._limit(group, limits, quota=limits.dedicated)
        self.limit_disks(name, limits, disks)

    def limit_disks(self, name: str, limits: Limits, disks: Collection[str]) -> None:
        """What is written later is the group's own, too, on file systems that can tell whose it is (ext4, btrfs,
        XFS)."""
        if not self._disks:
            return
        group = f"{self._parent}/{name}"
        bytes_, operations = limits.disk_bytes or "max", limits.disk_operations or "max"
        for disk in disks:
            with _no_such_disk():
                rule = f"{disk} rbps={bytes_} wbps={bytes_} riops={operations} wiops={operations}"
                _write(f"{group}/io.max", rule)
        if limits.disk_operations:
            for weight in ("io.weight", "io.bfq.weight"):  # of the cost model, and of the scheduler BFQ
                with contextlib.suppress(OSError):
                    _write(f"{group}/{weight}", limits.disk_weight)

    def _limited_disks(self, name: str) -> list[str]:
        return [line.split(" ")[0] for line in _read(f"{self._parent}/{name}/io.max").splitlines()]

    def resize(self, name: str, limits: Limits) -> None:
        group = f"{self._parent}/{name}"
        _check_use(limits, self.usage(name)[1], _read(f"{group}/memory.stat"))  # the kernel would kill to make room
        self._limit(group, limits)
        self.limit_disks(name, limits, self._limited_disks(name))

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

    def entrances(self, name: str) -> list[str]:
        return [f"{self._parent}/{name}/cgroup.procs"]

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
        self.limit_disks(name, _ANY_SPEED, self._limited_disks(name))
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

    def tidy(self) -> None:
        """Nothing does."""

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


@contextlib.contextmanager
def _no_such_disk() -> Iterator[None]:
    """For disks that the kernel cannot limit, or that are gone."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ENXIO):
            raise


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

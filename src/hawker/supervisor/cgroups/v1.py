"""Control groups of version 1."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups.base import (
    ANY_SPEED,
    CannotResize,
    check_use,
    directories,
    field,
    no_such_disk,
    own_groups,
    pids_in,
    read,
)
from hawker.supervisor.disks import forget_unused, hold_later_writes, is_loop, write

_RULES = ("read_bps", "write_bps", "read_iops", "write_iops")


class V1:
    """Version 1: a hierarchy for each controller. memory, cpu, pids and freezer must be there; cpuacct counts cpu
    time, blkio limits disks where the kernel can."""

    kind = "v1"
    NEEDED = ("memory", "cpu", "pids", "freezer")

    def __init__(self, root: Path, prefix: str) -> None:
        self._parents: dict[str, str] = {}
        self._home: dict[str, str] = {}
        own = own_groups()
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
        self._rules_left = throttles  # of loop devices: our own, and those of whoever was here before
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
                with no_such_disk():
                    write(f"{group}/blkio.throttle.{rule}_device", f"{disk} {most}")
            if is_loop(disk):
                self._rules_left = True
                hold_later_writes(self._disks, disk, limits.disk_bytes, limits.disk_operations)
        if limits.disk_operations:
            with contextlib.suppress(OSError):  # only with the scheduler BFQ
                write(f"{group}/blkio.bfq.weight", limits.disk_weight)

    def _limited_disks(self, name: str) -> list[str]:
        rules = read(f"{self._parents['blkio']}/{name}/blkio.throttle.{_RULES[0]}_device") if self._disks else ""
        return [line.split(" ")[0] for line in rules.splitlines()]

    def resize(self, name: str, limits: Limits) -> None:
        wanted = limits.memory_mib << 20
        group = f"{self._parents['memory']}/{name}"
        check_use(limits, self.usage(name)[1], read(f"{group}/memory.stat"))
        before = int(read(f"{group}/memory.limit_in_bytes") or 0)
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
            write(file, wanted)

    def _limit_others(self, name: str, limits: Limits, *, quota: bool = True) -> None:
        cpu = f"{self._parents['cpu']}/{name}"
        write(f"{cpu}/cpu.shares", max(2, limits.cpu_millis * 1024 // 1000))
        if quota:
            part = limits.cpu_millis * 100 if limits.dedicated else -1  # of the period, 100 ms
            write(f"{cpu}/cpu.cfs_quota_us", part)
        write(f"{self._parents['pids']}/{name}/pids.max", limits.pids)

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        # "0" into `tasks`, a thread moving itself, is the one move for which the kernel takes no lock over all
        # processes; through `cgroup.procs` each move waits for an RCU grace period, 1.5 ms and more on a quiet
        # machine.
        try:
            for entrance in self.entrances(name):
                write(entrance, 0)
            yield
        finally:
            for home in self._home.values():
                write(f"{home}/tasks", 0)

    def entrances(self, name: str) -> list[str]:
        return [f"{parent}/{name}/tasks" for parent in self._parents.values()]

    def attach(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            for controller, parent in self._parents.items():
                if controller == "blkio" and not os.path.exists(f"{parent}/{name}"):
                    continue  # it was made by a supervisor from before disks were limited
                write(f"{parent}/{name}/cgroup.procs", pid)

    def names(self) -> list[str]:
        # Removing one takes a step for each hierarchy: whoever was killed in between has left it in the last ones only.
        parents = (*self._parents.values(), *filter(os.path.exists, self._others))
        return sorted({name for parent in parents for name in directories(parent)})

    def pids(self, name: str) -> list[int]:
        return pids_in(f"{self._parents['freezer']}/{name}/cgroup.procs")

    def kill(self, name: str) -> bool:
        pids = self.pids(name)
        if not pids:
            return True
        self.limit_disks(name, ANY_SPEED, self._limited_disks(name))
        self.freeze(name, True)  # so that nothing forks between reading and killing
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.freeze(name, False)
        return False

    def freeze(self, name: str, frozen: bool) -> None:
        write(f"{self._parents['freezer']}/{name}/freezer.state", "FROZEN" if frozen else "THAWED")

    def oom_kills(self, name: str) -> int:
        return field(read(f"{self._parents['memory']}/{name}/memory.oom_control"), "oom_kill")

    def usage(self, name: str) -> tuple[float, int]:
        cpu = int(read(f"{self._parents['cpuacct']}/{name}/cpuacct.usage") or 0) / 1e9
        return cpu, int(read(f"{self._parents['memory']}/{name}/memory.usage_in_bytes") or 0)

    def remove(self, name: str) -> None:
        for parent in (*self._parents.values(), *self._others):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{parent}/{name}")

    def tidy(self) -> bool:
        if self._disks and self._rules_left:
            self._rules_left = forget_unused(self._disks)
        return self._rules_left

    def close(self) -> None:
        self.tidy()
        for parent in (*self._parents.values(), *self._others):
            with contextlib.suppress(OSError):
                os.rmdir(parent)

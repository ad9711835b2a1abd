"""Control groups of version 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups.base import (
    ANY_SPEED,
    check_use,
    directories,
    field,
    no_such_disk,
    own_groups,
    pids_in,
    read,
)
from hawker.supervisor.disks import write


class V2:
    """Version 2: one hierarchy. The parent's controllers are switched on for its children."""

    kind = "v2"

    def __init__(self, root: Path, prefix: str) -> None:
        controllers = (root / "cgroup.controllers").read_text().split()
        if not {"cpu", "memory", "pids"} <= set(controllers):
            raise LookupError("cpu, memory and pids are not all there")
        self._parent = f"{root}/{prefix}"
        self._home = f"{root}{own_groups().get('', '/').rstrip('/')}"
        self._disks = "io" in controllers
        wanted = "+cpu +memory +pids" + " +io" * self._disks
        write(f"{root}/cgroup.subtree_control", wanted)
        os.makedirs(self._parent, exist_ok=True)
        write(f"{self._parent}/cgroup.subtree_control", wanted)

    def create(self, name: str, limits: Limits, disks: Collection[str] = ()) -> None:
        group = f"{self._parent}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(group)
        with contextlib.suppress(OSError):  # without swap the file is missing
            write(f"{group}/memory.swap.max", 0)
        self._limit(group, limits, quota=limits.dedicated)
        self.limit_disks(name, limits, disks)

    def limit_disks(self, name: str, limits: Limits, disks: Collection[str]) -> None:
        """Buffered writes count for the group, too, on file systems that can tell whose they are (ext4, btrfs, XFS)."""
        if not self._disks:
            return
        group = f"{self._parent}/{name}"
        bytes_, operations = limits.disk_bytes or "max", limits.disk_operations or "max"
        for disk in disks:
            with no_such_disk():
                rule = f"{disk} rbps={bytes_} wbps={bytes_} riops={operations} wiops={operations}"
                write(f"{group}/io.max", rule)
        if limits.disk_operations:
            for weight in ("io.weight", "io.bfq.weight"):  # of the cost model, and of the scheduler BFQ
                with contextlib.suppress(OSError):
                    write(f"{group}/{weight}", limits.disk_weight)

    def _limited_disks(self, name: str) -> list[str]:
        return [line.split(" ")[0] for line in read(f"{self._parent}/{name}/io.max").splitlines()]

    def resize(self, name: str, limits: Limits) -> None:
        group = f"{self._parent}/{name}"
        check_use(limits, self.usage(name)[1], read(f"{group}/memory.stat"))  # the kernel would kill to make room
        self._limit(group, limits)
        self.limit_disks(name, limits, self._limited_disks(name))

    def _limit(self, group: str, limits: Limits, *, quota: bool = True) -> None:
        write(f"{group}/memory.max", limits.memory_mib << 20)
        write(f"{group}/cpu.weight", min(10_000, max(1, limits.cpu_millis // 10)))
        if quota:
            part = str(limits.cpu_millis * 100) if limits.dedicated else "max"
            write(f"{group}/cpu.max", f"{part} 100000")
        write(f"{group}/pids.max", limits.pids)

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        try:
            write(f"{self._parent}/{name}/cgroup.procs", 0)
            yield
        finally:
            write(f"{self._home}/cgroup.procs", 0)

    def entrances(self, name: str) -> list[str]:
        return [f"{self._parent}/{name}/cgroup.procs"]

    def attach(self, name: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            write(f"{self._parent}/{name}/cgroup.procs", pid)

    def names(self) -> list[str]:
        return directories(self._parent)

    def pids(self, name: str) -> list[int]:
        return pids_in(f"{self._parent}/{name}/cgroup.procs")

    def kill(self, name: str) -> bool:
        if not self.pids(name):
            return True
        self.limit_disks(name, ANY_SPEED, self._limited_disks(name))
        write(f"{self._parent}/{name}/cgroup.kill", 1)
        return False

    def freeze(self, name: str, frozen: bool) -> None:
        write(f"{self._parent}/{name}/cgroup.freeze", int(frozen))

    def oom_kills(self, name: str) -> int:
        return field(read(f"{self._parent}/{name}/memory.events"), "oom_kill")

    def usage(self, name: str) -> tuple[float, int]:
        cpu = field(read(f"{self._parent}/{name}/cpu.stat"), "usage_usec") / 1e6
        return cpu, int(read(f"{self._parent}/{name}/memory.current") or 0)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(f"{self._parent}/{name}")

    def tidy(self) -> bool:
        return False  # nothing does

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._parent)

"""The size of a machine, and what it costs a worker.

A guest asks for shared or dedicated ("performance") cpus and memory in steps that the public API documents; a worker
counts `Resources`: five whole numbers that are added, subtracted and compared, nothing else.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hawker.errors import Invalid, NotBuilt
from hawker.model.json_fields import any_of, check_int

RESOURCES = ("cpus_shared", "cpus_dedicated", "memory_mib", "disk_mib", "machines")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of everything a worker rations.

    Cpus are counted by kind: shared ones are fractions of a core by weight, dedicated ones are whole. Memory and disk
    are in MiB. `machines` is a plain count.
    """

    cpus_shared: int = 0
    cpus_dedicated: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    machines: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            cpus_shared=self.cpus_shared + other.cpus_shared,
            cpus_dedicated=self.cpus_dedicated + other.cpus_dedicated,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
            machines=self.machines + other.machines,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            cpus_shared=self.cpus_shared - other.cpus_shared,
            cpus_dedicated=self.cpus_dedicated - other.cpus_dedicated,
            memory_mib=self.memory_mib - other.memory_mib,
            disk_mib=self.disk_mib - other.disk_mib,
            machines=self.machines - other.machines,
        )

    def asleep(self, *, in_memory: bool) -> Resources:
        """What a suspended machine keeps: no cpu, and its memory only where its program stays in memory. The rest is
        asked for again when it is resumed."""
        return Resources(memory_mib=self.memory_mib if in_memory else 0, disk_mib=self.disk_mib, machines=self.machines)

    def at_rest(self) -> Resources:
        """What a stopped machine keeps: its disk and its place. Cpu and memory are asked for again at start."""
        return Resources(disk_mib=self.disk_mib, machines=self.machines)


def smaller(a: Resources, b: Resources) -> Resources:
    """The smaller amount of each."""
    return Resources(**{name: min(getattr(a, name), getattr(b, name)) for name in RESOURCES})


def larger(a: Resources, b: Resources) -> Resources:
    """The larger amount of each."""
    return Resources(**{name: max(getattr(a, name), getattr(b, name)) for name in RESOURCES})


ROOT_DISK_MIB = 1024
_SHARED_CPUS = (1, 2, 4, 6, 8)
_PERFORMANCE_CPUS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 32, 64, 128)


class Guest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """cpus of one kind and memory, as the API writes them (`memory_mb` counts MiB, as upstream)."""

    cpu_kind: Literal["shared", "performance"] = "shared"
    cpus: int = 1
    memory_mb: int = 256

    def resources(self, disk_mib: int = ROOT_DISK_MIB) -> Resources:
        shared = self.cpu_kind == "shared"
        return Resources(
            cpus_shared=self.cpus if shared else 0,
            cpus_dedicated=0 if shared else self.cpus,
            memory_mib=self.memory_mb,
            disk_mib=disk_mib,
            machines=1,
        )


def preset(size: Any, at: str = "config.size") -> Guest:
    """The guest of a named size such as `shared-cpu-2x` or `performance-4x`."""
    if not isinstance(size, str):
        raise Invalid(at, size, "give a string")
    for kind, prefix, cpus, per_cpu in (
        ("shared", "shared-cpu-", _SHARED_CPUS, 256),
        ("performance", "performance-", _PERFORMANCE_CPUS, 2048),
    ):
        for n in cpus:
            if size == f"{prefix}{n}x":
                return Guest(cpu_kind=kind, cpus=n, memory_mb=n * per_cpu)  # type: ignore[arg-type]  # literal by table
    if size.startswith(("a10", "a100", "l40s")):
        raise NotBuilt(at, size, "GPUs are not built yet; use a shared-cpu or performance size")
    raise Invalid(at, size, "use shared-cpu-{1,2,4,6,8}x or performance-{1,2,4,...,16,32,64,128}x")


def check_guest(raw: Any, at: str = "config.guest") -> Guest:
    """A guest from decoded JSON, with the documented limits on cpus and memory checked. Absent fields get defaults."""
    if not isinstance(raw, dict):
        raise Invalid(at, raw, 'give an object such as {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}')
    for field in ("gpus", "gpu_kind"):
        if raw.get(field):
            raise NotBuilt(f"{at}.{field}", raw[field], "GPUs are not built yet; leave the field out")
    kind = raw.get("cpu_kind") or "shared"
    if kind not in ("shared", "performance"):
        raise Invalid(f"{at}.cpu_kind", kind, 'use "shared" or "performance"')
    shared = kind == "shared"
    allowed, low, high, step = (_SHARED_CPUS, 256, 2048, 256) if shared else (_PERFORMANCE_CPUS, 2048, 8192, 1024)
    cpus = raw.get("cpus")
    cpus = 1 if cpus is None else cpus
    if cpus not in allowed or type(cpus) is not int:  # True and 2.0 are equal to numbers in the list
        raise Invalid(f"{at}.cpus", cpus, f"{kind} machines have {any_of(allowed)} cpus")
    memory = raw.get("memory_mb")
    memory = cpus * low if memory is None else memory
    remedy = f"{cpus} {kind} cpus take {cpus * low} to {cpus * high} MiB in steps of {step}"
    if check_int(f"{at}.memory_mb", memory, cpus * low, cpus * high, remedy) % step:
        raise Invalid(f"{at}.memory_mb", memory, remedy)
    return Guest(cpu_kind="shared" if shared else "performance", cpus=cpus, memory_mb=memory)

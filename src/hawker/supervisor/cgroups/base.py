"""What is asked of control groups, whatever their version: limits of an instance, and the groups of a supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

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

    def tidy(self) -> bool:
        """Take away what outlives a group: call it once what was mounted for one is gone, too. May be repeated; whether
        it has to be."""

    def close(self) -> None:
        """Remove the parent group, if nothing is left in it."""


ANY_SPEED = Limits(cpu_millis=0, memory_mib=0, dedicated=False, pids=0)
"""For a group that is killed: a process dies only once the disk has done what it asked for, perhaps hours later."""

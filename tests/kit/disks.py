"""What was read from and written to disks, as the kernel counts it, whoever limits it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from tests.kit.cgroups import parents
from tests.kit.waiting import eventually

SLICE_S = 0.2
"""What the kernel may let through at once: it counts in slices of a tenth of a second."""


def loop_of(directory: Path, machine: str) -> Path:
    """The loop device, in /sys, of a machine of a driver in this directory."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    (found,) = (file.parent.parent for file in files if file.read_text().startswith(f"{directory}/roots/{machine}/"))
    return found


def number(device: Path) -> str:
    return (device / "dev").read_text().strip()


def through(device: Path) -> int:
    """Bytes that a block device has read and written (Documentation/block/stat.rst)."""
    fields = (device / "stat").read_text().split()
    return 512 * (int(fields[2]) + int(fields[6]))


def operations(device: Path) -> int:
    """Reads and writes that it has done."""
    fields = (device / "stat").read_text().split()
    return int(fields[0]) + int(fields[4])


def by_group(directory: Path, disk: str) -> int:
    """Bytes that the groups of a driver's machines have read from and written to a disk."""
    total = 0
    for parent in parents(directory):
        for file in (*parent.glob("*/blkio.throttle.io_service_bytes"), *parent.glob("*/io.stat")):
            for line in file.read_text().splitlines():
                words = line.replace("=", " ").split()
                if words[0] == disk:
                    total += sum(int(n) for kind, n in itertools.pairwise(words) if kind in _KINDS)
    return total


def rules(parent: Path, name: str) -> dict[str, str]:
    """Of a file of limits, by disk."""
    return dict(line.split(" ", 1) for line in (parent / name).read_text().splitlines())


async def most_a_second(moved: Callable[[], int], count: int) -> float:
    """How fast it was while so many were counted, at most: what may come at once is taken off."""
    before, began = moved(), time.monotonic()

    async def enough() -> bool:
        return moved() - before >= count

    await eventually(enough, f"{count} were counted")
    return (moved() - before) / (time.monotonic() - began + SLICE_S)


_KINDS = ("Read", "Write", "rbytes", "wbytes")

"""Finds what a test leaves on the host: mounts, namespaces, interfaces, addresses, routes, filters, cgroups, loop
devices and their rules, files in memory. Processes are found by `tests.kit.leftovers`.

Everything the kernel keeps for a machine is compared before and after each test; what is there afterwards and was not
before is a leak of that test. Something that a fixture of a wider scope holds may stay until that scope ends: then the
module's last test answers for it. The comparison takes the host to be this run's alone, so it is made where
`--forbid-skips` is given, as in `.ci/run`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.kit.filters import filters

SETTLE_S = float(os.environ.get("HAWKER_TEST_SETTLE_S", 20))
"""How long the kernel and ending processes may take to give things back after a test, and processes to end after all
of them: only what is left for good is waited for so long, and a loaded machine needs some seconds."""

_LOOK_S = 0.01

Found = frozenset[tuple[str, str]]
"""(kind, name)"""


_TOLD: set[tuple[str, str]] = set()


def snapshot() -> Found:
    """What is on the host now. A look takes about a millisecond."""
    return frozenset((kind, name) for kind, look in KINDS.items() for name in look())


def leaked(before: Found, *, settle_s: float = SETTLE_S) -> list[str]:
    """What is there now and was not `before`, once what is being given back has gone. As "kind: name", sorted. What was
    told once is not told again, nor waited for."""
    deadline = time.monotonic() + settle_s
    while (new := snapshot() - before - _TOLD) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    _TOLD.update(new)
    return sorted(f"{kind}: {name}" for kind, name in new)


def _mounts() -> set[str]:
    """By mount point and type; a mount's number may be given to the next one."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        found.add(f"{fields[4]} ({fields[fields.index('-') + 1]})")
    return found


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _addresses() -> set[str]:
    """Of version 6: workers give themselves one of their own on the loopback."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return {f"{fields[0]} on {fields[5]}" for line in lines if (fields := line.split())[0].startswith("fdaa")}
    return set()


def _namespaces() -> set[str]:
    return set(_names("/run/netns"))


def _namespaces_of_processes() -> set[str]:
    """Those that have no name: of networks and of mounts, which end with the last process in them."""
    found = set()
    for name in _names("/proc"):
        if name.isdigit():
            for kind in ("net", "mnt"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{name}/ns/{kind}"))
    return found


def _cgroups() -> set[str]:
    root = "/sys/fs/cgroup"
    found = {name for name in _names(root) if name.startswith("hawker-")}
    for controller in _names(root):
        found |= {f"{controller}/{name}" for name in _names(f"{root}/{controller}") if name.startswith("hawker-")}
    return found


def _loops() -> set[str]:
    return {name for name in _names("/sys/block") if os.path.exists(f"/sys/block/{name}/loop/backing_file")}


def _loop_rules() -> set[str]:
    """What the root group of version 1 holds back on loop devices: their machines' own, which outlives them."""
    with contextlib.suppress(OSError):
        rules = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device").read_text()
        return {line.split(" ")[0] for line in rules.splitlines() if line.startswith("7:")}
    return set()


def _in_memory() -> set[str]:
    return {f"{where}/{name}" for where in ("/run", "/dev/shm") for name in _names(where) if name.startswith("hawker")}


def _runtimes() -> set[str]:
    """State directories of container runtimes."""
    return {f"{where}/{name}" for where in ("/run/crun", "/run/runc") for name in _names(where) if name[0] != "."}


def _routes() -> set[str]:
    found = set()
    for family in ("route", "ipv6_route"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{family}").read_text().splitlines():
                fields = line.split()
                device, target = (fields[0], fields[1]) if family == "route" else (fields[-1], fields[0])
                if device.startswith("hk"):
                    found.add(f"{target} by {device}")
    return found


def _filters() -> set[str]:
    """Tables of nftables that are named as ours, and the elements of machines in them."""
    return set(filters("hawker-"))


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


KINDS: dict[str, Callable[[], set[str]]] = {
    "mount": _mounts,
    "interface": _interfaces,
    "network namespace": _namespaces,
    "namespace of processes": _namespaces_of_processes,
    "address": _addresses,
    "route": _routes,
    "filter": _filters,
    "cgroup": _cgroups,
    "loop device": _loops,
    "rule of a loop device": _loop_rules,
    "file in memory": _in_memory,
    "runtime state": _runtimes,
}

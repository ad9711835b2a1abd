"""Everything on the host that belongs to one worker, found by the worker's directory and by what is named after it.

The host may be shared with other workers and with anybody else: nothing of theirs is looked at. `left` is for a worker
without machines and without images, while it runs or after it has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.kit.cgroups import parents
from tests.kit.filters import filters

from hawker.network import addresses, ruleset
from hawker.supervisor.files import SHOWN
from hawker.supervisor.proc import MARKER, marker
from hawker.supervisor.standby import BLANK

DRIVERS = ("process", "container", "microvm")
_NAMES = ("work", "logs", "old-logs", "run", "roots", "trash")
EMPTY = (
    *(f"{driver}/{name}" for driver in DRIVERS for name in _NAMES),
    *(f"microvm/supervisor/{name}" for name in _NAMES),
    "microvm/vms",
    *(f"images/{name}" for name in ("trees", "unpacking", "uploads", "images")),
)
"""Directories of a worker in which nothing stays that belonged to a machine or an image. Everything else is to stay:
databases, locks, sockets and logs of its own, the init it compiled, the kernel and the templates of microVMs, the model
of an empty disk, the pipes of what waits to become any machine's program and the place where that sees its working
directory, the disk of an image that was removed after
its last machine until the driver looks again, and for a day the blobs and trees of images whose making was cut off, so
that it can go on, and for an hour the ends of the logs of machines that are destroyed: of the trees and of these logs
`left` tells all the same."""
DAY_S = 24 * 3600


def left(worker: Path) -> list[str]:
    """What is there of machines and images, as "kind: what", sorted."""
    found = [*_processes(worker), *_groups(worker), *_network(worker), *_mounts(worker), *_loops(worker)]
    return sorted([*found, *_files(worker)])


def kept_for_a_time(worker: Path, what: str) -> bool:
    """Whether this is a tree that an image may go on with, or what a machine that is destroyed said last."""
    return what.startswith(f"file: {worker.name}/images/trees/") or (
        what.startswith(f"file: {worker.name}/") and "/old-logs/" in what
    )


def let_a_day_pass(worker: Path) -> None:
    """For what is kept so that images go on, and for old logs: it was brought two days ago."""
    then = time.time() - 2 * DAY_S
    for path in [*worker.glob("images/trees/*.json"), *worker.glob("images/blobs/**/*"), *worker.glob("**/old-logs/*")]:
        with contextlib.suppress(OSError):  # it has just gone
            os.utime(path, (then, then))


def ended(worker: Path) -> list[str]:
    """What the host still has of a worker that has ended together with its machines. Their files are kept."""
    found = [f"process: {pid} {command(pid)}" for pid in processes(worker)]
    found += [f"file in memory: {path}" for path in _in_memory(worker)]
    found += [f"cgroup: {path}" for each in _supervised(worker) for path in parents(each)]
    return sorted([*found, *_groups(worker), *_network(worker), *_mounts(worker), *_loops(worker)])


def processes(worker: Path) -> list[int]:
    """All that run of it: its daemon, its supervisors, machines, helpers; by directory, command line and mark."""
    return [pid for pid in _everyone() if _is_its(pid, worker)]


def is_own(pid: int) -> bool:
    """Whether a process of a worker is its daemon, a supervisor, or one that waits to become any machine's program:
    those stay."""
    words = argv(pid)
    blank = marker(pid).split(":")[1:] == [BLANK, ""]
    return blank or "hawker.supervisor" in words or ("hawker" in words and "agent" in words)


def argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def command(pid: int) -> str:
    return " ".join(argv(pid))[:160]


def _everyone() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    yield int(name)


def _is_its(pid: int, worker: Path) -> bool:
    if any(str(worker) in word for word in argv(pid)):
        return True
    with contextlib.suppress(OSError):
        if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(worker):
            return True
    with contextlib.suppress(OSError):
        groups = Path(f"/proc/{pid}/cgroup").read_text()
        if any(each.name in groups for directory in _supervised(worker) for each in parents(directory)):
            return True
    with contextlib.suppress(OSError):
        marks = [entry for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if entry[:16] == _MARK]
        return any(mark.decode().partition("=")[2].partition(":")[0] in _ids(worker) for mark in marks)
    return False


_MARK = f"{MARKER}=".encode()


def _processes(worker: Path) -> list[str]:
    return [f"process: {pid} {command(pid)}" for pid in processes(worker) if not is_own(pid)]


def _supervised(worker: Path) -> list[Path]:
    return [worker / driver for driver in DRIVERS] + [worker / "microvm/supervisor"]


def _ids(worker: Path) -> set[str]:
    """Of its supervisors, as marks and groups have them."""
    from hashlib import blake2b

    return {blake2b(os.path.realpath(each).encode(), digest_size=6).hexdigest() for each in _supervised(worker)}


def _groups(worker: Path) -> list[str]:
    tops = [top for each in _supervised(worker) for top in parents(each)]
    return [f"cgroup: {path}" for top in tops for path in top.rglob("*") if path.is_dir()]


def _network(worker: Path) -> list[str]:
    """Of its machines: interfaces, elements of filters, routes, and its own address once it has no machine."""
    prefix, own = addresses.device_prefix(str(worker)), addresses.worker_address(str(worker))
    found = [f"interface: {name}" for _, name in socket.if_nameindex() if name.startswith(prefix)]
    for family in ("route", "ipv6_route"):
        with contextlib.suppress(FileNotFoundError):
            lines = Path(f"/proc/net/{family}").read_text().splitlines()
            found += [f"route: {line.strip()}" for line in lines if prefix in line]
    packed = "".join(f"{int(part, 16):04x}" for part in _whole(own))
    if packed in Path("/proc/net/if_inet6").read_text():
        found.append(f"address: {own}")
    return found + [f"filter: {what}" for what in filters(ruleset.table(str(worker)))]


def _whole(address: str) -> list[str]:
    from ipaddress import IPv6Address

    return IPv6Address(address).exploded.split(":")


def _mounts(worker: Path) -> list[str]:
    """In the host's namespace of mounts and in those of its processes."""
    found = set()
    for pid in [os.getpid(), *(pid for pid in processes(worker) if is_own(pid))]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                place = line.split(" ")[4]
                its = f"{worker}/" in line or any(f"{path}/" in line for path in _in_memory(worker))
                if its and Path(place).name != SHOWN:
                    found.add(f"mount: {place} seen by {command(pid)[-60:]}")
    return sorted(found)


def _loops(worker: Path) -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if f"{worker}/" in (backing := device.read_text().strip()):
                found.append(f"loop device: {device.parts[3]} of {backing}")
    return found


def _in_memory(worker: Path) -> list[Path]:
    """Where its supervisors keep their records."""
    links = [each / "run" for each in _supervised(worker)]
    return [Path(os.readlink(link)) for link in links if link.is_symlink() and Path(os.readlink(link)).exists()]


def _files(worker: Path) -> list[str]:
    found = []
    for name in EMPTY:
        place = (worker / name).resolve()
        there = [path for path in place.rglob("*") if path.name != SHOWN and not path.name.startswith(f"{BLANK}.")]
        found += [f"file: {worker.name}/{name}/{path.relative_to(place)}" for path in there]
    found += [f"file: {path}" for path in worker.glob("microvm/*/.making-*")]
    found += [f"file: {path}" for path in worker.rglob("*.new")]
    return sorted(set(found))

"""What there is on this host, read from the kernel and the file system. Nothing is changed, but for one small file that
is written and removed to time the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hawker import subids
from hawker.model.values import host_port

_SYNCS = 11
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent would listen, and why it cannot: "" when it can."""

    text: str
    problem: str


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of the agent's directory. `sync_ms` is the median time to make 4 KiB durable; `problem` is why it
    cannot be written to. `xattrs`: extended attributes of users can be kept."""

    directory: str
    filesystem: str
    free_bytes: int
    total_bytes: int
    sync_ms: float
    xattrs: bool
    problem: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`cgroups` is "v2", "v1", "hybrid" (version 1 with an empty version 2 beside it) or "none"; `controllers` are
    those that this user may use. `clock_synchronised` is None where the kernel does not say."""

    python: tuple[int, int, int]
    system: str
    release: tuple[int, int]
    architecture: str
    root: bool
    cores: int
    memory_mib: int
    open_files: int
    filesystems: frozenset[str]
    namespaces: frozenset[str]
    user_namespaces: int
    cgroups: str
    controllers: frozenset[str]
    compiler: str
    haproxy: str
    subordinate_ids: bool
    clock_synchronised: bool | None
    addresses: tuple[Address, ...]
    disk: Disk


def gather(directory: Path, addresses: Sequence[str]) -> Facts:
    """Look at this host. `addresses` are those an agent would listen on, TCP and UDP."""
    kind, controllers = _cgroups(Path("/sys/fs/cgroup"))
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        release=_release(platform.release()),
        architecture=platform.machine(),
        root=os.geteuid() == 0,
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        filesystems=frozenset(line.split()[-1] for line in _lines("/proc/filesystems")),
        namespaces=frozenset(os.listdir("/proc/self/ns")) if os.path.isdir("/proc/self/ns") else frozenset(),
        user_namespaces=_user_namespaces(),
        cgroups=kind,
        controllers=controllers,
        compiler=shutil.which("cc") or shutil.which("gcc") or "",
        haproxy=shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin") or "",
        subordinate_ids=all(shutil.which(tool) and subids.ranges(file) for tool, file in subids.TOOLS),
        clock_synchronised=_clock_synchronised(),
        addresses=tuple(Address(text=text, problem=_why_not_bound(text)) for text in addresses),
        disk=_disk(directory),
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(path: str, default: int) -> int:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else default


def _release(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _user_namespaces() -> int:
    """How many user namespaces there may be; 0 where an ordinary user may make none and we are one."""
    if os.geteuid() != 0:
        closed = _number("/proc/sys/kernel/unprivileged_userns_clone", 1) == 0
        if closed or _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", 0) == 1:
            return 0
    return _number("/proc/sys/user/max_user_namespaces", 0)


def _cgroups(root: Path) -> tuple[str, frozenset[str]]:
    if (root / "cgroup.controllers").exists():
        return "v2", _usable_v2(root)
    trees = [name for name in ("cpu", "memory", "pids", "blkio", "freezer", "devices") if (root / name).is_dir()]
    usable = frozenset(name for name in trees if os.access(root / name, os.W_OK))
    if not trees:
        return "none", frozenset()
    return ("hybrid" if (root / "unified").is_dir() else "v1"), usable


def _usable_v2(root: Path) -> frozenset[str]:
    """The controllers of the group an agent started now would be in: it can limit machines only below itself, unless it
    is root."""
    where = root
    if os.geteuid() != 0:
        own = next((line.split("::", 1)[1] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
        where = root / own.lstrip("/")
    if not os.access(where / "cgroup.subtree_control", os.W_OK):
        return frozenset()
    return frozenset(" ".join(_lines(str(where / "cgroup.controllers"))).split())


def _clock_synchronised() -> bool | None:
    buffer = ctypes.create_string_buffer(512)  # a struct timex, which is smaller; its modes are 0: only read
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return None if state < 0 else bool(state != _TIME_ERROR)


def _why_not_bound(text: str) -> str:
    """Find out why nobody can listen there, by listening for a moment."""
    name, port = host_port("listen", text)
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    for kind, word in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        with socket.socket(family, kind) as sock:
            if kind == socket.SOCK_STREAM:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((name, port))
            except OSError as error:
                return f"{word}: {error.strerror}"
    return ""


def _disk(directory: Path) -> Disk:
    """What the nearest existing directory at or above this one says of its disk."""
    place = directory.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    usage = os.statvfs(place)
    sync_ms, xattrs, problem = 0.0, False, ""
    probe = place / f".hawker-doctor-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sync_ms = statistics.median(_sync_ms(fd) for _ in range(_SYNCS))
            xattrs = _takes_xattrs(fd)
        finally:
            os.close(fd)
            probe.unlink()
    except OSError as error:
        problem = error.strerror or str(error)
    return Disk(
        directory=str(place),
        filesystem=_filesystem_of(place),
        free_bytes=usage.f_bavail * usage.f_frsize,
        total_bytes=usage.f_blocks * usage.f_frsize,
        sync_ms=sync_ms,
        xattrs=xattrs,
        problem=problem,
    )


def _sync_ms(fd: int) -> float:
    os.write(fd, bytes(4096))
    started = time.perf_counter()
    os.fdatasync(fd)
    return (time.perf_counter() - started) * 1000


def _takes_xattrs(fd: int) -> bool:
    try:
        os.setxattr(fd, "user.hawker", b"1")
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return False
        raise
    return True


def _filesystem_of(place: Path) -> str:
    device = os.stat(place).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split(" ")
        if fields[2] == name:
            return fields[fields.index("-") + 1]
    return ""

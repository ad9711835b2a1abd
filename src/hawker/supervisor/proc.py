"""Reading /proc: who belongs to an instance, what they use, where they listen. Linux only.

A pid alone names nobody for long; a process is known by its pid and its start time together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MARKER = "HAWKER_INSTANCE"
"""The environment variable that says which instance a process belongs to: `supervisor:machine:key`."""
_LAID_OUT_MOST_MS = 500

_boot_ms = int((time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)) * 1000)


class Stat(NamedTuple):
    """One process. Times in clock ticks; `start` counts from boot."""

    pid: int
    state: str
    ppid: int
    session: int
    cpu: int
    start: int
    rss_pages: int

    @property
    def started_at_ms(self) -> int:
        return _boot_ms + self.start * 1000 // TICKS


def now_ms() -> int:
    return int(time.time() * 1000)


def stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    f = raw[raw.rindex(b")") + 2 :].split()  # the name before it may hold blanks and parentheses
    return Stat(pid, f[0].decode(), int(f[1]), int(f[3]), int(f[11]) + int(f[12]), int(f[19]), int(f[21]))


def open_pidfd(pid: int, start: int) -> int:
    """A descriptor of the process with this number that started then; -1 when it has ended, whoever has the number."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    now = stat(pid)
    if now is None or now.start != start:
        os.close(pidfd)
        return -1
    return pidfd


def exit_status(pidfd: int) -> int | None:
    """How a process that is not our child ended: its exit code, or minus the signal. None until its parent has reaped
    it.

    The descriptor must have been opened before that. Raises OSError on kernels before 6.15, which cannot tell.
    """
    info = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, 0)
    fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    known, status = _PIDFD_INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if known & _PIDFD_INFO_EXIT else None


# From linux/pidfd.h: a mask of what is asked and then known, 52 bytes of ids, and the status as wait() gives it.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)


def everyone() -> dict[int, Stat]:
    """All processes that are not zombies."""
    found = (stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {s.pid: s for s in found if s and s.state != "Z"}


def marker(pid: int) -> str:
    """The instance a process says it belongs to, "" for none or when its environment is not ours to read."""
    return environ(pid).get(MARKER, "")


def environ(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def environ_of_program(pid: int) -> dict[str, str]:
    """That of a program which may have been started a moment ago. Then it may have none yet: the kernel closes
    descriptors, by which we know of the start, before it lays out the environment. On a busy host that is so once in
    fifty starts, for up to 65 ms."""
    for _ in range(_LAID_OUT_MOST_MS):
        if found := environ(pid):
            return found
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(1):  # comes to be there at the same moment
                break
        now = stat(pid)
        if now is None or now.state in "ZX":  # it has ended, and its parent, who may be waiting here, has not seen it
            break
        time.sleep(0.001)
    return environ(pid)


def members(leader: int, mark: str) -> list[int]:
    """Live processes of an instance without a cgroup: its session, their descendants, and whoever carries its mark.

    A program that clears its environment, leaves the session and is orphaned escapes; cgroups close that hole.
    """
    all_ = everyone()
    found = {pid for pid, s in all_.items() if s.session == leader or pid == leader}
    found |= {pid for pid in all_.keys() - found if marker(pid) == mark}
    children: dict[int, list[int]] = {}
    for s in all_.values():
        children.setdefault(s.ppid, []).append(s.pid)
    todo = list(found)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return sorted(found)


def in_namespace_of(pid: int) -> list[int]:
    """Live processes that have the pid namespace of this one, and it; none when it has ended."""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
        return [each for each in everyone() if _namespace(each) == namespace]
    return []


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def usage(pids: Iterable[int]) -> tuple[float, int, int]:
    """Cpu seconds, resident bytes and count of live processes."""
    stats = [s for s in map(stat, pids) if s and s.state != "Z"]
    return sum(s.cpu for s in stats) / TICKS, sum(s.rss_pages for s in stats) * PAGE, len(stats)


def describe(pids: Iterable[int], *, inside: int = 0) -> list[dict[str, Any]]:
    """What `ps` shows of each, with the TCP sockets they listen on. `inside`: the first process of a pid namespace,
    whose numbers and whose network are meant."""
    listening = _listening(inside or "self")
    shown = []
    for s in filter(None, map(stat, pids)):
        if s.state == "Z":
            continue
        shown.append(
            {
                "pid": _number_inside(s.pid) if inside else s.pid,
                "ppid": (_number_inside(s.ppid) if s.pid != inside else 0) if inside else s.ppid,
                "started_at_ms": s.started_at_ms,
                "cpu_s": s.cpu / TICKS,
                "rss_bytes": s.rss_pages * PAGE,
                "directory": _link(f"/proc/{s.pid}/cwd"),
                "command": _command(s.pid),
                "listen": sorted({("tcp", listening[i]) for i in _sockets(s.pid) if i in listening}),
            }
        )
    return shown


def _number_inside(pid: int) -> int:
    """The process's number in its own pid namespace; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _sockets(pid: int) -> list[str]:
    try:
        links = [_link(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    return [link[8:-1] for link in links if link.startswith("socket:[")]


def _listening(whose: int | str) -> dict[str, str]:
    """Address by inode of every listening TCP socket in the network of a process."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{whose}/net/{name}") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            f = line.split()
            if f[3] == "0A":
                address, _, port = f[1].partition(":")
                found[f[9]] = f"{_address(address)}:{int(port, 16)}"
    return found


def _address(text: str) -> str:
    raw = bytes.fromhex(text)
    if len(raw) == 4:
        return ".".join(str(b) for b in raw[::-1])
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, 16, 4))
    return "[::]" if not any(words) else "[" + ":".join(words[i : i + 2].hex() for i in range(0, 16, 2)) + "]"

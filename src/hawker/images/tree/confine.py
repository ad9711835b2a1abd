"""The process gives up what it does not need before it reads the first byte of a layer.

What stays: the blob and two pipes as open files, a directory as the root of all paths, and of root's powers those that
giving files their owners and modes takes. What goes: the host's mounts, network, processes and IPC (namespaces of its
own), every other capability for good, gaining any by exec, and time, memory and file size without end.

An ordinary user gets the same by a user namespace, in which more than the own user exists when /etc/subuid says so.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    *(0x0002_0000, 0x0400_0000, 0x0800_0000),
    *(0x1000_0000, 0x2000_0000, 0x4000_0000),
)
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000
SIGKILL = 9
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_MKNOD, CAP_SETFCAP = 0, 1, 3, 4, 27, 31
KEPT = (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_MKNOD, CAP_SETFCAP)
CAPABILITY_VERSION_3 = 0x2008_0522

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """End when the parent ends."""
    _call(_libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def enter_user_namespace() -> bool:
    """Become root of a user namespace, in a child of this process; this process returns never. Returns whether there
    are other users in it."""
    from hawker import subids  # takes longer to load than all the rest here

    ready, go = os.pipe(), os.pipe()
    uid, gid = os.getuid(), os.getgid()
    if pid := os.fork():
        os.close(ready[1])
        os.close(go[0])
        mapped = os.read(ready[0], 1) and not subids.map_users(pid)
        os.write(go[1], b"y" if mapped else b"n")
        _pass_on(pid)
    die_with(os.getppid())
    os.close(go[1])
    _call(_libc.unshare(CLONE_NEWUSER))
    os.write(ready[1], b"+")
    mapped = os.read(go[0], 1) == b"y"
    if not mapped:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    return mapped


def enter_namespaces() -> None:
    """Be the first process of namespaces of its own, in a child of this process; this process returns never."""
    _call(_libc.unshare(NAMESPACES))
    _call(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    alive, held = os.pipe()
    if pid := os.fork():
        os.close(alive)
        _pass_on(pid)
    os.close(held)
    _call(_libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    if select.select([alive], [], [], 0)[0]:  # readable: the other end is closed, so the parent ended before
        os._exit(1)
    os.close(alive)


def give_up_powers(cpu_s: int, memory: int, file_size: int) -> None:
    """For good: limits, the capabilities that are not `KEPT`, and the way to any others."""
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    _call(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        if capability not in KEPT and _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # there are no more
    kept = sum(1 << capability for capability in KEPT)
    low, high = kept & 0xFFFF_FFFF, kept >> 32
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    _call(_libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)))


def limit_time(cpu_s: int) -> None:
    """Limit the processor time of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def write_back(directory: str) -> None:
    """Have everything of a file system on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _call(_libc.syncfs(fd))
    finally:
        os.close(fd)


def _pass_on(pid: int) -> None:
    """End as the child ends."""
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _call(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

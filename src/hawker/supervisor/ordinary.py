"""What an ordinary user's supervisor does to mount and to run containers: it becomes root of a user namespace.

Root there is the user itself, and its other users are those that /etc/subuid and /etc/subgid give it, in their order
from 1 on (`hawker.subids`): as layers are unpacked, so that what they own is theirs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil

from hawker import subids

CLONE_NEWUSER = 0x10000000
ALL = 2**32 - 1
LEAST = 65535  # subordinate ids, so that every usual one is there
_SWITCHES = {  # files that forbid user namespaces to ordinary users when they say so
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
    "/proc/sys/user/max_user_namespaces": "0",
}


def missing() -> str:
    """What an ordinary user lacks for user namespaces, and how to get it; "" for nothing."""
    for path, value in _SWITCHES.items():
        if _read(path).strip() == value:
            return f"user namespaces are forbidden to ordinary users here ({path} is {value})"
    for tool, _ in subids.TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is missing: apt install uidmap"
    name = subids.user_name()
    for _, file in subids.TOOLS:
        if sum(count for _, count in subids.ranges(file)) < LEAST:
            return f"{file} gives {name} fewer than {LEAST} ids: usermod --add-subuids 100000-165535 --add-subgids " + (
                f"100000-165535 {name}"
            )
    return ""


def become_root(namespace_of: int = 0) -> None:
    """Be root of a new user namespace, or of the one that this process is in: nobody else has power over it. One thread
    only. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if namespace_of:
        fd = os.open(f"/proc/{namespace_of}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        done = libc.setns(fd, CLONE_NEWUSER)
        os.close(fd)
        if done < 0:
            raise OSError(ctypes.get_errno(), f"the user namespace of process {namespace_of} cannot be entered")
    else:
        _make(libc)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    inside.cache_clear()


def _make(libc: ctypes.CDLL) -> None:
    pid = os.getpid()
    ready, go = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:  # stays outside, where the tools have their rights
        text = "?"
        try:
            os.close(go)
            text = subids.map_users(pid) if os.read(ready, 1) else ""
        finally:
            os.write(say, text.encode())
            os._exit(0)
    os.close(ready)
    os.close(say)
    done = libc.unshare(CLONE_NEWUSER)
    problem = os.strerror(ctypes.get_errno()) if done < 0 else ""
    if done == 0:
        os.write(go, b"g")
    os.close(go)
    with open(said, "rb") as pipe:
        problem = problem or pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if problem:
        raise PermissionError(f"a user namespace cannot be made: {problem}")


@functools.cache
def inside() -> bool:
    """Whether this process is in a user namespace: there is root, but not the host's."""
    return _read("/proc/self/uid_map").split() != ["0", "0", str(ALL)]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""

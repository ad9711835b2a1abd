"""File systems of machines: overlays, bind mounts and file systems in memory, in a mount namespace of our own.

What is mounted here is seen by this process and its children only, and ends with the last of them: nothing has to be
unmounted after a crash. Errors are OSErrors whose text says what was to be mounted where.

A machine with a user namespace sees the layers of its image, which belong to the host's root and are shared, as its
own: they are shown through idmapped mounts (Linux 5.19 for overlays), so no file is copied or changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hawker.supervisor import ordinary

# <linux/mount.h>, <linux/fcntl.h>
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE, MS_SLAVE = 0x4000, 1 << 18, 1 << 19
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x100000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442  # on every architecture

# Layers come from strangers: what their extended attributes say of renamed or partly copied files is not believed.
OVERLAY = "index=off,metacopy=off,redirect_dir=nofollow"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class IdMap:
    """Users and groups of a machine: id `n` inside is `base + n` on the host, for `count` ids."""

    base: int
    count: int = 65536

    def outside(self, number: int) -> int:
        """The host's id. Raises ValueError for one that the machine does not have."""
        if not 0 <= number < self.count:
            raise ValueError(f"id {number}: this machine has ids up to {self.count - 1}")
        return self.base + number


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def own_namespace() -> None:
    """Give this process and its children mounts of their own. Mounts that the host makes later are still
    seen here (propagation "slave"), ours are not seen there. Needs root (CAP_SYS_ADMIN); one thread only."""
    _check(_libc.unshare(CLONE_NEWNS), "a mount namespace of its own cannot be made")
    _mount("none", "/", None, MS_REC | MS_SLAVE, None)


def private_namespace(*, cgroups: bool = True) -> None:
    """An `own_namespace` for containers. On a host with both versions of cgroups, version 2's tree is unmounted here,
    because crun refuses to work beside it. Without `cgroups` none are to be used: they are covered, for a user
    namespace cannot unmount what is the host's."""
    own_namespace()
    if not cgroups:
        mount_tmpfs("/sys/fs/cgroup", size_bytes=4096)
        return
    kinds: dict[str, list[str]] = {"cgroup": [], "cgroup2": []}
    for kind, target in _mounted():
        if kind in kinds:
            kinds[kind].append(target)
    if kinds["cgroup"]:
        for target in kinds["cgroup2"]:
            unmount(target)


def user_namespace(ids: IdMap) -> int:
    """A descriptor (closed on exec) of a new user namespace with this map, for idmapped mounts."""
    ready, tell_ready = os.pipe()
    wait, keep = os.pipe()  # the child ends when `keep` is closed, also by our death
    pid = os.fork()
    if pid == 0:
        try:
            os.close(keep)
            if _libc.unshare(CLONE_NEWUSER) == 0:
                os.write(tell_ready, b"y")
            os.close(tell_ready)
            os.read(wait, 1)
        finally:
            os._exit(0)
    try:
        os.close(wait)
        os.close(tell_ready)
        if not os.read(ready, 1):
            raise OSError(errno.EPERM, "a user namespace cannot be made (see /proc/sys/user/max_user_namespaces)")
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/{pid}/{name}", f"0 {ids.base} {ids.count}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.close(keep)
        os.waitpid(pid, 0)


def mount_overlay(
    lowers: Sequence[str],
    upper: str,
    work: str,
    target: str,
    *,
    ids: IdMap | None = None,
    volatile: bool = False,
) -> None:
    """Mount an overlay of `lowers` (topmost first) with what is written kept in `upper`; `work` is an empty directory
    on the same file system. `upper` and `work` are made where they are missing. With `ids` the files of the layers
    show up as owned by the machine's ids, without a change to them. `volatile`: nothing written needs to outlive a
    power cut, so fsync does nothing; `upper` must not be mounted again then. nodev."""
    _make_upper(upper, lowers[0] if lowers else None, ids)
    os.makedirs(work, mode=0o700, exist_ok=True)
    if not lowers:  # an image of nothing: overlayfs wants at least one
        bind(upper, target)
    elif ids is None:
        _overlay(lowers, upper, work, target, volatile)
    else:
        _shifted_overlay(lowers, upper, work, target, volatile, ids)


def bind(source: str, target: str, *, read_only: bool = False, ids: IdMap | None = None) -> None:
    """Show the directory or file `source` (and what is mounted below it, unless `ids` is given) at `target`. With `ids`
    its owner 0 is the machine's root, and what the machine writes is owned so on the host. nodev, nosuid."""
    with _tree(source, recursive=not ids) as tree:
        attributes = MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | (MOUNT_ATTR_RDONLY if read_only else 0)
        _set_attributes(tree, attributes, source, recursive=not ids)
        if ids:
            namespace = user_namespace(ids)
            try:
                _set_attributes(tree, MOUNT_ATTR_IDMAP, source, namespace=namespace)
            finally:
                os.close(namespace)
        _move_mount(tree, target, source)


def mount_tmpfs(target: str, *, size_bytes: int, mode: int = 0o755, ids: IdMap | None = None) -> None:
    """A file system in memory. It counts towards the group of the process that writes. nodev, nosuid."""
    owner = f",uid={ids.base},gid={ids.base}" if ids else ""
    _mount("tmpfs", target, "tmpfs", MS_NODEV | MS_NOSUID, f"size={size_bytes},mode={mode:o}{owner}")


def unmount(target: str) -> None:
    """Take off what is mounted at `target` and below, once nobody uses it any more. Nothing mounted there: success."""
    while _libc.umount2(os.fsencode(target), MNT_DETACH | UMOUNT_NOFOLLOW) == 0:
        pass  # until what was mounted first is off, too
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOENT):
        raise OSError(number, f"{target}: cannot be unmounted: {os.strerror(number)}")


def _make_upper(upper: str, lower: str | None, ids: IdMap | None) -> None:
    """The root directory of the machine is this one: it looks as the image has it."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(upper)
        model = os.stat(lower) if lower else None
        shift = ids.base if ids else 0
        os.chown(upper, shift + (model.st_uid if model else 0), shift + (model.st_gid if model else 0))
        os.chmod(upper, stat.S_IMODE(model.st_mode) if model else 0o755)


def _overlay(lowers: Sequence[str], upper: str, work: str, target: str, volatile: bool) -> None:
    what = f"overlay of {len(lowers)} layers"
    with contextlib.ExitStack() as stack:
        # By descriptor: the kernel takes a page of options, which the paths of many layers would not fit into, and
        # splits them at ":" and ",".
        names = []
        for path in (*lowers, upper, work):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            names.append(f"/proc/self/fd/{fd}")
        options = f"lowerdir={':'.join(names[:-2])},upperdir={names[-2]},workdir={names[-1]},{OVERLAY}"
        options += ",userxattr" * ordinary.inside() + ",volatile" * volatile
        if len(options) >= os.sysconf("SC_PAGESIZE"):
            raise OSError(errno.E2BIG, f"{what} cannot be mounted at {target}: too many layers")
        _mount("overlay", target, "overlay", MS_NODEV, options, what)


def _shifted_overlay(lowers: Sequence[str], upper: str, work: str, target: str, volatile: bool, ids: IdMap) -> None:
    """The idmapped layers are mounted on a scaffold, because overlayfs takes none that are mounted nowhere (before
    Linux 6.15). It holds them by itself, so the scaffold goes from beneath it."""
    with contextlib.ExitStack() as stack:
        namespace = user_namespace(ids)
        stack.callback(os.close, namespace)
        with _scaffold(target):
            places = []
            for number, lower in enumerate(lowers):
                places.append(f"{target}/{number}")
                os.mkdir(places[-1])
                with _tree(lower) as tree:
                    _set_attributes(tree, MOUNT_ATTR_IDMAP, lower, namespace=namespace)
                    _move_mount(tree, places[-1], lower)
            os.mkdir(f"{target}/merged")
            _overlay(places, upper, work, f"{target}/merged", volatile)
            merged = stack.enter_context(_tree(f"{target}/merged"))
        _move_mount(merged, target, f"overlay of {len(lowers)} layers")


@contextlib.contextmanager
def _scaffold(target: str) -> Iterator[None]:
    _mount("scaffold", target, "tmpfs", MS_NODEV | MS_NOSUID, "size=1m,mode=700")
    try:
        yield
    finally:
        _check(_libc.umount2(os.fsencode(target), MNT_DETACH | UMOUNT_NOFOLLOW), f"{target}: cannot be unmounted")


@contextlib.contextmanager
def _tree(path: str, *, recursive: bool = False) -> Iterator[int]:
    """A copy of the mount of `path`, mounted nowhere yet."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    tree = _check(
        _libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"{path}: cannot be shown elsewhere"
    )
    try:
        yield tree
    finally:
        os.close(tree)


def _set_attributes(tree: int, attributes: int, what: str, *, recursive: bool = False, namespace: int = 0) -> None:
    wanted = _MountAttr(attr_set=attributes, userns_fd=namespace)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    done = _libc.syscall(SYS_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(wanted), ctypes.sizeof(wanted))
    hint = ": its file system has no idmapped mounts" if attributes & MOUNT_ATTR_IDMAP else ""
    _check(done, f"{what}: cannot be mounted with the attributes {attributes:#x}{hint}")


def _move_mount(tree: int, target: str, what: str) -> None:
    done = _libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    _check(done, f"{what}: cannot be mounted at {target}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None, what: str = "") -> None:
    done = _libc.mount(
        source.encode(),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    _check(done, f"{what or source} cannot be mounted at {target}" + (f" ({options})" if options else ""))


def _mounted() -> Iterator[tuple[str, str]]:
    """(kind, target) of everything that is mounted here; proc(5), mountinfo."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            yield right.split(" ", 1)[0], left.split(" ")[4].encode().decode("unicode_escape")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result

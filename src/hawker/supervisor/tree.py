"""A program that runs from the tree of an image with little isolation: the host's network and processes, users of its
own, and a root directory of its own, mounted where only the supervisor and its children see it.

It is made and released as containers are, with our init in the place of a runtime: it changes the root directory,
the user and the directory, and tells how the program ended. Files and directories are made in the tree without leaving
it: its symbolic links mean paths of that tree, never of the host.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hawker.supervisor import mounts, proc
from hawker.supervisor.calls import MakeTree
from hawker.supervisor.common import Common
from hawker.supervisor.container import Container, new_record
from hawker.supervisor.instance import Beside, Instance
from hawker.supervisor.making import GO_FD, STATUS_FD, Making, make_directory, write_new
from hawker.supervisor.programs import Invocation, open_terminal
from hawker.supervisor.status_file import STATUS, words
from hawker.supervisor.users import give

TREE: Final = "tree"
USERS_FD: Final = 5
_MS_BIND, _MS_REMOUNT = 0x1000, 0x20
_SYS_OPENAT2 = 437  # on every architecture
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 0x10, 0x02
_HOW = struct.Struct("=QQQ")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def directory(root: int, path: str, owner: int) -> int:
    """A descriptor of this directory, made with those above it where they are missing, which are the owner's then.
    Raises OSError."""
    done = ""
    fd = _open(root, ".", os.O_PATH | os.O_DIRECTORY)
    for name in filter(None, path.split("/")):
        done = f"{done}/{name}"
        try:
            below = _open(root, done, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
                below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)
            finally:
                os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            os.close(fd)
        fd = below
    return fd


def write(root: int, path: str, content: bytes, mode: int, owner: int) -> None:
    """Put a file there in the place of whatever has that name. Raises OSError."""
    where, _, name = path.rpartition("/")
    parent = directory(root, where, owner)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        write_new(name, content, mode, owner, parent)
    finally:
        os.close(parent)


def _open(root: int, path: str, flags: int) -> int:
    how = _HOW.pack(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    fd: int = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{path}: {os.strerror(number or errno.EIO)}")
    return fd


class Tree(Container):
    """`record.made_of` has besides `init`, `cwd` and `user`, as the init takes them."""

    common: Common

    def members(self) -> list[int]:
        return Instance.members(self)

    def describe(self) -> list[dict[str, Any]]:
        return Instance.describe(self)

    def run_beside(self, invocation: Invocation, done: Beside) -> None:
        program, terminal = self._program(), invocation.terminal
        env = {**invocation.environment(proc.environ_of_program(program)), proc.MARKER: self.mark}
        made_of, users = self.record.made_of, -1
        command = init_argv(made_of["init"], f"/proc/{program}/root", made_of["cwd"], made_of["user"], invocation.argv)
        master, slave = open_terminal(*terminal) if terminal else (-1, -1)
        command[1:1] = ["--go-fd", str(GO_FD)]
        read, tell = os.pipe2(os.O_CLOEXEC)
        wait, go = os.pipe2(os.O_CLOEXEC)
        ends = {0: slave, 1: slave, 2: slave} if terminal else dict(invocation.descriptors)
        self.children.expect(True)
        try:
            given = {**ends, STATUS_FD: tell, GO_FD: wait}
            if self.record.user is not None:
                give(ends.values(), self.record.user)
                users = given[USERS_FD] = os.open(f"/proc/{program}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                command[1:1] = _users(0)
            pid = self.children.spawn(command, env, given, lambda status: None)
            if self._groups:
                self._groups.attach(self.record.group, pid)
            os.write(go, b"g")
        except OSError:
            self.children.expect(False)
            os.close(read)
            if terminal:
                os.close(master)
            raise
        finally:
            for fd in (tell, wait, go, *([slave] if terminal else []), *([users] if users >= 0 else [])):
                os.close(fd)
        self.children.forget(pid)  # until it is known whether the command runs
        os.set_blocking(read, False)
        told = _Told(read)
        self.children.translate(pid, told.status)
        self.common.loop.watch(read, lambda mask: self._told_of_command(told, pid, master, done))

    def _told_of_command(self, told: _Told, pid: int, master: int, done: Beside) -> None:
        self.common.loop.forget(told.fd)
        began = told.first()
        try:
            if "started" in began:
                done([pid, began["started"]], master, "")
            else:
                done([], master, str(began.get("error", "it ended before it was started")))
        finally:
            self.children.expect(False)

    def _program(self) -> int:
        """The process that the init started."""
        said = words(self.path + STATUS)
        return int(said[0].get("started", self.record.pid)) if said else self.record.pid


class _Told:
    """Reads what the init of a command tells, as far as it has come."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lines: list[bytes] = []
        self._needed = 2  # by whoever waits for the start, and for the end

    def first(self) -> dict[str, Any]:
        """Whether it began. Empty when it said nothing. Called once."""
        self._read()
        found: dict[str, Any] = json.loads(self._lines[0]) if self._lines else {}
        self._part_read()
        return found

    def status(self, seen: int) -> int:
        """How the command ended, where its init ended with `seen`. Called once."""
        self._read()
        number = json.loads(self._lines[-1]).get("signal") if self._lines else None
        self._part_read()
        return -number if number else seen

    def _part_read(self) -> None:
        self._needed -= 1
        if not self._needed:
            os.close(self.fd)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._lines += os.read(self.fd, 8192).splitlines()


class TreeMaking(Making[MakeTree]):
    """Our init makes it."""

    def _lay_out(self) -> None:
        request, rootfs = self._request, f"{self._directory}/rootfs"
        for path in (self._directory, rootfs):
            make_directory(path, 0o700)
        owner = request.users
        own_disk = self._roots.mount(self._root, request.layers, f"{self._directory}/disk", rootfs, self._ids)
        self._disks = self._below(own_disk, [mount.source for mount in request.mounts])
        root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path in ("/proc", "/sys", "/dev"):
                with _at(root, path, owner) as target:
                    _bind_whole(path, target)
            for mount in request.mounts:
                with _at(root, mount.path, owner) as target:
                    mounts.bind(mount.source, target, read_only=mount.read_only, ids=self._ids)
            for tmpfs in request.tmpfs:
                with _at(root, tmpfs.path, owner) as target:
                    mounts.mount_tmpfs(target, size_bytes=tmpfs.size_mib << 20, mode=0o1777)
            for each in request.files:
                write(root, each.path, base64.b64decode(each.content), each.mode, owner)
        finally:
            os.close(root)
        if request.read_only:
            flags = ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | mounts.MS_RDONLY | mounts.MS_NODEV)
            _check(_libc.mount(None, os.fsencode(rootfs), None, flags, None), f"{rootfs} cannot be made read-only")

    def _spawn(self) -> None:
        request, groups = self._request, self.common.groups
        ends = self._open_ends()
        try:
            argv = init_argv(request.init, f"{self._directory}/rootfs", request.cwd, request.user, request.argv)
            argv[1:1] = ["--go-fd", str(GO_FD), *_users(request.users), *request.options]
            assert self._ids
            ends[USERS_FD] = mounts.user_namespace(self._ids)
            env = {**request.env, proc.MARKER: self.common.mark(self.machine, self.key)}
            if groups:
                groups.create(self._group, request.limits, self._disks)
            with groups.entered(self._group) if groups else contextlib.nullcontext():
                self.pid = self.common.children.spawn(argv, env, ends, self._ended)
        finally:
            for fd in ends.values():
                os.close(fd)
        self.common.loop.later(0, lambda: self._made(self.pid))

    def _made_instance(self) -> Container:
        request = self._request
        group = self._group if self.common.groups else ""
        made_of = {"init": request.init, "cwd": request.cwd, "user": request.user}
        record = new_record(self.key, self.machine, self.pid, group, dict(request.note), "", self._root, TREE, made_of)
        record = replace(record, user=request.owner)
        tree = Tree(record, self.common.files, self.common.mark(self.machine, self.key), self.common.groups)
        tree.common = self.common
        return tree


def init_argv(init: str, root: str, cwd: str, user: str, argv: Sequence[str]) -> list[str]:
    options = {"--status-fd": str(STATUS_FD), "--root": root, "--cwd": cwd, "--user": user}
    return [init, *(word for option in options.items() for word in option), "--", *argv]


def _users(first: int) -> list[str]:
    """Options to run as the users of a machine; whoever makes a terminal needs the first user's number."""
    return ["--users", f"{USERS_FD}:{first}"]


@contextlib.contextmanager
def _at(root: int, path: str, owner: int) -> Any:
    """The place of a path in the tree, by a name that leads nowhere else."""
    fd = directory(root, path, owner)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _bind_whole(source: str, target: str) -> None:
    """Bind it as it is, with its devices."""
    flags = ctypes.c_ulong(_MS_BIND | mounts.MS_REC)
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"{source} cannot be shown inside")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

"""A program of the host that is not trusted: a hypervisor, whose guest may have got into it.

It runs as a user of its own, without capabilities and without a way to get any, and sees a root directory that is made
for it: the host's programs and libraries, a few devices, its own processes, and the files that it is given. It has no
network, not even the host's loopback. All of that is in namespaces of its own, and ends with it. What it may not open
or make is opened here and handed over: a network interface, the sockets that it serves.

Where the supervisor is an ordinary user's the program runs as that user, and sees what the user sees.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import stat
import struct
from dataclasses import dataclass
from typing import NoReturn

from hawker.supervisor import mounts, users
from hawker.supervisor.calls import Confined
from hawker.supervisor.programs import Launch

_TUN = "/dev/net/tun"
_SET_IFF = 0x400454CA  # <linux/if_tun.h>
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x4000000, 0x8000000, 0x40000000
_DETACH = 2
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc/ld.so.cache", "etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Confinement(Confined):
    """How to confine one program. `{name}` of a socket and `{tap}` in its arguments become the numbers of their
    descriptors. `scratch` is a directory that is empty, and may be shared. As a user of its own the program can make
    none of its `own` files larger than the largest of them is, nor any other file than `most_mib`."""

    scratch: str = ""
    most_mib: int = 0

    def open(self, directory: str) -> dict[str, int]:
        """What is handed over, by name. To be closed once the program has it. Raises OSError."""
        found: dict[str, int] = {}
        try:
            for name in self.sockets:
                found[name] = _listening(directory, name)
            if self.tap:
                found["tap"] = _open_tap(self.tap)
        except OSError:
            for fd in found.values():
                os.close(fd)
            raise
        return found

    def spawn(self, launch: Launch) -> int:
        """Its pid. Raises OSError with what was in the way, and nothing of it is left then."""
        os.makedirs(self.scratch, mode=0o700, exist_ok=True)
        read, tell = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if pid == 0:
                _become(self, launch, tell)
        finally:
            os.close(tell)
        with open(read, "rb") as pipe:
            problem = pipe.read().decode(errors="replace")  # it closes when the program begins
        if problem:
            os.waitpid(pid, 0)
            raise OSError(problem)
        return pid


def _become(confinement: Confinement, launch: Launch, tell: int) -> NoReturn:
    """Turn the child into the program."""
    try:
        signal.set_wakeup_fd(-1)  # the parent's
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and what is ignored stays so
            signal.signal(ignored, signal.SIG_DFL)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((null, *launch.output)):
            os.dup2(fd, number)
        for fd in launch.kept:
            os.set_inheritable(fd, True)
        os.chdir(launch.cwd)
        if confinement.user is not None:
            _bound_files(confinement)
            _enter_root(confinement, confinement.user, launch.program, launch.cwd)
            users.become(confinement.user)
        users.forswear_privileges()
        os.execve(launch.program, list(launch.argv), dict(launch.env))
    except BaseException as error:
        os.write(tell, (str(error) or repr(error)).encode()[:4000])
    finally:
        os._exit(127)


def _bound_files(confinement: Confinement) -> None:
    """A guest's disk, which has a room of its own on the host only as long as nobody appends to it."""
    sizes = [os.stat(path).st_size for path in confinement.own]
    most = max(confinement.most_mib << 20, *sizes, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _enter_root(confinement: Confinement, user: int, program: str, cwd: str) -> None:
    scratch = confinement.scratch
    umask = os.umask(0o022)  # the user shall find what is made here
    kinds = mounts.CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _check(_libc.unshare(kinds), "namespaces of its own cannot be made")
    _mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
    _mount("root", scratch, "tmpfs", mounts.MS_NOSUID, "size=64k,mode=755")
    for name in _SYSTEM:
        _show_system(name, scratch)
    home = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    system = ("/usr", "/bin", "/sbin", "/lib")
    elsewhere = [] if f"{home}/".startswith(tuple(f"{path}/" for path in system)) or home == "/" else [home]
    for path in (*elsewhere, *confinement.shown):
        mounts.bind(path, _place(scratch, path), read_only=True)
    for path in confinement.own:
        mounts.bind(path, _place(scratch, path))
    for path in (*_DEVICES, *confinement.devices):
        about = os.stat(path)
        target = f"{scratch}{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.mknod(target, stat.S_IFCHR | 0o600, about.st_rdev)
        os.chown(target, user, user)
    os.makedirs(f"{scratch}/proc")
    flags = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
    _mount("proc", f"{scratch}/proc", "proc", flags, "hidepid=2,subset=pid")
    os.makedirs(f"{scratch}{cwd}", exist_ok=True)
    os.chdir(scratch)
    _check(_libc.pivot_root(b".", b"."), "the root directory cannot be changed")
    _check(_libc.umount2(b".", _DETACH), "the host's mounts cannot be let go of")
    os.chdir(cwd)
    os.umask(umask)


def _show_system(name: str, root: str) -> None:
    """A part of the host's own system, which may be a link to another one."""
    source, target = f"/{name}", f"{root}/{name}"
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.exists(source):
        mounts.bind(source, _place(root, source), read_only=True)


def _place(root: str, path: str) -> str:
    """Where to mount what has this name here: an empty directory, or an empty file."""
    target = f"{root}{path}"
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return target


def _listening(directory: str, name: str) -> int:
    """Make a socket of this name that only we can connect to."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mask = os.umask(0o177)
    try:
        path = f"/proc/self/fd/{fd}/{name}"  # the directory's own may be longer than the 108 bytes of a socket's
        if os.path.lexists(path):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            listener.bind(path)
            listener.listen(8)
            return listener.detach()
    finally:
        os.umask(mask)
        os.close(fd)


def _open_tap(name: str) -> int:
    """A network interface that ends when the last of those that have it ends."""
    fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_IFF, struct.pack("<16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, f"the network interface {name} cannot be made: {error.strerror}") from error
    return fd


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = (os.fsencode(source), os.fsencode(target), os.fsencode(kind) if kind else None)
    done = _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _check(done, f"{kind or source} cannot be mounted at {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

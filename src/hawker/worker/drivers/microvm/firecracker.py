"""Machines run by Firecracker, jailed where its jailer is here and we are root.

It runs in a place of its own: a directory of the machine's, its working directory, or its root where it is jailed.
Everything it opens is linked there under one name, whether it is jailed or not, so that a snapshot, which remembers
names, fits wherever it is loaded. The place is made again for every start and goes with the machine's directory.

The guest has no virtio ports: see `init/guest_console.c`. What its program writes comes out of Firecracker's standard
output, both streams as one; how it ended is read from the status drive, a file beside the record.

A jailed one runs as the machine's user, so it may not make a network interface: that is made for it, and goes when the
machine's network is detached. There are no templates: a machine always boots. It has only run against a server of ours
that has Firecracker's API, for want of a processor that runs guests.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import struct
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from hawker.supervisor.calls import Confined
from hawker.supervisor.status_file import last_words
from hawker.worker.drivers.base import Exit
from hawker.worker.drivers.microvm import firecracker_api
from hawker.worker.drivers.microvm.firecracker_api import AGENT_PORT, FirecrackerError, Jail, Snapshot
from hawker.worker.drivers.microvm.hypervisor import Dial, Ready, readable
from hawker.worker.drivers.microvm.qemu import Vm
from hawker.worker.drivers.microvm.records import MEMORY, STATE

STATUS = "status"
STATUS_BYTES = 4096  # init/guest_console.c knows the drive by it
SNAPSHOT = Snapshot(state=STATE, memory=MEMORY)
RETRY_S = 0.002
_USERS, _USERS_COUNT = 0x70000000, 1 << 24  # beyond those that systems and containers give out
_TUN = "/dev/net/tun"
_SET_IFF, _SET_PERSIST, _SET_OWNER, _SET_GROUP = 0x400454CA, 0x400454CB, 0x400454CC, 0x400454CE  # <linux/if_tun.h>
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000


def jail(vm: Vm, directory: Path) -> Jail | None:
    """Where this machine is locked up. None where there is no jailer, or it could not work."""
    if not vm.jailer:
        return None
    digest = blake2b(str(directory).encode(), digest_size=8)
    user = vm.user or _USERS + int.from_bytes(digest.digest()) % _USERS_COUNT  # those that were made before had these
    name = re.sub(r"[^A-Za-z0-9]", "-", directory.name)[:40]
    return Jail(
        id=f"{name}-{digest.hexdigest()}", base=directory / "jail", uid=user, gid=user, program=Path(vm.binary).name
    )


def place(vm: Vm, directory: Path) -> Path:
    """The machine's working directory, as the host sees it."""
    jailed = jail(vm, directory)
    return jailed.root if jailed else directory / "firecracker"


class Firecracker:
    """A `Hypervisor`."""

    def prepare(self, vm: Vm, directory: Path) -> list[str]:
        jailed = jail(vm, directory)
        shutil.rmtree(jailed.base if jailed else place(vm, directory), ignore_errors=True)
        there = place(vm, directory)
        there.mkdir(mode=0o700, parents=True)
        status = directory / STATUS
        files = {"kernel": vm.kernel.vmlinux, "initrd": vm.kernel.initrd, "image": vm.image, "machine": vm.disk}
        if vm.incoming:
            files |= {STATE: str(directory / STATE), MEMORY: str(directory / MEMORY)}
        else:
            status.write_bytes(bytes(STATUS_BYTES))
            status.chmod(0o600)
        for name, path in {**files, STATUS: str(status)}.items():
            os.link(path, there / name, follow_symlinks=False)
        if jailed is None:
            return [vm.binary, "--api-sock", "api", "--level", "Error"]
        for name in ("kernel", "initrd", "image"):  # shared by all, but nobody gets where they are
            readable(there / name)
        for kept in (Path(vm.image).parent, Path(vm.kernel.vmlinux).parent):
            kept.chmod(0o700)
        for own in (there, *(there / name for name in ("machine", STATUS, STATE, MEMORY))):
            with contextlib.suppress(FileNotFoundError):
                os.chown(own, jailed.uid, jailed.gid, follow_symlinks=False)
        if vm.tap:
            make_tap(vm.tap, jailed.uid, jailed.gid)
        return [*firecracker_api.jailed(vm.jailer, vm.binary, jailed), "--level", "Error"]

    def confined(self, vm: Vm) -> Confined | None:
        return None

    def dial(self, vm: Vm, directory: Path) -> Dial:
        return lambda protocol: dial(place(vm, directory), protocol)

    async def up(self, vm: Vm, directory: Path) -> None:
        there = place(vm, directory)
        await listening(there)
        await firecracker_api.ask(there, firecracker_api.boot(vm))

    async def save(self, vm: Vm, directory: Path, state: Path) -> None:
        there = place(vm, directory)
        memory = directory / MEMORY
        for path in (there / STATE, there / MEMORY, memory):  # what it was resumed from is still its memory
            path.unlink(missing_ok=True)
        await firecracker_api.ask(there, firecracker_api.save(SNAPSHOT))
        for made, kept in ((there / MEMORY, memory), (there / STATE, state)):
            if not stat.S_ISREG(os.lstat(made).st_mode):
                raise FirecrackerError(f"{made.name} is not a file any more")
            made.rename(kept)
        await asyncio.to_thread(_sync, memory)

    async def load(self, vm: Vm, directory: Path, state: Path, *, memory: bool, ready: Ready) -> None:
        there = place(vm, directory)
        await listening(there)
        await firecracker_api.ask(there, firecracker_api.load(SNAPSHOT))
        await ready()
        await firecracker_api.ask(there, firecracker_api.go_on())
        for path in (there / STATE, there / MEMORY, directory / MEMORY):  # mapped: it stays until it ends
            path.unlink(missing_ok=True)

    async def runs(self, vm: Vm, directory: Path) -> bool:
        there = place(vm, directory)
        await listening(there)
        return await firecracker_api.state(there) == "Running"

    async def run_on(self, vm: Vm, directory: Path) -> bool:
        there = place(vm, directory)
        await listening(there)
        if await firecracker_api.state(there) != "Paused":
            return False
        await firecracker_api.ask(there, firecracker_api.go_on())
        return True

    def ended(self, vm: Vm, directory: Path, seen: Exit) -> Exit:
        if told := last_words(str(directory / STATUS)):
            return replace(seen, **{**told, "oom_killed": told["oom_killed"] or seen.oom_killed})
        if seen.code is None:
            return seen
        return replace(seen, code=None, error=f"Firecracker ended with exit code {seen.code} before the guest said how")


async def listening(there: Path) -> None:
    """Wait until it serves its API. Only cancelling ends the wait."""
    while True:
        if await firecracker_api.listens(there):
            return
        await asyncio.sleep(RETRY_S)


async def dial(there: Path, protocol: asyncio.Protocol) -> bool:
    """Connect to the guest's agent: a host says which port it wants and is told when it has it (docs/vsock.md)."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        try:
            fd = os.open(there, os.O_PATH | os.O_CLOEXEC)
            try:
                await loop.sock_connect(sock, f"/proc/self/fd/{fd}/vsock")
            finally:
                os.close(fd)
            await loop.sock_sendall(sock, f"CONNECT {AGENT_PORT}\n".encode())
            said = b""
            while not said.endswith(b"\n") and len(said) < 32:
                if not (byte := await loop.sock_recv(sock, 1)):
                    return False  # the guest does not listen yet
                said += byte
        except (FileNotFoundError, ConnectionError):
            return False
        if not said.startswith(b"OK "):
            return False
        await loop.create_unix_connection(lambda: protocol, sock=sock)
        sock = None  # type: ignore[assignment]  # the transport's now
        return True
    finally:
        if sock:
            sock.close()


def make_tap(name: str, uid: int, gid: int) -> None:
    """A network interface that stays, for a user who may not make one. Raises OSError."""
    fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_IFF, struct.pack("<16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
        fcntl.ioctl(fd, _SET_OWNER, uid)
        fcntl.ioctl(fd, _SET_GROUP, gid)
        fcntl.ioctl(fd, _SET_PERSIST, 1)
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)

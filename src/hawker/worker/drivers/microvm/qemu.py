"""QEMU: its command line, and a client of its control socket (QMP, docs/interop/qmp-spec.txt).

The machine is `microvm`: no PCI, no firmware worth the name, devices on virtio-mmio. Where the processor is emulated
the guest cannot measure its clock against a timer that this machine does not have, and is told its rate on the kernel's
command line. Its directory is QEMU's working directory: the sockets `qmp` and `agent` are there. What QEMU may not
open or make itself is opened by the supervisor, which puts the numbers of descriptors into the command line.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from hawker.supervisor.calls import Confined
from hawker.worker.drivers.microvm.agent import dial
from hawker.worker.drivers.microvm.disk import DEVICE_BYTES
from hawker.worker.drivers.microvm.kernel import Kernel

BINARY = "qemu-system-x86_64"
KVM = "/dev/kvm"
PACKAGE = "qemu-system-x86"
MIB = 1 << 20
_CODE_CACHE_MIB = 64  # of an emulated processor; QEMU's own default is a gigabyte
LINE_MOST = 1 << 20  # bytes of what QEMU says: its longest answers to us have some hundred
STATES_MOST = 64  # of a migration, that nobody has looked at yet; there are some five
RETRY_S = 0.01
MARGIN_S = 10  # a guest may be ahead by what it might have read or written in so many seconds
HALTED = frozenset(("paused", "finish-migrate", "postmigrate"))
"""What QEMU calls a machine that was stopped, one whose state is being written to its end, and one with its state
written (`RunState` of its API)."""
_SAVING = frozenset(("setup", "active", "pre-switchover", "device", "cancelling"))  # its `MigrationStatus`
OVERHEAD_MIB = {"kvm": 64, "tcg": 96 + _CODE_CACHE_MIB}  # what QEMU takes beside the guest's memory


class HypervisorError(Exception):
    """What a hypervisor refused, in its words, or that it is gone."""


class QemuError(HypervisorError):
    """What QEMU refused, in its words, or that it is gone."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the guest's memory is: in `file`, shared with it or a copy of it, or with "" nowhere but in memory."""

    file: str = ""
    shared: bool = False


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual machine. Two that differ only in their disks, both or none with a network card, can be restored from
    each other's state. `image`, `disk` are files, "" for a template, which has none. The guest may read `disk_bytes` in
    `disk_operations` a second of both together, and write as much; 0 is without bound. `tap` is the network interface
    that QEMU makes, "-" for a card that is connected to nothing, "" for no card. `output` False: nobody hears it.
    `binary` is that of `vmm`; Firecracker has no use for `tsc_khz`, `memory` and `output`."""

    binary: str
    accelerator: Literal["kvm", "tcg"]
    cpus: int
    memory_mib: int
    kernel: Kernel
    tsc_khz: int = 0
    image: str = ""
    disk: str = ""
    disk_bytes: int = 0
    disk_operations: int = 0
    tap: str = ""
    memory: Memory = Memory()
    incoming: bool = False
    output: bool = True
    vmm: Literal["qemu", "firecracker"] = "qemu"
    jailer: str = ""  # of Firecracker, "" to do without
    user: int = 0  # of the host, that its hypervisor runs as; 0: as who runs the worker
    preload: str = ""  # a library for QEMU, see init/reading.c


def command(vm: Vm) -> list[str]:
    """The command line."""
    cpu, accel = ("host", "kvm") if vm.accelerator == "kvm" else ("max", f"tcg,tb-size={_CODE_CACHE_MIB}")
    if vm.accelerator == "tcg":
        accel += f",thread={'single' if vm.cpus == 1 else 'multi'}"
    argv = [
        vm.binary,
        *("-machine", "microvm,x-option-roms=off,pit=on,pic=on,rtc=on,isa-serial=off,acpi=on,memory-backend=memory"),
        *("-accel", accel, "-cpu", cpu, "-smp", str(vm.cpus), "-m", f"{vm.memory_mib}M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-object", _memory(vm)),
        *("-kernel", vm.kernel.vmlinux, "-initrd", vm.kernel.initrd, "-append", _append(vm)),
        *("-global", "virtio-mmio.force-legacy=false"),
        *("-chardev", "socket,id=qmp,fd={qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        *_disk(vm, "image", vm.image, read_only=True),
        *_disk(vm, "machine", vm.disk, read_only=False),
        *("-device", "virtio-serial-device,max_ports=8"),
        *("-chardev", "socket,id=agent,fd={agent},server=on,wait=off"),
        *("-device", "virtserialport,chardev=agent,name=agent,nr=1"),
    ]
    targets = {"out": "/proc/self/fd/1", "err": "/proc/self/fd/2", "status": "/proc/self/fd/{status}"}
    for number, (name, path) in enumerate(targets.items(), start=2):
        backend = f"file,id={name},path={path},append=on" if vm.output else f"null,id={name}"
        argv += ["-chardev", backend, "-device", f"virtserialport,chardev={name},name={name},nr={number}"]
    if vm.tap == "-":
        argv += ["-netdev", "hubport,id=net,hubid=0", "-device", "virtio-net-device,netdev=net"]
    elif vm.tap:
        argv += ["-netdev", "tap,id=net,fd={tap}"]
        argv += ["-device", "virtio-net-device,netdev=net"]
    if vm.incoming:
        argv += ["-incoming", "defer"]
    return argv


def confined(vm: Vm) -> Confined:
    """What the hypervisor may do and gets."""
    sockets, tap = ["qmp", "agent"], "" if vm.tap == "-" else vm.tap
    if not vm.user:
        return Confined(sockets=sockets, tap=tap)
    own = [vm.disk, vm.memory.file if vm.memory.shared else ""]
    return Confined(
        user=vm.user,
        shown=list(filter(None, [*reads(vm), vm.preload if _copies(vm) else ""])),
        own=list(filter(None, own)),
        devices=[KVM] if vm.accelerator == "kvm" else [],
        sockets=sockets,
        tap=tap,
    )


def reads(vm: Vm) -> list[str]:
    """Files that it shares with others, and must not change."""
    memory = vm.memory.file if _copies(vm) else ""
    return [path for path in (vm.kernel.vmlinux, vm.kernel.initrd, vm.image, memory) if path]


def environment(vm: Vm) -> dict[str, str]:
    found = {"PATH": os.defpath}
    if vm.user and _copies(vm):
        found |= {"LD_PRELOAD": vm.preload, "HAWKER_READ_ONLY": vm.memory.file}
    return found


def _copies(vm: Vm) -> bool:
    """Its memory is a file that others have, too: it writes to copies of its pages."""
    return bool(vm.memory.file) and not vm.memory.shared


def _memory(vm: Vm) -> str:
    size = f"id=memory,size={vm.memory_mib}M"
    if not vm.memory.file:
        return f"memory-backend-ram,{size}"
    return f"memory-backend-file,{size},mem-path={_escaped(vm.memory.file)},share={'on' if vm.memory.shared else 'off'}"


def _disk(vm: Vm, name: str, path: str, *, read_only: bool) -> Sequence[str]:
    option = "on" if read_only else "off"
    if path:
        backend = f"file={_escaped(path)},format=raw,cache=writeback,discard=unmap,file.locking=off{_throttling(vm)}"
    else:
        backend = f"file.driver=null-co,file.size={DEVICE_BYTES},format=raw"
    drive = f"id={name},if=none,readonly={option},{backend}"
    return ("-drive", drive, "-device", f"virtio-blk-device,drive={name},serial={name}")


def _throttling(vm: Vm) -> str:
    """Options of a drive (docs/throttle.txt). All drives share one account, which has a margin to boot from: QEMU
    counts what the host has in memory as well."""
    most = {"bps": vm.disk_bytes, "iops": vm.disk_operations}
    bounds = [
        f",throttling.{unit}-{way}={number},throttling.{unit}-{way}-max={number * MARGIN_S}"
        for unit, number in most.items()
        for way in ("read", "write")
        if number
    ]
    return "".join(bounds) + ",throttling.group=disks" if bounds else ""


def _escaped(path: str) -> str:
    return path.replace(",", ",,")


def _append(vm: Vm) -> str:
    words = [
        "quiet loglevel=0 reboot=t panic=-1 mitigations=off nokaslr cryptomgr.notests audit=0 lsm= 8250.nr_uarts=0",
        "rcupdate.rcu_expedited=1",  # mounting and probing wait for it again and again
        "rdinit=/init",
    ]
    if vm.accelerator == "tcg":
        words.append(f"tsc_early_khz={vm.tsc_khz} tsc=reliable no_timer_check")
    return " ".join(words)


def host_tsc_khz(cpuinfo: str) -> int:
    """The rate that an emulated processor's time stamp counter has, from /proc/cpuinfo."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)
    return round(float(found.group(1)) * 1000) if found else 1_000_000


def binary() -> str:
    """QEMU's path, "" when it is not here."""
    return shutil.which(BINARY) or ""


class Qmp(asyncio.Protocol):
    """The control socket. One client at a time: another waits until this one has closed.

    A QEMU that a guest has got into may say anything, but not take the host's memory with it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._greeting: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._states: asyncio.Queue[str] = asyncio.Queue()

    @classmethod
    async def connect(cls, path: Path) -> Qmp:
        """Wait until QEMU listens. Only cancelling ends the wait, or its end."""
        it = cls()
        pause_s = 0.001
        while not await dial(path, it):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
        try:
            await asyncio.shield(it._greeting)
            await it.run("qmp_capabilities")
        except BaseException:
            await it.close()
            raise
        return it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "QMP" in message and not self._greeting.done():
                self._greeting.set_result(None)
            elif message.get("event") == "MIGRATION":
                if self._states.qsize() < STATES_MOST:
                    self._states.put_nowait(message["data"]["status"])
            elif (future := self._answers.pop(message.get("id"), None)) and not future.done():
                if "error" in message:
                    future.set_exception(QemuError(message["error"]["desc"]))
                else:
                    future.set_result(message["return"])
        if len(self._rest) > LINE_MOST and self._transport:
            self._rest = b""
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._states.put_nowait("gone")
        for future in (self._greeting, *self._answers.values()):
            if not future.done():
                future.set_exception(QemuError("QEMU is gone"))
        self._greeting.exception()
        if not self._gone.done():
            self._gone.set_result(None)

    async def close(self) -> None:
        if self._transport:
            self._transport.abort()
            await asyncio.shield(self._gone)

    async def run(self, name: str, **arguments: Any) -> Any:
        """Raises `QemuError`."""
        if self._transport is None or self._transport.is_closing():
            raise QemuError("QEMU is gone")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._transport.write(json.dumps({"execute": name, "arguments": arguments, "id": number}).encode() + b"\n")
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    async def quit(self) -> None:
        """Returns once QEMU has closed its socket."""
        with contextlib.suppress(QemuError):
            await self.run("quit")
        await asyncio.shield(self._gone)

    async def pass_file(self, fd: int) -> None:
        """Give QEMU a descriptor, named `state`."""
        assert self._transport is not None
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        text = json.dumps({"execute": "getfd", "arguments": {"fdname": "state"}, "id": number}).encode() + b"\n"
        there = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        with there:
            there.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        await future

    async def save(self, path: Path, *, memory: bool) -> None:
        """Write the state of the stopped machine, with its memory unless that is in a file of its own. Raises
        `QemuError`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            await self._capabilities(memory=memory)
            await self.run("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
            await self.pass_file(fd)
        finally:
            os.close(fd)
        await self.run("migrate", uri="fd:state")
        await self._migrated()

    async def save_no_more(self) -> None:
        """Whoever had the machine saved is gone: let nobody halt it once more when that is done."""
        await self.run("migrate_cancel")
        while (await self.run("query-migrate")).get("status") in _SAVING:  # noqa: ASYNC110  # it is asked
            await asyncio.sleep(RETRY_S)

    async def load(self, path: Path, *, memory: bool) -> None:
        """The other way round, into a machine that was started to wait for it. It stands still then, as it did."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._capabilities(memory=memory)
            await self.pass_file(fd)
        finally:
            os.close(fd)
        await self.run("migrate-incoming", uri="fd:state")
        await self._migrated()

    async def _capabilities(self, *, memory: bool) -> None:
        wanted = [{"capability": "events", "state": True}, {"capability": "x-ignore-shared", "state": not memory}]
        await self.run("migrate-set-capabilities", capabilities=wanted)

    async def _migrated(self) -> None:
        while (state := await self._states.get()) != "completed":
            if state in ("failed", "cancelled", "gone"):
                raise QemuError(f"the machine's state could not be moved: {state}")

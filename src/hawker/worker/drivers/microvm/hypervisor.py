"""What the driver asks of a hypervisor, and how QEMU does it. `firecracker` is the other one.

`directory` is the machine's, the same in every call. A hypervisor runs as a program of the driver's supervisor; what is
asked here goes over its control socket. Everything raises `HypervisorError` for what it refuses, and OSError.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from hawker.supervisor.calls import Confined
from hawker.worker.drivers.base import Exit
from hawker.worker.drivers.microvm import qemu
from hawker.worker.drivers.microvm.agent import dial
from hawker.worker.drivers.microvm.qemu import Qmp, Vm

Ready = Callable[[], Awaitable[None]]
Dial = Callable[[asyncio.Protocol], Awaitable[bool]]


def readable(path: Path) -> None:
    """Let everybody read a file that all machines share, and nobody but root write to it. Raises OSError."""
    if path.stat().st_mode & 0o777 != 0o444:
        path.chmod(0o444)


class Hypervisor(Protocol):
    def prepare(self, vm: Vm, directory: Path) -> list[str]:
        """Make the files that the hypervisor needs and remove those of an earlier one. Returns its command line."""

    def confined(self, vm: Vm) -> Confined | None:
        """How the supervisor is to confine it. None: it confines itself."""

    def dial(self, vm: Vm, directory: Path) -> Dial:
        """What connects a protocol to the guest's init; False while nobody answers."""

    async def up(self, vm: Vm, directory: Path) -> None:
        """Make a hypervisor that was just started boot its machine. Returns when its network interface is there."""

    async def save(self, vm: Vm, directory: Path, state: Path) -> None:
        """Halt the machine and write its memory and devices to `state`, and perhaps files beside it."""

    async def load(self, vm: Vm, directory: Path, state: Path, *, memory: bool, ready: Ready) -> None:
        """Load what `save` wrote, in place of `up`. `ready` is called when all is there, before the machine runs on."""

    async def runs(self, vm: Vm, directory: Path) -> bool:
        """Whether its machine runs: it has booted, and neither waits for a state nor stands still."""

    async def run_on(self, vm: Vm, directory: Path) -> bool:
        """Let a halted machine run on. Returns whether it was halted, perhaps during or after saving its state."""

    def ended(self, vm: Vm, directory: Path, seen: Exit) -> Exit:
        """How the program ended, from how the supervisor saw its hypervisor end."""


class Qemu:
    def prepare(self, vm: Vm, directory: Path) -> list[str]:
        if vm.user:
            for path in qemu.reads(vm):
                readable(Path(path))
            if vm.disk and os.stat(vm.disk).st_uid != vm.user:  # from before machines had users, or from a backup
                os.chown(vm.disk, vm.user, vm.user)
        return qemu.command(vm)

    def confined(self, vm: Vm) -> Confined | None:
        return qemu.confined(vm)

    def dial(self, vm: Vm, directory: Path) -> Dial:
        return lambda protocol: dial(directory / "agent", protocol)

    async def up(self, vm: Vm, directory: Path) -> None:
        """It boots by itself, and its network interface was there before it."""

    async def save(self, vm: Vm, directory: Path, state: Path) -> None:
        qmp = await Qmp.connect(directory / "qmp")
        try:
            await qmp.run("stop")
            await qmp.save(state, memory=True)
        finally:
            await qmp.close()

    async def load(self, vm: Vm, directory: Path, state: Path, *, memory: bool, ready: Ready) -> None:
        qmp = await Qmp.connect(directory / "qmp")
        try:
            await qmp.load(state, memory=memory)
            await ready()
            await qmp.run("cont")
        finally:
            await qmp.close()

    async def runs(self, vm: Vm, directory: Path) -> bool:
        qmp = await Qmp.connect(directory / "qmp")
        try:
            return bool((await qmp.run("query-status"))["status"] == "running")
        finally:
            await qmp.close()

    async def run_on(self, vm: Vm, directory: Path) -> bool:
        qmp = await Qmp.connect(directory / "qmp")
        try:
            if (await qmp.run("query-status"))["status"] not in qemu.HALTED:
                return False
            await qmp.save_no_more()
            await qmp.run("cont")
            return True
        finally:
            await qmp.close()

    def ended(self, vm: Vm, directory: Path, seen: Exit) -> Exit:
        return seen  # the guest told the supervisor itself

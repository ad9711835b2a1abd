"""Templates: booted guests that were snapshotted before they were told what they are, one for each size.

A machine made of one takes its state from a file and maps its memory from another, copying only what it writes. What it
would share with others made of the same, clock, random numbers and names, it is given new ones before its program runs.
A template that cannot be used is removed, and machines boot instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from hawker.worker.drivers.microvm.agent import Agent
from hawker.worker.drivers.microvm.hypervisor import readable
from hawker.worker.drivers.microvm.qemu import Memory, Qmp, Vm

MOST = 8  # each takes some 100 MB of disk

MEMORY, STATE = "memory", "state"

Run = Callable[[Vm, Path], Awaitable[None]]
"""Start a hypervisor in a directory."""


class Templates:
    """The templates under `directory`: one in each directory, which is named by the template's size and what it was
    made of."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Remove what was left half made."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.glob(".making-*"):
            shutil.rmtree(path, ignore_errors=True)

    def name(self, vm: Vm) -> str:
        """The name of the template that this machine can be made of."""
        binary = os.stat(vm.binary)
        card = "card" if vm.tap else ""
        made_of = (vm.kernel.digest, vm.accelerator, vm.tsc_khz, card, binary.st_size, binary.st_mtime_ns)
        digest = blake2b(repr(made_of).encode(), digest_size=6).hexdigest()
        return f"{vm.cpus}-{vm.memory_mib}-{digest}"

    def find(self, vm: Vm) -> Path | None:
        path = self._directory / self.name(vm)
        if not (path / STATE).exists():
            return None
        os.utime(path)  # it is used: the one that was used longest ago goes first
        return path

    async def make(self, vm: Vm, run: Run) -> Path:
        """Boot a guest of this machine's size and snapshot it. Raises what booting raises; nothing is left then."""
        name = self.name(vm)
        making = self._directory / f".making-{name}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        try:
            card = f"hv-{name[-10:]}" if vm.tap else ""
            empty = replace(vm, image="", disk="", tap=card, incoming=False, output=False)
            _make_memory(making / MEMORY, vm)
            await run(replace(empty, memory=Memory(file=str(making / MEMORY), shared=True)), making)
            agent = await Agent.connect(making / "agent")
            await agent.close()
            qmp = await Qmp.connect(making / "qmp")
            try:
                await qmp.run("stop")
                await qmp.save(making / STATE, memory=False)
                await qmp.quit()
            finally:
                await qmp.close()
            for name_ in ("agent", "qmp"):
                with contextlib.suppress(FileNotFoundError):
                    (making / name_).unlink()
            if vm.user:  # it is not that user's any more, and nobody's to change
                os.chown(making / MEMORY, 0, 0)
                readable(making / MEMORY)
            path = self._directory / name
            shutil.rmtree(path, ignore_errors=True)
            os.rename(making, path)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        self._forget_old()
        return path

    def forget(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def _forget_old(self) -> None:
        found = sorted(self._directory.glob("[!.]*"), key=lambda path: path.stat().st_mtime)
        for path in found[:-MOST]:
            self.forget(path)


def _make_memory(path: Path, vm: Vm) -> None:
    """Make the file of the guest's memory: a confined hypervisor may not make it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, vm.memory_mib << 20)
        if vm.user:
            os.fchown(fd, vm.user, vm.user)
    finally:
        os.close(fd)


def of_template(vm: Vm, template: Path) -> Vm:
    """The same machine, waiting for a template's state."""
    return replace(vm, memory=Memory(file=str(template / MEMORY)), incoming=True)

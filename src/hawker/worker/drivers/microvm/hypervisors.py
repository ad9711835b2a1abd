"""Starting hypervisors, in a supervisor that outlives this daemon, and moving machines' state in and out of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from hawker.supervisor.calls import Destroy, ListInstances, Purge, Start
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import Instance, Limits
from hawker.worker.drivers.microvm import firecracker, qemu, templates
from hawker.worker.drivers.microvm.hypervisor import Hypervisor, Qemu
from hawker.worker.drivers.microvm.qemu import HypervisorError, Vm
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.users import NoUsers, Users

BOOT_S = 60.0  # of a busy host that emulates
STATE_S = 60.0  # to write or read a machine's memory
MAKING = "template"  # what the supervisor calls the machine of templates in the making


def of(vm: Vm) -> Hypervisor:
    """The hypervisor that runs this machine."""
    return firecracker.Firecracker() if vm.vmm == "firecracker" else Qemu()


class Hypervisors:
    """The hypervisors of one driver, and its templates. Without `users` they run as the worker's own user."""

    def __init__(self, directory: Path, users: Users | None, *, cgroups: bool, with_templates: bool) -> None:
        self._users = users
        self.supervisor = Supervisor(directory / "supervisor", *([] if cgroups else ["--no-cgroups"]))
        self._templates = templates.Templates(directory / "templates")
        self._with_templates = with_templates
        self._making: dict[str, asyncio.Task[Path]] = {}

    def open(self) -> None:
        self._templates.open()

    async def close(self) -> None:
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def instances(self) -> Mapping[str, Instance]:
        """What the supervisor has, by key."""
        if self.supervisor.unused:
            return {}
        return {i.key: i for i in await self.supervisor.call(ListInstances(), list[Instance])}

    async def destroy(self, key: str) -> None:
        if not self.supervisor.unused:
            await self.supervisor.call(Destroy(key=key, force=True))

    async def start(self, key: str, machine: str, vm: Vm, limits: Limits, directory: Path) -> Instance:
        """Start a hypervisor, or find the one that was started by this key. Raises `StartFailed`,
        `HypervisorError`."""
        try:
            argv = of(vm).prepare(vm, directory)
        except OSError as error:
            raise HypervisorError(f"its hypervisor's files cannot be made ready: {error}") from error
        # It bounds the guest's disks itself: its own group would also slow down a machine's way to disk and back.
        memory_mib = vm.memory_mib + qemu.OVERHEAD_MIB[vm.accelerator]
        around = dataclasses.replace(limits, memory_mib=memory_mib, pids=64 + vm.cpus, disk_bytes=0, disk_operations=0)
        request = Start(
            key=key,
            machine=machine,
            argv=argv,
            env=qemu.environment(vm) if vm.vmm == "qemu" else {"PATH": os.defpath},
            limits=around,
            cwd=str(directory if vm.vmm == "qemu" else firecracker.place(vm, directory)),
            status=vm.output and vm.vmm == "qemu",
            confined=of(vm).confined(vm),
        )
        return await self.supervisor.call(request, Instance)

    # --- state -------------------------------------------------------------------------------------------------------

    async def save(self, vm: Vm, directory: Path, state: Path) -> None:
        """Halt the machine and write its memory and devices. Raises `HypervisorError`, OSError."""
        await of(vm).save(vm, directory, state)
        await asyncio.to_thread(_sync, state)

    # --- templates ---------------------------------------------------------------------------------------------------

    def template(self, vm: Vm) -> Path | None:
        """The template that this machine can be made of, if there is one."""
        return self._templates.find(vm) if self._with_templates and vm.vmm == "qemu" else None

    def forget_template(self, template: Path, why: Exception) -> None:
        _logger.warning("template.unusable", template=template.name, error=str(why))
        self._templates.forget(template)

    async def make_template(self, vm: Vm) -> Path:
        """The template for machines like this one. It is made if it is not there, once however many ask. Raises what
        booting raises."""
        if vm.vmm != "qemu":
            raise HypervisorError(f"machines are not made of templates by {vm.vmm}")
        if there := self._templates.find(vm):
            return there
        name = self._templates.name(vm)
        if name not in self._making:
            task = asyncio.get_running_loop().create_task(self._make(name, vm), name=f"template {name}")
            self._making[name] = task
            task.add_done_callback(lambda _: self._making.pop(name, None))
        return await asyncio.shield(self._making[name])

    async def _make(self, name: str, vm: Vm) -> Path:
        key = f"{MAKING}-{name}/boot"
        limits = Limits(cpu_millis=1000 * vm.cpus, memory_mib=vm.memory_mib)

        try:
            vm = replace(vm, user=self._users.of(MAKING) if self._users else 0)
        except NoUsers as error:
            raise HypervisorError(str(error)) from error

        async def run(empty: Vm, directory: Path) -> None:
            await self.start(key, MAKING, empty, limits, directory)

        try:
            async with asyncio.timeout(BOOT_S):
                return await self._templates.make(vm, run)
        finally:
            with contextlib.suppress(HypervisorError):
                await self.destroy(key)
                await self.supervisor.call(Purge(machine=MAKING))


def _sync(path: Path) -> None:
    """Write the state to the disk: a suspended machine survives a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


_logger = get_logger()

"""The life of a microVM from the host's side: it is made, booted or restored, halted to disk, resumed, and ended.

What is on disk decides after any crash (`records`). A machine runs if its supervisor has its hypervisor and its record
does not say that it is suspended. Suspending writes the state first, then the record, and only then ends the
hypervisor. Resuming loads the state into a hypervisor that stands still, then writes the record, and only then lets the
machine run on. So a hypervisor that is there while the record says suspended has never run beyond the state, and is
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hawker.errors import Unreachable
from hawker.host import Host
from hawker.images.base import ImageSource
from hawker.network.base import HostNetwork, NetworkError
from hawker.supervisor.calls import Stop
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import (
    Exit,
    Instance,
    InstanceSpec,
    Limits,
    Refused,
    StartFailed,
    Stats,
    UnknownInstance,
)
from hawker.worker.drivers.driver import Abilities
from hawker.worker.drivers.microvm import figures, kvm, start_message, templates
from hawker.worker.drivers.microvm.agent import AgentLost
from hawker.worker.drivers.microvm.disk import DiskError, Disks
from hawker.worker.drivers.microvm.guest import ANSWER_S, Guest
from hawker.worker.drivers.microvm.hypervisors import BOOT_S, STATE_S, Hypervisors, of
from hawker.worker.drivers.microvm.qemu import HypervisorError, Memory, Vm
from hawker.worker.drivers.microvm.records import DISK, STATE, Record, Records
from hawker.worker.drivers.microvm.settings import Settings
from hawker.worker.drivers.microvm.tools import Missing, Tools
from hawker.worker.drivers.networks import must_publish, wanted_of
from hawker.worker.drivers.supervised import SupervisedDriver
from hawker.worker.drivers.users import NoUsers, Users

LOOK_AGAIN_S = 0.5
LOOK_AGAIN_MOST_S = 15.0
MEMORY_LEAST_MIB = 96  # with less the kernel has no room for a program


class MachineLifecycle(SupervisedDriver):
    """What the machines of one driver go through. `MicrovmDriver` builds on it."""

    def __init__(
        self,
        directory: Path,
        images: ImageSource,
        network: HostNetwork | None,
        host: Host,
        settings: Settings = Settings(),  # noqa: B008  # frozen
        no_kvm: Callable[[], str] = kvm.missing,
        programs: Path | None = None,
        users: Users | None = None,
    ) -> None:
        self._users = users or Users(directory / "users") if os.geteuid() == 0 else None
        if self._users:
            self._users.hold(self._may_own)
        self._hypervisors = Hypervisors(
            directory, self._users, cgroups=settings.cgroups, with_templates=settings.templates
        )
        super().__init__(self._hypervisors.supervisor)
        self.abilities = Abilities(suspending=self, terminals=self, standing_by=self)
        self._directory = directory
        self._images = images
        self._network = network if os.geteuid() == 0 else None  # an ordinary user may not make interfaces
        self._host = host
        self._settings = settings
        self._tools = Tools(directory / "kernel", settings, no_kvm, programs)
        self._disks = Disks(directory / "disks")
        self._records = Records(directory)
        self._guests: dict[str, Guest] = {}
        self._on_exit: Callable[[Exit], None] = lambda exit_: None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- starting ----------------------------------------------------------------------------------------------------

    async def _make(self, spec: InstanceSpec) -> Guest:
        """Everything that is needed before a hypervisor can be started."""
        must_publish(spec, self._network)
        image = await self._images.ensure(spec.image)
        path = await self._disks.of_image(image, self._images.layers(image))
        wanted = wanted_of(spec) if self._network else None
        tap = self._network.plan(wanted).interface if self._network and wanted else ""
        directory = self._records.directory(spec.key)
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            disk = self._records.root(spec.machine, image.digest) if spec.root.persist else directory / DISK
            user = self._users.of(spec.machine) if self._users else 0
            if not disk.exists():
                await self._disks.empty(disk, spec.root.size_mib, journal=spec.root.persist, owner=user)
            vm = await self._vm(spec.limits, image=str(path), disk=str(disk), tap=tap, user=user)
            record = Record(
                key=spec.key,
                machine=spec.machine,
                image=image.digest,
                vm=vm,
                limits=spec.limits,
                wanted=wanted,
                note=spec.note,
            )
            self._records.write(record)
        except BaseException as error:
            self._records.remove(spec.key)
            if isinstance(error, Missing | DiskError | NoUsers):
                raise StartFailed(str(error)) from error
            raise
        guest = self._guests[spec.key] = self._guest(record, acknowledged=False)
        return guest

    async def _vm(self, limits: Limits, *, image: str, disk: str, tap: str, user: int = 0) -> Vm:
        found = await self._tools.found()
        return Vm(
            binary=found.binary,
            vmm=found.vmm,
            jailer=found.jailer,
            accelerator=found.accelerator,
            cpus=max(1, -(-limits.cpu_millis // 1000)),
            memory_mib=max(limits.memory_mib, MEMORY_LEAST_MIB),
            kernel=found.kernel,
            tsc_khz=found.tsc_khz,
            image=image,
            disk=disk,
            disk_bytes=limits.disk_bytes,
            disk_operations=limits.disk_operations,
            tap=tap,
            user=user,
            preload=found.preload,
        )

    async def _launch(self, guest: Guest, spec: InstanceSpec) -> Instance:
        """Start the hypervisor and the program, or what of both is not done yet. Leaves nothing when it fails."""
        shown = (await self._hypervisors.instances()).get(spec.key)
        if shown and (shown.exit or guest.record.started_at_ms):
            return guest.shown(shown)
        try:
            if shown and not await guest.unless_ended(
                of(guest.record.vm).runs(guest.record.vm, guest.directory), BOOT_S
            ):
                await self._discard(guest)  # whoever started it was killed before it had all its state
                shown = None
            if shown is None:
                shown = await self._boot(guest)
            else:
                await self._attach(guest)
            await guest.unless_ended(self._configure(guest, spec), BOOT_S)
        except BaseException as error:
            await self._undo(guest)
            if isinstance(error, AgentLost | TimeoutError | HypervisorError):
                raise StartFailed(f"{spec.image}: the virtual machine did not come up: {error}") from error
            raise
        guest.record = replace(guest.record, started_at_ms=shown.started_at_ms)
        self._records.write(guest.record)
        guest.acknowledged = True
        if guest.ended.done():
            self._on_exit(guest.ended.result())
        return guest.shown(shown)

    async def _boot(self, guest: Guest) -> Instance:
        """Restore it from a template of its size, if there is one; else boot it."""
        record = guest.record
        if template := self._hypervisors.template(record.vm):
            try:
                vm = templates.of_template(record.vm, template)
                return await self._run(guest, vm, template / templates.STATE, memory=False)
            except (HypervisorError, AgentLost, TimeoutError) as error:
                self._hypervisors.forget_template(template, error)
                await self._discard(guest)
        shown = await self._run(guest, record.vm)
        if self._settings.templates and record.vm.vmm == "qemu":
            self._spawn(self._template_later(guest), f"template for {record.key}")
        return shown

    async def _discard(self, guest: Guest) -> None:
        """End a hypervisor that never was this machine. Its end is waited for, so that it is not taken for that of the
        next one."""
        guest.acknowledged = False
        with contextlib.suppress(UnknownInstance, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self.supervisor.call(Stop(key=guest.record.key, signal=9, grace_s=0), Exit)
                await asyncio.shield(guest.ended)
        await self._hypervisors.destroy(guest.record.key)
        guest.start_over()

    async def _template_later(self, guest: Guest) -> None:
        """Make a template after the machine that needed one runs, for that machine comes first."""
        try:
            await guest.agent()
            await self._hypervisors.make_template(guest.record.vm)
        except (HypervisorError, AgentLost, StartFailed, TimeoutError, OSError) as error:
            _logger.warning("template.failed", error=str(error), instance=guest.record.key)

    async def _run(self, guest: Guest, vm: Vm, state: Path | None = None, *, memory: bool = True) -> Instance:
        """Start its hypervisor, connect it to the network, and let the machine go on from a state if there is one."""
        record = guest.record
        shown = await self._hypervisors.start(record.key, record.machine, vm, record.limits, guest.directory)

        async def ready() -> None:
            await self._attach(guest)
            if guest.record.suspended:
                running = replace(guest.record, suspended=None)
                self._records.write(running)
                guest.record = running

        if state:
            await guest.unless_ended(of(vm).load(vm, guest.directory, state, memory=memory, ready=ready), STATE_S)
        else:
            await guest.unless_ended(of(vm).up(vm, guest.directory), BOOT_S)
            await self._attach(guest)
        return shown

    async def _attach(self, guest: Guest) -> None:
        if self._network and guest.record.wanted:
            try:
                await self._network.attach_tap(guest.record.wanted)
            except NetworkError as error:
                raise StartFailed(f"{guest.record.machine}: no network: {error}") from error

    async def _configure(self, guest: Guest, spec: InstanceSpec) -> None:
        """Tell the guest what it is. Does nothing where it knows."""
        agent = await guest.agent()
        if not agent.idle:
            return
        image = await self._images.ensure(spec.image)
        wanted = guest.record.wanted
        attachment = self._network.plan(wanted) if self._network and wanted else None
        await agent.start(
            start_message.told(spec, image.config, attachment, clock_ns=self._clock_ns(), seed=self._seed())
        )

    def _clock_ns(self) -> int:
        return self._host.now_ms() * 1_000_000

    def _seed(self) -> bytes:
        return self._host.rng.getrandbits(8 * start_message.SEED_BYTES).to_bytes(start_message.SEED_BYTES, "big")

    async def _undo(self, guest: Guest) -> None:
        await self._detach(guest)
        await self._hypervisors.destroy(guest.record.key)
        self._guests.pop(guest.record.key, None)
        self._records.remove(guest.record.key)
        self._forget_disks()

    async def _detach(self, guest: Guest) -> None:
        await guest.hang_up()
        machine = guest.record.machine
        others = (other for other in self._guests.values() if other is not guest and other.record.machine == machine)
        if self._network and guest.record.wanted and all(other.ended.done() for other in others):
            with contextlib.suppress(NetworkError):
                await self._network.detach(machine)

    # --- suspending --------------------------------------------------------------------------------------------------

    async def suspend(self, key: str) -> None:
        guest = self._find(key)
        async with guest.moving:
            if guest.record.suspended:
                return
            stats = await self.stats(key)
            state = guest.directory / STATE
            try:
                await guest.unless_ended(self._hypervisors.save(guest.record.vm, guest.directory, state), STATE_S)
                suspended = replace(guest.record, suspended=stats)
                self._records.write(suspended)
            except BaseException as error:  # a cancel, too: it is halted by now, or about to be
                guest.forget_state()
                self._spawn(self._look_after(guest), f"go on with {key}")
                if isinstance(error, HypervisorError | AgentLost | TimeoutError | OSError):
                    raise Refused(f"{key} could not be suspended: {error}") from error
                raise
            guest.record = suspended
            await self._detach(guest)
            await self._hypervisors.destroy(key)

    async def resume(self, key: str) -> None:
        guest = self._find(key)
        async with guest.moving:
            if guest.record.suspended is None:
                guest.must_run()
                return
            state = guest.directory / STATE
            try:
                vm = replace(await self._owned(guest), memory=Memory(), incoming=True)
                await self._run(guest, vm, state)
            except BaseException as error:
                if guest.record.suspended:
                    await self._detach(guest)
                    await self._hypervisors.destroy(key)
                else:
                    self._spawn(self._look_after(guest), f"go on with {key}")
                if isinstance(
                    error, HypervisorError | AgentLost | TimeoutError | OSError | NoUsers | Missing | StartFailed
                ):
                    raise Refused(f"{key} could not be resumed: {error}") from error
                raise
            guest.forget_state()
            await self._renew(guest)

    async def _owned(self, guest: Guest) -> Vm:
        """The machine, with a user of its own also where it was suspended before machines had users."""
        vm = guest.record.vm
        if self._users and not vm.user:
            user, found = self._users.of(guest.record.machine), await self._tools.found()
            vm = replace(vm, user=user, preload=found.preload)
            guest.record = replace(guest.record, vm=vm)
            self._records.write(guest.record)
        return vm

    async def _renew(self, guest: Guest) -> None:
        """The guest has not seen the time pass."""
        await guest.ask(lambda agent: agent.renew(self._clock_ns(), self._seed()))

    async def _look_after(self, guest: Guest) -> None:
        """Let a machine run on that was halted to be suspended or resumed, when that was cut off: the daemon was
        killed, or the call was cancelled or refused. Nobody else would let the machine run on, so this is tried until
        it is known to run."""
        pause_s = LOOK_AGAIN_S
        while not guest.ended.done():
            try:
                async with guest.moving:
                    if guest.record.suspended:
                        return
                    vm = guest.record.vm
                    halted = await guest.unless_ended(of(vm).run_on(vm, guest.directory), ANSWER_S)
            except (HypervisorError, AgentLost, TimeoutError, OSError) as error:
                _logger.warning("machine.not_looked_at", instance=guest.record.key, error=str(error) or "no answer")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LOOK_AGAIN_MOST_S)
                continue
            if halted:
                guest.forget_state()
                with contextlib.suppress(Unreachable, UnknownInstance):
                    await self._renew(guest)
            return

    async def stats(self, key: str) -> Stats:
        guest = self._find(key)
        if guest.record.suspended:
            return guest.record.suspended
        guest.must_run()
        with guest.refusals():
            return figures.use(await guest.ask(lambda agent: agent.ask("q")))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def forget(self, digest: str) -> None:
        """Remove the disk of an image that is gone, unless a machine, perhaps a suspended one, needs it."""
        if all(guest.record.image != digest for guest in self._guests.values()):
            self._disks.forget(digest)

    def _may_own(self, machine: str) -> bool:
        """Whether files of a machine are left."""
        running = (guest.record.machine == machine for guest in self._guests.values())
        return any(running) or self._records.has_root(machine)

    def _forget_disks(self) -> None:
        """Forget the disks of images that are no longer here."""
        for digest in self._disks.made():
            if self._images.find(digest) is None:
                self.forget(digest)

    def _guest(self, record: Record, *, acknowledged: bool = True) -> Guest:
        return Guest(record, self._records.directory(record.key), acknowledged=acknowledged)

    def _find(self, key: str) -> Guest:
        guest = self._guests.get(key)
        if guest is None or not guest.acknowledged:
            raise UnknownInstance(f"no instance {key}")
        return guest

    def _running(self, key: str) -> Guest:
        guest = self._find(key)
        guest.must_run()
        return guest

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_logger = get_logger()

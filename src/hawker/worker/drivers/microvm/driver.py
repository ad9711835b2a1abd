"""The microVM driver. A hypervisor is a program of the driver's own supervisor, under its limits, with the guest's
output as its own; what only the guest can do is asked over its control port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from hawker.supervisor.calls import Inspect, Purge, Stop
from hawker.worker.drivers.base import (
    Capabilities,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    Process,
    StartFailed,
    Terminal,
    UnknownInstance,
)
from hawker.worker.drivers.microvm import figures
from hawker.worker.drivers.microvm.agent import AgentLost, AgentRefused
from hawker.worker.drivers.microvm.guest import ANSWER_S, Guest
from hawker.worker.drivers.microvm.hypervisors import of
from hawker.worker.drivers.microvm.lifecycle import MachineLifecycle
from hawker.worker.drivers.microvm.qemu import HypervisorError
from hawker.worker.drivers.microvm.tools import Missing


class MicrovmDriver(MachineLifecycle):
    """See `hawker.worker.drivers.driver.Driver`. `directory` is kept between runs. Without `network` machines have
    none."""

    name = "microvm"

    # --- the whole ---------------------------------------------------------------------------------------------------

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)  # machines' disks are in it
        self._disks.open()
        self._hypervisors.open()
        self._guests = {record.key: self._guest(record) for record in self._records.open()}
        kernels = [guest.record.vm.kernel for guest in self._guests.values()]
        self._tools.needed = {path for kernel in kernels for path in (kernel.vmlinux, kernel.initrd)}
        await self.supervisor.open(self._ended)
        there = await self._hypervisors.instances()
        for key, shown in there.items():
            guest = self._guests.get(key)
            if guest is None or guest.record.suspended or guest.record.exit:
                await self._hypervisors.destroy(key)
            elif shown.exit is None and guest.record.started_at_ms:
                self._spawn(self._look_after(guest), f"look after {key}")
        for key, guest in list(self._guests.items()):
            if guest.record.exit:
                self._end(guest, guest.record.exit)
            elif key not in there and not guest.record.suspended:
                del self._guests[key]  # it ended with its host
                self._records.remove(key)
        self._forget_disks()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hypervisors.close()
        for guest in self._guests.values():
            await guest.hang_up()
        await self._disks.close()
        await self.supervisor.close()

    async def fingerprint(self) -> Fingerprint:
        try:
            found, problem = await self._tools.found(), ""
        except Missing as error:
            found, problem = None, str(error)
        capabilities = Capabilities(
            suspend=True,
            exec=True,
            limits=True,  # of the guest itself
            images=True,
            terminal=True,
            network=self._network is not None,
        )
        attributes = {}
        if found:
            attributes = {"vmm": found.vmm, "accelerator": found.accelerator, "kernel": found.kernel.version}
            why = {
                "emulated": found.why_tcg,
                "no_firecracker": found.why_not_firecracker,
                "not_jailed": found.why_not_jailed,
            }
            attributes |= {name: reason for name, reason in why.items() if reason}
        return Fingerprint(
            driver=self.name,
            healthy=not problem,
            problem=problem,
            capabilities=capabilities,
            attributes=attributes,
        )

    async def recover(self) -> Sequence[Instance]:
        there = await self._hypervisors.instances()
        return [guest.shown(there.get(key)) for key, guest in self._guests.items() if guest.acknowledged]

    async def stop_all(self, *, grace_s: float) -> None:
        """Suspended machines stay suspended: all that they are is on disk."""
        for task in self._tasks:
            task.cancel()
        if grace_s > 0:
            running = [key for key, guest in self._guests.items() if not (guest.ended.done() or guest.record.suspended)]
            stops = (self.stop(key, signal=15, grace_s=grace_s) for key in running)
            await asyncio.gather(*stops, return_exceptions=True)
        await self._hypervisors.close()
        await self.supervisor.shut_down(grace_s=0)

    # --- starting ----------------------------------------------------------------------------------------------------

    async def prepare(self, image: str) -> None:
        found = await self._images.ensure(image)
        await self._disks.of_image(found, self._images.layers(found))

    async def warm(self, limits: Limits, *, network: bool = False) -> None:
        """Have a template for machines of this size. Raises `StartFailed`."""
        try:
            vm = await self._vm(limits, image="", disk="", tap="-" if network else "")
            await self._hypervisors.make_template(vm)
        except (Missing, HypervisorError, AgentLost, TimeoutError) as error:
            raise StartFailed(f"no template: {error}") from error

    async def start(self, spec: InstanceSpec) -> Instance:
        async with self.alone(spec.key):
            guest = self._guests.get(spec.key)
            if guest is None:
                guest = await self._make(spec)
            if guest.record.suspended or guest.record.exit:
                return guest.shown(None)
            return await self._launch(guest, spec)

    # --- what runs ---------------------------------------------------------------------------------------------------

    async def inspect(self, key: str) -> Instance:
        guest = self._find(key)
        if guest.record.suspended or guest.record.exit:
            return guest.shown(None)
        return guest.shown(await self.supervisor.call(Inspect(key=key), Instance))

    async def wait(self, key: str) -> Exit:
        return await asyncio.shield(self._find(key).ended)

    async def signal(self, key: str, signal: int) -> None:
        await self._running(key).ask(lambda agent: agent.signal(signal))

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        guest = self._running(key)
        with guest.refusals():
            agent = await guest.unless_ended(guest.agent(), ANSWER_S)
            return await agent.execute(argv, stdin=stdin, env=env or {}, timeout_s=timeout_s)

    async def terminal(
        self,
        key: str,
        argv: Sequence[str],
        *,
        tty: bool,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> Terminal:
        size = (columns, rows) if tty else None
        return await self._running(key).ask(lambda agent: agent.run(argv, env=env or {}, terminal=size))

    async def processes(self, key: str) -> Sequence[Process]:
        guest = self._running(key)
        with guest.refusals():
            return figures.processes(await guest.ask(lambda agent: agent.ask("p")), self._host.now_ms())

    # --- the end -----------------------------------------------------------------------------------------------------

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        guest = self._find(key)
        async with guest.moving:
            if guest.record.suspended:
                return self._end_suspended(guest)
        if guest.ended.done():
            return guest.ended.result()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                with contextlib.suppress(AgentLost, AgentRefused):
                    await (await guest.agent()).signal(signal)
                return await asyncio.shield(guest.ended)
        with contextlib.suppress(UnknownInstance):
            await self.supervisor.call(Stop(key=key, signal=9, grace_s=0), Exit)
        return await asyncio.shield(guest.ended)

    def _end_suspended(self, guest: Guest) -> Exit:
        record = guest.record
        ended = Exit(key=record.key, machine=record.machine, signal=9, at_ms=self._host.now_ms())
        guest.record = replace(record, suspended=None, exit=ended)
        self._records.write(guest.record)
        guest.forget_state()
        self._end(guest, ended)
        return ended

    async def destroy(self, key: str, *, force: bool = False) -> None:
        guest = self._guests.get(key)
        if guest is None:
            return
        if not guest.ended.done():
            if not force:
                raise InstanceRunning(f"{key} still runs")
            if guest.acknowledged:
                await self.stop(key, signal=9, grace_s=0)
        await self._undo(guest)

    async def purge(self, machine: str) -> None:
        if any(guest.record.machine == machine for guest in self._guests.values()):
            return
        self._records.purge(machine)
        if not self.supervisor.unused:
            await self.supervisor.call(Purge(machine=machine))
        if self._users:
            self._users.release(machine)

    def _ended(self, ended: Exit) -> None:
        """The supervisor saw a hypervisor end."""
        guest = self._guests.get(ended.key)
        if guest and not guest.record.suspended:
            self._end(guest, of(guest.record.vm).ended(guest.record.vm, guest.directory, ended))
            self._spawn(self._detach(guest), f"detach {ended.key}")

    def _end(self, guest: Guest, ended: Exit) -> None:
        if not guest.ended.done():
            guest.ended.set_result(ended)
        if guest.acknowledged:
            self._on_exit(ended)

"""The microVM driver. QEMU is a program of the driver's own supervisor, under its limits, with the guest's output as
its own; what only the guest can do is asked over its control port.

What is on disk decides after any crash (`records`). A machine runs if its supervisor has its hypervisor and its record
does not say that it is suspended. Suspending writes the state first, then the record, and only then ends the
hypervisor; resuming loads the state into one that stands still, then writes the record, and only then lets it go on. So
a hypervisor that is there while the record says suspended has never run beyond the state, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from hawker.errors import Unreachable
from hawker.host import Host
from hawker.images.base import ImageSource
from hawker.network.base import HostNetwork, NetworkError, Wanted
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import (
    Capabilities,
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    LogLine,
    NotSupported,
    Process,
    Refused,
    StartFailed,
    Stats,
    Terminal,
    UnknownInstance,
)
from hawker.worker.drivers.microvm import figures, machine, qemu, templates, wire
from hawker.worker.drivers.microvm.agent import Agent, AgentLost, AgentRefused
from hawker.worker.drivers.microvm.disk import DiskError, Disks
from hawker.worker.drivers.microvm.qemu import Memory, QemuError, Qmp, Vm
from hawker.worker.drivers.microvm.records import DISK, STATE, Record, Records
from hawker.worker.drivers.microvm.settings import Settings
from hawker.worker.drivers.microvm.tools import Tools
from hawker.worker.drivers.supervised import Supervisor

BOOT_S = 60.0  # a busy host that emulates
ANSWER_S = 15.0
STATE_S = 60.0  # to write or read a machine's memory
TEMPLATE = "template"  # what the supervisor calls the machine of templates in the making
MEMORY_LEAST_MIB = 96  # below that the kernel has no room for a program
_T = TypeVar("_T")


class _Machine:
    """One machine as this daemon knows it."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.lock = asyncio.Lock()  # over what changes where it is
        self.agent: Agent | None = None
        self.connecting = asyncio.Lock()
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.acknowledged = True  # its start has been told to the worker, so its end is, too


class MicrovmDriver:
    """See `hawker.worker.drivers.base.Driver`. `directory` is kept between runs. Without `network` machines have
    none."""

    name = "microvm"

    def __init__(
        self,
        directory: Path,
        images: ImageSource,
        network: HostNetwork | None,
        host: Host,
        settings: Settings = Settings(),  # noqa: B008  # frozen
    ) -> None:
        self._directory = directory
        self._images = images
        self._network = network
        self._host = host
        self._settings = settings
        self.supervisor = Supervisor(directory / "supervisor", *([] if settings.cgroups else ["--no-cgroups"]))
        self.tools = Tools(directory / "kernel", settings)
        self.disks = Disks(directory / "disks")
        self.templates = templates.Templates(directory / "templates")
        self._records = Records(directory)
        self._machines: dict[str, _Machine] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._on_exit: Callable[[Exit], None] = lambda exit_: None
        self._making: dict[str, asyncio.Task[Path]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- the whole ---------------------------------------------------------------------------------------------------

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        self._directory.mkdir(parents=True, exist_ok=True)
        self.disks.open()
        self.templates.open()
        self._machines = {record.key: _Machine(record) for record in self._records.open()}
        await self.supervisor.open(self._ended)
        there = await self._supervised()
        for key, shown in there.items():
            found = self._machines.get(key)
            if found is None or found.record.suspended or found.record.exit:
                await self.supervisor.call("destroy", key=key, force=True)
            elif shown.exit is None:
                self._spawn(self._go_on(found), f"look after {key}")
        for key, found in list(self._machines.items()):
            if found.record.exit:
                self._ended_as(found, found.record.exit)
            elif key not in there and not found.record.suspended:
                del self._machines[key]
                self._records.remove(key)
        self._forget_disks()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._making.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for found in self._machines.values():
            if found.agent:
                await found.agent.close()
                found.agent = None
        await self.disks.close()
        await self.supervisor.close()

    async def fingerprint(self) -> Fingerprint:
        problem = await self.tools.problem()
        attributes = {} if problem else await self.tools.attributes()
        limited = self._settings.cgroups
        return Fingerprint(
            driver=self.name,
            healthy=not problem,
            problem=problem,
            capabilities=Capabilities(
                suspend=True,
                exec=True,
                limits=limited,
                images=True,
                terminal=True,
                resize=False,
                network=self._network is not None,
            ),
            attributes=attributes,
        )

    async def recover(self) -> Sequence[Instance]:
        there = await self._supervised()
        return [self._shown(found, there.get(key)) for key, found in self._machines.items() if found.acknowledged]

    async def stop_all(self, *, grace_s: float) -> None:
        """Suspended machines stay suspended: they hold nothing that a host must keep running for."""
        for task in [*self._making.values(), *self._tasks]:
            task.cancel()
        there = await self._supervised()
        running = [k for k, shown in there.items() if shown.exit is None and k in self._machines]
        await asyncio.gather(
            *(self.stop(key, signal=15, grace_s=grace_s) for key in running if grace_s > 0), return_exceptions=True
        )
        await self.supervisor.shut_down(grace_s=0)

    # --- starting ----------------------------------------------------------------------------------------------------

    async def prepare(self, image: str) -> None:
        found = await self._images.ensure(image)
        await self.disks.of_image(found, self._images.layers(found))

    async def start(self, spec: InstanceSpec) -> Instance:
        async with self._starting.setdefault(spec.key, asyncio.Lock()):
            try:
                found = self._machines.get(spec.key)
                if found is None:
                    found = await self._make(spec)
                if found.record.suspended or found.record.exit:
                    return self._shown(found, None)
                return await self._launch(found, spec)
            finally:
                self._starting.pop(spec.key, None)

    async def _make(self, spec: InstanceSpec) -> _Machine:
        """Everything that is needed before a hypervisor can be started."""
        if problem := await self.tools.problem():
            raise StartFailed(problem)
        image = await self._images.ensure(spec.image)
        path = await self.disks.of_image(image, self._images.layers(image))
        directory = self._records.directory(spec.key)
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            disk = await self._disk(spec, image.digest, directory)
            wanted = _wanted(spec) if self._network and spec.network else None
            attachment = self._network.plan(wanted) if self._network and wanted else None
            found = await self.tools.found()
            record = Record(
                key=spec.key,
                machine=spec.machine,
                image=image.digest,
                vm=Vm(
                    binary=found.binary,
                    accelerator=found.accelerator,
                    cpus=max(1, -(-spec.limits.cpu_millis // 1000)),
                    memory_mib=max(spec.limits.memory_mib, MEMORY_LEAST_MIB),
                    kernel=found.kernel,
                    tsc_khz=found.tsc_khz,
                    image=str(path),
                    disk=str(disk),
                    tap=attachment.interface if attachment else "",
                ),
                limits=spec.limits,
                wanted=wanted,
            )
            self._records.write(record)
        except BaseException:
            self._records.remove(spec.key)
            raise
        made = _Machine(record)
        made.acknowledged = False
        self._machines[spec.key] = made
        return made

    async def _disk(self, spec: InstanceSpec, digest: str, directory: Path) -> Path:
        path = self._records.root(spec.machine, digest) if spec.root.persist else directory / DISK
        if not path.exists():
            try:
                await self.disks.empty(path, spec.root.size_mib, journal=spec.root.persist)
            except DiskError as error:
                raise StartFailed(str(error)) from error
        return path

    async def _launch(self, found: _Machine, spec: InstanceSpec) -> Instance:
        """Start the hypervisor and the program, or what of both is not done yet. Leaves nothing when it fails."""
        shown = (await self._supervised()).get(spec.key)
        if shown and (shown.exit or (found.acknowledged and found.record.started_at_ms)):
            return self._shown(found, shown)
        try:
            if shown is None:
                shown = await self._boot(found)
            await self._unless_ended(found, self._configure(found, spec), BOOT_S)
        except BaseException as error:
            await self._undo(found)
            if isinstance(error, AgentLost | TimeoutError | QemuError):
                raise StartFailed(f"{spec.image}: the virtual machine did not come up: {error}") from error
            raise
        found.record = replace(found.record, started_at_ms=shown.started_at_ms)
        self._records.write(found.record)
        found.acknowledged = True
        if found.ended.done():
            self._on_exit(found.ended.result())
        return self._shown(found, shown)

    async def _boot(self, found: _Machine) -> Instance:
        """From a template of its size where there is one."""
        record = found.record
        template = self.templates.find(record.vm) if self._settings.templates else None
        if template:
            try:
                vm = templates.of_template(record.vm, template)
                return await self._run(
                    found, vm, lambda qmp: self._restore(qmp, template / templates.STATE, memory=False)
                )
            except (QemuError, TimeoutError) as error:
                _logger.warning("template.unusable", template=template.name, error=str(error), instance=record.key)
                self.templates.forget(template)
                await self.supervisor.call("destroy", key=record.key, force=True)
                found.ended = asyncio.get_running_loop().create_future()
        shown = await self._run(found, record.vm, None)
        if self._settings.templates:
            self._spawn(self._template_later(found), f"template for {record.key}")
        return shown

    async def _run(self, found: _Machine, vm: Vm, then: Callable[[Qmp], Awaitable[None]] | None) -> Instance:
        """Start a hypervisor and connect its machine to the network."""
        directory = self._records.directory(found.record.key)
        shown = await self._start_program(found.record.key, found.record.machine, vm, directory, found.record.limits)
        if then or (self._network and found.record.wanted):
            await self._unless_ended(found, self._set_up(found, directory, then), STATE_S)
        return shown

    async def _set_up(self, found: _Machine, directory: Path, then: Callable[[Qmp], Awaitable[None]] | None) -> None:
        qmp = await Qmp.connect(directory / "qmp")  # once it answers it has made its network interface
        try:
            if self._network and found.record.wanted:
                try:
                    await self._network.attach_tap(found.record.wanted)
                except NetworkError as error:
                    raise StartFailed(f"{found.record.machine}: no network: {error}") from error
            if then:
                await then(qmp)
        finally:
            await qmp.close()

    async def _restore(self, qmp: Qmp, state: Path, *, memory: bool) -> None:
        await qmp.load(state, memory=memory)
        await qmp.run("cont")

    async def _start_program(self, key: str, name: str, vm: Vm, directory: Path, limits: Limits) -> Instance:
        for socket in ("agent", "qmp"):
            (directory / socket).unlink(missing_ok=True)
        around = replace(limits, memory_mib=vm.memory_mib + qemu.OVERHEAD_MIB[vm.accelerator], pids=64 + vm.cpus)
        shown = await self.supervisor.call(
            "start",
            key=key,
            machine=name,
            argv=qemu.command(vm),
            env={"PATH": os.defpath},
            limits=msgspec.to_builtins(around),
            cwd=str(directory),
            status=vm.output,
        )
        return msgspec.convert(shown, Instance)

    async def _configure(self, found: _Machine, spec: InstanceSpec) -> None:
        """Tell the guest what it is. Does nothing where it knows."""
        agent = await self._agent(found)
        if not agent.idle:
            return
        image = await self._images.ensure(spec.image)
        attachment = self._network.plan(found.record.wanted) if self._network and found.record.wanted else None
        pairs = machine.told(
            spec,
            image.config,
            attachment,
            clock_ns=self._host.now_ms() * 1_000_000,
            seed=self._seed(),
        )
        await agent.start(pairs)

    def _seed(self) -> bytes:
        return self._host.rng.getrandbits(8 * machine.SEED_BYTES).to_bytes(machine.SEED_BYTES, "big")

    async def _undo(self, found: _Machine) -> None:
        await self._let_go(found)
        await self.supervisor.call("destroy", key=found.record.key, force=True)
        self._machines.pop(found.record.key, None)
        self._records.remove(found.record.key)

    async def _let_go(self, found: _Machine) -> None:
        if found.agent:
            agent, found.agent = found.agent, None
            await agent.close()
        if self._network and found.record.wanted:
            with contextlib.suppress(NetworkError):
                await self._network.detach(found.record.machine)

    # --- templates ---------------------------------------------------------------------------------------------------

    async def template(self, vm: Vm) -> Path:
        """The template for machines like this one, made if it is not there. Raises what booting raises."""
        if there := self.templates.find(vm):
            return there
        name = self.templates.name(vm)
        if name not in self._making:
            task = asyncio.get_running_loop().create_task(self._make_template(name, vm), name=f"template {name}")
            self._making[name] = task
            task.add_done_callback(lambda _: self._making.pop(name, None))
        return await asyncio.shield(self._making[name])

    async def _make_template(self, name: str, vm: Vm) -> Path:
        key = f"{TEMPLATE}-{name}/boot"
        limits = Limits(cpu_millis=1000 * vm.cpus, memory_mib=vm.memory_mib)

        async def run(_: str, template: Vm, directory: Path) -> None:
            await self._start_program(key, TEMPLATE, template, directory, limits)

        try:
            async with asyncio.timeout(BOOT_S):
                return await self.templates.make(vm, run)
        finally:
            with contextlib.suppress(Exception):
                await self.supervisor.call("destroy", key=key, force=True)
                await self.supervisor.call("purge", machine=TEMPLATE)

    async def _template_later(self, found: _Machine) -> None:
        """Once the machine that needed it and did not have it runs."""
        try:
            await self._agent(found)
            await self.template(found.record.vm)
        except (QemuError, AgentLost, TimeoutError, OSError) as error:
            _logger.warning("template.failed", error=str(error), instance=found.record.key)

    # --- what runs ---------------------------------------------------------------------------------------------------

    async def inspect(self, key: str) -> Instance:
        found = self._find(key)
        if found.record.suspended or found.record.exit:
            return self._shown(found, None)
        return self._shown(found, msgspec.convert(await self.supervisor.call("inspect", key=key), Instance))

    async def wait(self, key: str) -> Exit:
        found = self._find(key)
        return await asyncio.shield(found.ended)

    async def signal(self, key: str, signal: int) -> None:
        found = self._running(key)
        with self._refusals(found):
            await self._asked(found, lambda agent: agent.signal(signal))

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        found = self._running(key)
        with self._refusals(found):
            agent = await self._answering(found)
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
        found = self._running(key)
        with self._refusals(found):
            agent = await self._answering(found)
            return await agent.run(argv, env=env or {}, terminal=(columns, rows) if tty else None)

    async def stats(self, key: str) -> Stats:
        found = self._find(key)
        if found.record.suspended:
            return found.record.suspended
        found = self._running(key)
        with self._refusals(found):
            return figures.use(await self._asked(found, lambda agent: agent.ask("q")))

    async def processes(self, key: str) -> Sequence[Process]:
        found = self._running(key)
        with self._refusals(found):
            return figures.processes(await self._asked(found, lambda agent: agent.ask("p")), self._host.now_ms())

    async def resize(self, key: str, limits: Limits) -> None:
        self._find(key)
        raise NotSupported("resizing a virtual machine while it runs")

    def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        return self.supervisor.logs(machine, tail=tail, follow=follow)

    # --- suspending --------------------------------------------------------------------------------------------------

    async def suspend(self, key: str) -> None:
        found = self._find(key)
        async with found.lock:
            if found.record.suspended:
                return
            self._running(key)
            stats = await self.stats(key)
            directory = self._records.directory(key)
            state = directory / STATE
            try:
                await self._unless_ended(found, self._save(directory, state), STATE_S)
            except (QemuError, TimeoutError) as error:
                state.unlink(missing_ok=True)
                self._spawn(self._go_on(found), f"go on with {key}")
                raise Refused(f"{key} could not be suspended: {error}") from error
            found.record = replace(found.record, suspended=stats)
            self._records.write(found.record)
            await self._let_go(found)
            await self.supervisor.call("destroy", key=key, force=True)

    async def _save(self, directory: Path, state: Path) -> None:
        qmp = await Qmp.connect(directory / "qmp")
        try:
            await qmp.run("stop")
            await qmp.save(state, memory=True)
        finally:
            await qmp.close()
        await asyncio.to_thread(_sync, state)

    async def resume(self, key: str) -> None:
        found = self._find(key)
        async with found.lock:
            if found.record.suspended is None:
                self._running(key)
                return
            record = found.record
            directory = self._records.directory(key)
            vm = replace(record.vm, memory=Memory(), incoming=True)

            async def load(qmp: Qmp) -> None:
                await qmp.load(directory / STATE, memory=True)
                found.record = replace(found.record, suspended=None)
                self._records.write(found.record)
                await qmp.run("cont")

            try:
                await self._run(found, vm, load)
            except BaseException as error:
                if found.record.suspended:
                    await self.supervisor.call("destroy", key=key, force=True)
                if isinstance(error, QemuError | TimeoutError):
                    raise Refused(f"{key} could not be resumed: {error}") from error
                raise
            (directory / STATE).unlink(missing_ok=True)
            await self._renew(found)

    async def _renew(self, found: _Machine) -> None:
        with self._refusals(found):
            clock_ns, seed = self._host.now_ms() * 1_000_000, self._seed()
            await self._asked(found, lambda agent: agent.renew(clock_ns, seed))

    async def _go_on(self, found: _Machine) -> None:
        """A machine that was stopped to be suspended, or loaded to be resumed, by somebody who was killed then."""
        with contextlib.suppress(QemuError, Unreachable, UnknownInstance, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                qmp = await Qmp.connect(self._records.directory(found.record.key) / "qmp")
                try:
                    status = await qmp.run("query-status")
                    if status["status"] != "paused":
                        return
                    await qmp.run("cont")
                finally:
                    await qmp.close()
            (self._records.directory(found.record.key) / STATE).unlink(missing_ok=True)
            await self._renew(found)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        found = self._find(key)
        if found.record.suspended:
            async with found.lock:
                if found.record.suspended:
                    return self._end_suspended(found)
        if found.ended.done():
            return found.ended.result()
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    with contextlib.suppress(AgentLost, AgentRefused, Unreachable):
                        await (await self._agent(found)).signal(signal)
                    return await asyncio.shield(found.ended)
        with contextlib.suppress(UnknownInstance):
            await self.supervisor.call("stop", key=key, signal=9, grace_s=0)
        return await asyncio.shield(found.ended)

    def _end_suspended(self, found: _Machine) -> Exit:
        record = found.record
        ended = Exit(key=record.key, machine=record.machine, signal=9, at_ms=self._host.now_ms())
        found.record = replace(record, suspended=None, exit=ended)
        self._records.write(found.record)
        (self._records.directory(record.key) / STATE).unlink(missing_ok=True)
        self._ended_as(found, ended)
        return ended

    async def destroy(self, key: str, *, force: bool = False) -> None:
        found = self._machines.get(key)
        if found is None:
            return
        if not found.ended.done() and not force:
            raise InstanceRunning(f"{key} still runs")
        await self.stop(key, signal=9, grace_s=0)
        await self._let_go(found)
        if not self.supervisor.unused:
            await self.supervisor.call("destroy", key=key, force=True)
        self._machines.pop(key, None)
        self._records.remove(key)

    async def purge(self, machine: str) -> None:
        if any(found.record.machine == machine for found in self._machines.values()):
            return
        self._records.purge(machine)
        await self.supervisor.call("purge", machine=machine)

    def forget(self, digest: str) -> None:
        """An image is gone: so is its disk. Machines that are suspended need theirs."""
        if all(found.record.image != digest for found in self._machines.values()):
            self.disks.forget(digest)

    def _forget_disks(self) -> None:
        """Of images that are no longer here."""
        used = {found.record.image for found in self._machines.values()}
        for digest in self.disks.made():
            if digest not in used and self._images.find(digest) is None:
                self.disks.forget(digest)

    def _ended(self, ended: Exit) -> None:
        """The supervisor saw a hypervisor end."""
        found = self._machines.get(ended.key)
        if found and not found.record.suspended:
            self._ended_as(found, ended)
            self._spawn(self._let_go(found), f"let go of {ended.key}")

    def _ended_as(self, found: _Machine, ended: Exit) -> None:
        if not found.ended.done():
            found.ended.set_result(ended)
        if found.acknowledged:
            self._on_exit(ended)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _find(self, key: str) -> _Machine:
        found = self._machines.get(key)
        if found is None or not found.acknowledged:
            raise UnknownInstance(f"no instance {key}")
        return found

    def _running(self, key: str) -> _Machine:
        found = self._find(key)
        if found.ended.done():
            raise UnknownInstance(f"{key} has ended")
        if found.record.suspended:
            raise Refused(f"{key} is suspended")
        return found

    async def _supervised(self) -> dict[str, Instance]:
        if self.supervisor.unused:
            return {}
        return {i.key: i for i in msgspec.convert(await self.supervisor.call("list"), list[Instance])}

    def _shown(self, found: _Machine, shown: Instance | None) -> Instance:
        record = found.record
        if shown is None:
            return Instance(
                key=record.key,
                machine=record.machine,
                pid=None,
                started_at_ms=record.started_at_ms,
                suspended=record.suspended is not None,
                exit=record.exit,
            )
        return replace(shown, started_at_ms=record.started_at_ms or shown.started_at_ms, suspended=False)

    async def _agent(self, found: _Machine) -> Agent:
        """The session with a guest. Waits until it answers."""
        async with found.connecting:
            if found.agent and not found.agent.open:
                await found.agent.close()
                found.agent = None
            if found.agent is None:
                found.agent = await Agent.connect(self._records.directory(found.record.key) / "agent")
            return found.agent

    async def _answering(self, found: _Machine) -> Agent:
        return await self._unless_ended(found, self._agent(found), ANSWER_S)

    async def _asked(self, found: _Machine, ask: Callable[[Agent], Awaitable[_T]]) -> _T:
        async def asking() -> _T:
            return await ask(await self._agent(found))

        return await self._unless_ended(found, asking(), ANSWER_S)

    async def _unless_ended(self, found: _Machine, work: Awaitable[_T], seconds: float) -> _T:
        """Raises `AgentLost` when the machine ends first."""
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(seconds):
                waiting: list[asyncio.Future[Any]] = [task, found.ended]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                said = [line.text async for line in self.logs(found.record.machine, tail=3)]
                raise AgentLost("its hypervisor ended: " + ("; ".join(said) or "it said nothing"))
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def _refusals(self, found: _Machine) -> Any:
        """A guest's refusals and silence as the driver's exceptions."""
        key = found.record.key
        try:
            yield
        except AgentRefused as error:
            raise UnknownInstance(f"{key}: {error}") from error
        except AgentLost as error:
            raise UnknownInstance(f"{key} has ended") from error
        except TimeoutError as error:
            raise Unreachable(f"{key}: its guest does not answer") from error
        except wire.Malformed as error:
            raise Unreachable(f"{key}: its guest answers nonsense: {error}") from error

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wanted(spec: InstanceSpec) -> Wanted | None:
    if spec.network is None:
        return None
    publish = tuple((p.protocol, p.internal_port, p.host_port) for p in spec.network.publish)
    return Wanted(machine=spec.machine, number=spec.network.number, address=spec.network.address, publish=publish)


def _sync(path: Path) -> None:
    """A suspended machine survives its host."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


_logger = get_logger()

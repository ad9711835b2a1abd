"""The flows of a machine, step by step: what each does outside, and what it writes.

Which steps a run has, and what is undone when it ends early, is decided in `hawker.core.life`; `docs/machine-states.md`
shows it whole.

The outside effects are calls of the driver, keyed `run/step`; every one may be repeated. `prepare` makes a
machine's image ready and records which bytes its reference means: an update prepares before it stops anything, and one
whose image cannot be had leaves the machine as it was. `settle` is the final step (`hawker.worker.machine.endings`): it
writes the resting state, and after a failure or a cancel first removes what a launch may have left. Which runs begin
when is decided in `hawker.worker.machine.operations` and `hawker.worker.machine.exits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from hawker.core import deadlines
from hawker.core.journal import effect_key
from hawker.core.life import endings
from hawker.errors import Abort, DiskFull, HawkerError, ImageError, Retry, Unreachable
from hawker.model.guest import Guest
from hawker.model.image import NOT_IN_TIME
from hawker.model.rows import MachineRow, RunRow
from hawker.network.base import NetworkError
from hawker.store.tx import Tx
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import Exit, InstanceSpec, NotSupported, Refused, StartFailed, UnknownInstance
from hawker.worker.drivers.driver import StartRelease, needed
from hawker.worker.flows.flow import Act, Done, Flow, Step, StepContext
from hawker.worker.machine.endings import Endings, hold_before, resized
from hawker.worker.machine.instance_spec import instance_spec, limits_of, reference_of
from hawker.worker.machine.writer import MachineWriter, get_machine

STARTS_TRIED = 24
"""How often a run asks for a driver that is down, or for its image after it has done something else: for a minute and a
half, and as long as each try takes. Then the machine has failed."""

PRESPAWNED_MAX = 1024
_ON_ITS_WAY = ("state", "desired", "cause", "restarts", "updated_at_ms", "instance", "started_at_ms")
"""Fields of a machine's row that no instance is told of."""


class Waiters(Protocol):
    """Who waits for the programs of runs."""

    async def released(self, run: str, instance: str, release: StartRelease) -> None:
        """The start is durable and the program was released; the driver has still to say whether it runs. Returns when
        the driver may be asked."""

    def launched(self, run: str, instance: str) -> float:
        """The program runs. Returns the time, by the event loop's clock, before which that is not committed."""


class _Prespawned:
    """The start that a launch will ask its driver for in its first attempt. `machine` is the row that the start was
    made from. `waits`: the driver has begun the start, so there is a process to release."""

    def __init__(self, spec: InstanceSpec, machine: MachineRow, waits: bool) -> None:
        self.spec = spec
        self.machine = machine
        self.waits = waits
        self.release: StartRelease = "no"


class MachineFlows:
    """The flows over one driver. `all()` gives them to the runner."""

    def __init__(
        self,
        context: WorkerContext,
        writer: MachineWriter,
        superseded: Callable[[MachineRow], str],
        waiters: Waiters,
    ) -> None:
        """`superseded` says why a machine must not be started here any more, or "". `waiters` are told of a run and its
        instance before that is committed."""
        self._store = context.store
        self._host = context.host
        self._drivers = context.drivers
        self._images = context.images
        self._disk_scale = context.settings.disk_scale
        self._image_timeout_s = context.settings.image_timeout_s
        self._writer = writer
        self._endings = Endings(context, writer)
        self._superseded = superseded
        self._waiters = waiters
        self._prespawned: dict[str, _Prespawned] = {}  # by key
        self._specs: dict[str, tuple[MachineRow, InstanceSpec]] = {}  # what machines were last started as

    def all(self) -> list[Flow]:
        prepare = Step("prepare", act=self._prepare)
        launch = Step("launch", act=self._launch, ahead=self._prespawn)
        stop = Step("stop", act=patient(self._stop))
        clear = Step("clear", act=patient(self._clear))
        purge = Step("purge", act=patient(self._purge))
        resting = Step("settle", act=patient(self._endings.undo), commit=self._endings.settle)
        backoff = Step("backoff", act=self._backoff)
        return [
            Flow("machine.create", 1, resting, [prepare, launch]),
            Flow("machine.start", 1, resting, [prepare, launch, Step("resume", act=patient(self._resume))]),
            Flow("machine.stop", 1, resting, [stop, clear]),
            Flow("machine.restart", 1, resting, [stop, clear, prepare, launch]),
            Flow("machine.update", 1, resting, [prepare, stop, clear, launch, Step("vacate", act=self._vacate)]),
            Flow("machine.suspend", 1, resting, [Step("suspend", act=patient(self._suspend))]),
            Flow("machine.resize", 1, resting, [Step("resize", act=patient(self._resize))]),
            Flow("machine.destroy", 1, resting, [stop, purge]),
            Flow("machine.exit", 1, resting, [clear, backoff, prepare, launch, purge]),
        ]

    # --- acts --------------------------------------------------------------------------------------------------------

    async def _prepare(self, context: StepContext) -> Done:
        """Make the image ready, as far as a driver can before there is an instance. The first time in a version, find
        out which bytes the reference means."""
        machine = self._not_superseded(context.run)
        reference = reference_of(machine)
        if self._images:
            hold_before(self._images, context.run)
        timeout_s = context.run.args.get("image_timeout_s") or self._image_timeout_s
        try:
            async with asyncio.timeout(self._image_left_s(context, timeout_s)):
                await self._drivers.of(machine.driver).prepare(reference)
        except ImageError as error:
            raise Abort(error.message) from error
        except TimeoutError as error:
            why = context.run.error
            raise Abort(
                f"image {machine.config['image']}: {NOT_IN_TIME} {timeout_s:g} s{why and f': {why}'}"
            ) from error
        except (Unreachable, DiskFull) as error:
            raise (Retry(error.message) if context.run.next == 0 else _tried(context, error.message)) from error
        found = self._images.find(reference) if self._images else None
        if found and self._images:
            self._images.hold(machine.id, found.digest)

        def commit(tx: Tx, run: RunRow) -> bool:
            row = get_machine(tx, run.resource)
            changes: dict[str, Any] = {"image_digest": found.digest} if found and not row.image_digest else {}
            if row.before:  # what comes next ends the program that ran on
                changes["before"] = None
            if changes:
                self._writer.move(tx, row, cause=run.cause, **changes)
            return True

        return Done(commit)

    def _image_left_s(self, context: StepContext, timeout_s: float) -> float:
        """How long this try may wait for the image. A run that begins with its image has `timeout_s` in all, also when
        its agent restarts meanwhile. A run that stops a program first has so much for each try, and its tries are
        counted."""
        length_ms = int(timeout_s * 1000)
        run = context.run
        if run.next:  # it has done something before
            return timeout_s
        return deadlines.left_ms(run.started_at_ms + length_ms, length_ms, self._host.now_ms()) / 1000

    def _not_superseded(self, run: RunRow) -> MachineRow:
        machine = get_machine(self._store.read, run.resource)
        if why := self._superseded(machine):
            raise Abort(f"not started: {why}")
        return machine

    def prespawn(self, machine: MachineRow, run_id: str) -> None:
        """Prepare the launch of a run that is about to be begun, while the commit that begins it is being written. Call
        `forget` if the run is not begun."""
        with suppress(HawkerError):  # the launch meets the same, and says so
            spec = self._spec(machine, effect_key(run_id, "launch"))
            waits = False
            if machine.driver in self._drivers.opened():
                ability = self._drivers.of(machine.driver).abilities.prespawning
                waits = ability is not None and ability.prespawn(spec)
            if not self._superseded(machine):
                if len(self._prespawned) >= PRESPAWNED_MAX:
                    self._prespawned.clear()  # of changes that have failed
                self._prespawned[spec.key] = _Prespawned(spec, machine, waits)

    def _spec(self, machine: MachineRow, key: str) -> InstanceSpec:
        """A machine that wakes most often wakes as what it was."""
        row, spec = self._specs.get(machine.id, (None, None))
        if row is None or spec is None or not _alike(row, machine):
            spec = instance_spec(machine, key, self._disk_scale)
            if len(self._specs) >= PRESPAWNED_MAX:
                self._specs.clear()
            self._specs[machine.id] = machine, spec
        return replace(spec, key=key)

    def forget(self, run_id: str) -> None:
        self._prespawned.pop(effect_key(run_id, "launch"), None)

    def _prespawn(self, tx: Tx, run: RunRow) -> None:
        machine, key = get_machine(tx, run.resource), effect_key(run.id, "launch")
        if key not in self._prespawned:
            self.prespawn(machine, run.id)
        prespawned = self._prespawned.get(key)
        if prespawned is None:
            return
        if not _alike(prespawned.machine, machine):  # another program was prespawned: `start` tells the driver so
            self.forget(run.id)
        elif prespawned.waits:
            tx.after_commit(lambda: self._release_start(prespawned))

    def _release_start(self, prespawned: _Prespawned) -> None:
        """The start is durable: the prespawned process may run before the driver is asked for the start."""
        if ability := self._drivers.of(prespawned.spec.driver).abilities.prespawning:
            prespawned.release = ability.release_start(prespawned.spec)

    async def _launch(self, context: StepContext) -> Done:
        prespawned = self._prespawned.pop(context.key, None)
        if prespawned is None:
            spec = instance_spec(self._not_superseded(context.run), context.key, self._disk_scale)
        else:
            spec = prespawned.spec
            if prespawned.release != "no":
                await self._waiters.released(context.run.id, context.key, prespawned.release)
        try:
            instance = await self._drivers.of(spec.driver).start(spec)
        except (StartFailed, NotSupported, ImageError) as error:
            raise Abort(str(error)) from error
        except (Unreachable, DiskFull, NetworkError) as error:
            raise _tried(context, str(error)) from error
        not_before_s = self._waiters.launched(context.run.id, instance.key)

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            *before, started = endings.stepped("launch", row.state)
            for state in before:
                row = self._writer.move(tx, row, state, cause=run.cause)
                row = self._writer.event(tx, row, "start", state, run)
            row = self._writer.move(
                tx,
                row,
                started,
                cause=run.cause,
                instance=instance.key,
                started_at_ms=instance.started_at_ms,
            )
            self._writer.event(tx, row, "start", "started", run)

        return Done(commit, not_before_s)

    async def _stop(self, context: StepContext) -> Done:
        args = context.run.args
        key: str = args["instance"]
        if not key:
            return Done()
        try:
            ended = await self._endings.had(context.run).stop(key, signal=args["signal"], grace_s=args["grace_s"])
        except UnknownInstance:
            ended = Exit(
                key=key,
                machine=context.run.resource,
                error="the instance was gone before it could be stopped",
                at_ms=self._host.now_ms(),
            )

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            if row.instance != key:
                return  # repeated after a crash: it is written already
            row = self._writer.move(tx, row, cause=run.cause, instance="")
            self._writer.exited(tx, row, run, ended, requested=True, restarting=False)

        return Done(commit)

    async def _clear(self, context: StepContext) -> Done:
        if key := context.run.args["instance"]:
            await self._endings.had(context.run).destroy(key, force=True)
        return Done()

    async def _vacate(self, context: StepContext) -> Done:
        """Remove what the machine left with the driver that had it before, because nothing would show it any more. A
        driver that is down keeps it until the machine is destroyed."""
        with suppress(Unreachable):
            await self._endings.had(context.run).purge(context.run.resource)
        return Done()

    async def _purge(self, context: StepContext) -> Done:
        await self._clear(context)
        await self._endings.purged(context.run.resource)
        return Done()

    async def _suspend(self, context: StepContext) -> Done:
        key: str = context.run.args["instance"]
        try:
            await needed(self._endings.had(context.run).abilities.suspending, "suspend").suspend(key)
        except UnknownInstance as error:
            raise Abort("the program ended before it could be suspended") from error

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            row = self._writer.move(tx, row, *endings.stepped("suspend", row.state), cause=run.cause)
            self._writer.event(tx, row, "suspend", row.state, run)

        return Done(commit)

    async def _resume(self, context: StepContext) -> Done:
        key: str = context.run.args["instance"]
        try:
            await needed(self._endings.had(context.run).abilities.suspending, "resume").resume(key)
        except UnknownInstance as error:
            raise Abort("the suspended program is gone") from error
        not_before_s = self._waiters.launched(context.run.id, key)

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            row = self._writer.move(tx, row, *endings.stepped("resume", row.state), cause=run.cause)
            self._writer.event(tx, row, "start", row.state, run)

        return Done(commit, not_before_s)

    async def _resize(self, context: StepContext) -> Done:
        guest = msgspec.convert(context.run.args["guest"], Guest)
        limits = limits_of(guest, self._disk_scale)
        try:
            resizing = needed(self._endings.had(context.run).abilities.resizing, "resize")
            await resizing.resize(context.run.args["instance"], limits)
        except UnknownInstance as error:
            raise Abort("the program ended before it could be resized") from error
        except (Refused, NotSupported) as error:
            raise Abort(str(error)) from error

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            self._writer.move(tx, row, cause=run.cause, config=resized(row.config, guest))

        return Done(commit)

    async def _backoff(self, context: StepContext) -> Done:
        """Wait until the time that was recorded when the run began; a worker killed meanwhile waits only for the
        rest."""
        await asyncio.sleep(backoff_left_ms(context.run, self._host.now_ms()) / 1000)
        return Done()


def backoff_left_ms(run: RunRow, now_ms: int) -> int:
    """How long a run with a step `backoff` still waits before it starts the program again."""
    until_ms: int = run.args.get("resume_at_ms", 0)
    return deadlines.left_ms(until_ms, until_ms - run.started_at_ms, now_ms)


def _alike(before: MachineRow, machine: MachineRow) -> bool:
    """Whether an instance would be the same by both rows of a machine."""
    now = {name: getattr(machine, name) for name in _ON_ITS_WAY}
    return replace(before, **now) == machine


def patient(act: Act) -> Act:
    """Have a step wait for its driver as long as it takes: the worker knows nothing about an instance whose driver is
    down."""

    async def patiently(context: StepContext) -> Done:
        try:
            return await act(context)
        except Unreachable as error:
            raise Retry(error.message) from error

    return patiently


def _tried(context: StepContext, why: str) -> Abort | Retry:
    return Abort(why) if context.attempt + 1 >= STARTS_TRIED else Retry(why)

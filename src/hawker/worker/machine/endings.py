"""The end of every flow of a machine: its resting state, and what is put right where it ends early."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from hawker.core.journal import effect_key
from hawker.core.life import endings
from hawker.core.life.endings import Undo
from hawker.images.base import ImageSource
from hawker.model.config import check_config
from hawker.model.guest import Guest
from hawker.model.machine import State
from hawker.model.rows import LeaseRow, MachineRow, RunRow, VersionRow
from hawker.store.tx import Tx
from hawker.worker import ports
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import Exit, NotSupported, Refused, UnknownInstance
from hawker.worker.drivers.driver import Driver, needed
from hawker.worker.flows.flow import Done, StepContext
from hawker.worker.machine.instance_spec import limits_of
from hawker.worker.machine.writer import MachineWriter, exit_request, get_machine


class Endings:
    """The final step of every flow of `hawker.worker.machine.flows`."""

    def __init__(self, context: WorkerContext, writer: MachineWriter) -> None:
        self._store = context.store
        self._drivers = context.drivers
        self._images = context.images
        self._disk_scale = context.settings.disk_scale
        self._writer = writer

    def had(self, run: RunRow) -> Driver:
        """The driver that has the instance a run began with: an update may have named another one for the next."""
        runtime: str = run.args.get("driver") or get_machine(self._store.read, run.resource).driver
        return self._drivers.of(runtime)

    async def purged(self, machine: str) -> None:
        self._drivers.of(get_machine(self._store.read, machine).driver)  # it must be there: it has the directory
        await self._drivers.purge(machine)

    async def undo(self, context: StepContext) -> Done:
        """After a failure or a cancel: no program is left that the machine will not know, started or half started."""
        run = context.run
        row = get_machine(self._store.read, run.resource)
        key: str = run.args.get("instance", "")
        for one in endings.undo(run, launched=_launched(row, run)):
            match one:
                case Undo.resume:
                    with suppress(UnknownInstance):  # it has ended: its exit is waiting for this run
                        await needed(self.had(run).abilities.suspending, "resume").resume(key)
                case Undo.resize_back:
                    with suppress(UnknownInstance, NotSupported, Refused):  # what it had it may have
                        limits = limits_of(check_config(row.config).guest, self._disk_scale)
                        await needed(self.had(run).abilities.resizing, "resize").resize(key, limits)
                case Undo.keep_program:
                    with suppress(UnknownInstance):  # it was lost with its host: then there is nothing to go back to
                        await self.had(run).inspect(key)
                        return Done(self._settle_as_before)
                case Undo.remove_new:
                    await self._drivers.of(row.driver).destroy(effect_key(run.id, "launch"), force=True)
                case Undo.remove_old:
                    await self.had(run).destroy(key, force=True)
                case Undo.purge:
                    await self.purged(run.resource)
        return Done(self.settle)

    def settle(self, tx: Tx, run: RunRow) -> None:
        """Write what the end of a run writes (`core.life.endings.rest`)."""
        row = get_machine(tx, run.resource)
        rest = endings.rest(run, row.state, launched=_launched(row, run))
        changes: dict[str, Any] = {}
        if rest.desired:
            changes["desired"] = rest.desired
        if rest.program_gone:
            changes["instance"] = ""
        if rest.resized:
            changes["resources"] = check_config(row.config).resources()
        if rest.one_version:
            changes["before"] = None
            self._let_go_of_before(tx, row)
        if State.destroyed in rest.path:
            changes["ports"] = ()
            self._let_go(tx, row)
        if changes or rest.path:
            row = self._writer.move(tx, row, *rest.path, cause=run.cause, **changes)
        if rest.event:
            request = _why(tx, row, run) if rest.early else None
            self._writer.event(tx, row, rest.event, rest.status or row.state, run, request=request)

    def _settle_as_before(self, tx: Tx, run: RunRow) -> None:
        """An update came to nothing while the old program ran on: the machine is what that program is. Metadata and a
        cordon that were set since stay."""
        row = get_machine(tx, run.resource)
        before = row.before
        assert before is not None  # until its image is there
        resources = check_config(before.config).resources()
        changes = {**msgspec.structs.asdict(before), "resources": resources, "before": None}
        wanted, metadata = tx.get(VersionRow, row.version), row.config.get("metadata")
        if wanted and metadata != wanted.config.get("metadata"):
            changes["config"] = {**before.config, "metadata": metadata}
        if row.cordoned != run.args.get("cordoned"):
            del changes["cordoned"]
        rest = endings.rest(run, row.state, launched=False, kept=True)
        row = self._writer.move(tx, row, *rest.path, cause=run.cause, desired=rest.desired, **changes)
        self._writer.event(tx, row, rest.event, rest.status, run, request=_why(tx, row, run))
        if (images := self._images) and before.image_digest:
            tx.after_commit(lambda: images.hold(row.id, before.image_digest))
        self._let_go_of_before(tx, row)

    def _let_go_of_before(self, tx: Tx, row: MachineRow) -> None:
        """An update has ended: what only the old program needed, or only a new one that never came."""
        ports.settle(tx, row)
        if images := self._images:
            tx.after_commit(lambda: images.release(_before(row.id)))

    def _let_go(self, tx: Tx, row: MachineRow) -> None:
        """What only a machine that is there needs."""
        tx.delete(LeaseRow, row.id)
        if row.ports:
            ports.release(tx, row.id)
        if images := self._images:
            tx.after_commit(lambda: images.release(row.id))


def _launched(row: MachineRow, run: RunRow) -> bool:
    """Whether the machine runs what this run started."""
    return row.instance == effect_key(run.id, "launch")


def _why(tx: Tx, row: MachineRow, run: RunRow) -> dict[str, Any]:
    """Why a flow did not do what it was begun for, as the `request` of the event that tells it."""
    ended = Exit(key=row.instance, machine=row.id, error=run.error, at_ms=tx.now_ms)
    return exit_request(row, ended, requested=run.ending == "cancelled", restarting=False)


def hold_before(images: ImageSource, run: RunRow) -> None:
    """Keep the image of the program that runs until an update has stopped it: the machine's own hold is for the new."""
    if digest := run.args.get("before", {}).get("image_digest"):
        images.hold(_before(run.resource), digest)


def _before(machine: str) -> str:
    return f"{machine} before its update"


def resized(config: dict[str, Any], guest: Guest) -> dict[str, Any]:
    """A machine's configuration with another size; nothing else of it changes."""
    return {**config, "guest": {**(config.get("guest") or {}), **msgspec.to_builtins(guest)}}

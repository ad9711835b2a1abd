"""The end of every flow of a machine: its resting state, and what is put right where it ends early."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from hawker.core.journal import effect_key
from hawker.images.base import ImageSource
from hawker.model.config import check_config
from hawker.model.guest import Guest
from hawker.model.machine import State
from hawker.model.rows import Before, LeaseRow, MachineRow, RunRow, VersionRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker import ports
from hawker.worker.drivers.base import Driver, Exit, NotSupported, Refused, UnknownInstance
from hawker.worker.drivers.several import Runtimes
from hawker.worker.flows.flow import Done, StepContext
from hawker.worker.instance_spec import limits_of
from hawker.worker.machine_log import MachineLog, exit_request, get_machine


class Settling:
    """The final steps of `hawker.worker.flows.machine`."""

    def __init__(
        self, store: Store, driver: Runtimes, log: MachineLog, images: ImageSource | None, disk_scale: float
    ) -> None:
        self._store = store
        self._driver = driver
        self._log = log
        self._images = images
        self._disk_scale = disk_scale

    def _had(self, run: RunRow) -> Driver:
        """The driver that has the instance a run began with: an update may have named another one for the next."""
        runtime: str = run.args.get("driver") or get_machine(self._store.read, run.resource).driver
        return self._driver.of(runtime)

    async def _purged(self, machine: str) -> None:
        self._driver.of(get_machine(self._store.read, machine).driver)  # it must be there: it has the directory
        await self._driver.purge(machine)

    async def _undo(self, context: StepContext) -> Done:
        """After a failure or a cancel: no program may be left that the machine will not know, started or half started.

        A failed suspend leaves the program running, frozen or not before. A machine that was on its way out goes all
        the way.
        """
        run = context.run
        key: str = run.args.get("instance", "")
        if run.flow == "machine.suspend":
            with suppress(UnknownInstance):  # it has ended: its exit is waiting for this run
                await self._had(run).resume(key)
            return Done(self._settle)
        if run.flow == "machine.resize":
            row = get_machine(self._store.read, run.resource)
            with suppress(UnknownInstance, NotSupported, Refused):  # as it was: what it had it may have
                await self._had(run).resize(key, limits_of(check_config(row.config).guest, self._disk_scale))
            return Done(self._settle)
        if "before" in run.args and "prepare" not in run.outputs:  # nothing was stopped yet
            with suppress(UnknownInstance):  # it was lost with its host: then there is nothing to go back to
                await self._had(run).inspect(key)
                return Done(self._settle_as_before)
        if "launch" in run.steps:
            row = get_machine(self._store.read, run.resource)
            if _launched(row, run):  # only what comes after that was given up
                return Done(self._settle)
            await self._driver.of(row.driver).destroy(effect_key(run.id, "launch"), force=True)
        if key:
            await self._had(run).destroy(key, force=True)
        if "purge" in run.steps:
            await self._purged(run.resource)
            return Done(self._settle_destroyed)
        return Done(self._settle)

    def _settle(self, tx: Tx, run: RunRow) -> None:
        """Write the resting state a flow ends in."""
        row = get_machine(tx, run.resource)
        if run.ending and not _launched(row, run):
            self._settle_undone(tx, run, row)
        elif run.flow == "machine.exit" and "purge" in run.steps:
            self._settle_destroyed(tx, run)
        elif run.flow == "machine.stop":
            row = self._log.move(tx, row, State.stopped, cause=run.cause)
            self._log.event(tx, row, "stop", "stopped", run)
        elif run.flow == "machine.resize":
            row = self._log.move(tx, row, cause=run.cause, resources=check_config(row.config).resources())
            self._log.event(tx, row, "resize", row.state, run)
        elif run.flow == "machine.update":
            changes = {"resources": check_config(row.config).resources()}
            self._let_go_of_before(tx, row)
            self._log.move(
                tx, row, *([State.stopped] if row.state is State.updating else []), cause=run.cause, **changes
            )
        elif run.flow == "machine.create" and "launch" not in run.steps:
            self._log.move(tx, row, State.stopped, cause=run.cause)

    def _settle_undone(self, tx: Tx, run: RunRow, row: MachineRow) -> None:
        """The state after an abort or a cancel: still running where nothing was stopped, failed or stopped
        otherwise."""
        if run.flow == "machine.resize":
            row = self._log.move(tx, row, cause=run.cause, resources=check_config(row.config).resources())
            self._log.event(tx, row, "resize", "failed", run, request=_why(tx, row, run))
            return
        if row.state is State.suspending:
            row = self._log.move(tx, row, State.started, cause=run.cause, desired="started")
            self._log.event(tx, row, "suspend", "failed", run, request=_why(tx, row, run))
            return
        target = State.failed if run.ending == "failed" else State.stopped
        path = {
            State.created: [State.starting, State.failed] if target is State.failed else [State.stopped],
            State.starting: [State.failed] if target is State.failed else [State.stopping, State.stopped],
            State.stopping: [target],
            State.restarting: [State.failed],
            State.updating: [target],
        }.get(row.state, [])
        changes: dict[str, Any] = {"resources": check_config(row.config).resources()}
        if run.flow == "machine.update":
            changes["before"] = None
            self._let_go_of_before(tx, row)
        row = self._log.move(tx, row, *path, cause=run.cause, instance="", desired="stopped", **changes)
        self._log.event(tx, row, "start", row.state, run, request=_why(tx, row, run))

    def _settle_as_before(self, tx: Tx, run: RunRow) -> None:
        """An update came to nothing while the old program ran on: the machine is what that program is. Metadata and a
        cordon that were set since stay."""
        row = get_machine(tx, run.resource)
        before = row.before or msgspec.convert(run.args["before"], Before)
        resources = check_config(before.config).resources()
        changes = {**msgspec.structs.asdict(before), "resources": resources, "before": None}
        wanted, metadata = tx.get(VersionRow, row.version), row.config.get("metadata")
        if wanted and metadata != wanted.config.get("metadata"):
            changes["config"] = {**before.config, "metadata": metadata}
        if row.cordoned != run.args.get("cordoned"):
            del changes["cordoned"]
        row = self._log.move(tx, row, State.started, cause=run.cause, desired="started", **changes)
        self._log.event(tx, row, "update", "failed", run, request=_why(tx, row, run))
        if (images := self._images) and before.image_digest:
            tx.after_commit(lambda: images.hold(row.id, before.image_digest))
        self._let_go_of_before(tx, row)

    def _let_go_of_before(self, tx: Tx, row: MachineRow) -> None:
        """An update has ended: what only the old program needed, or only a new one that never came."""
        ports.settle(tx, row)
        if images := self._images:
            tx.after_commit(lambda: images.release(_before(row.id)))

    def _settle_destroyed(self, tx: Tx, run: RunRow) -> None:
        row = get_machine(tx, run.resource)
        tx.delete(LeaseRow, row.id)
        if row.ports:
            ports.release(tx, row.id)
        if images := self._images:
            tx.after_commit(lambda: images.release(row.id))
        row = self._log.move(tx, row, State.destroyed, cause=run.cause, desired="destroyed", instance="", ports=())
        self._log.event(tx, row, "destroy", "destroyed", run)


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

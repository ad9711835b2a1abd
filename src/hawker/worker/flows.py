"""The flows of a machine, step by step: what each does outside, and what it writes.

| flow            | steps before `settle`                                | begun by                       |
|-----------------|------------------------------------------------------|--------------------------------|
| machine.create  | launch (none with skip_launch)                       | a confirmed reservation        |
| machine.start   | launch; resume when suspended                        | a request                      |
| machine.stop    | stop, clear                                          | a request                      |
| machine.restart | stop, clear, launch                                  | a request                      |
| machine.update  | stop, clear, launch when it runs; none when at rest  | a request                      |
| machine.suspend | suspend                                              | a request                      |
| machine.destroy | stop, purge                                          | a request                      |
| machine.exit    | clear; backoff, launch to start again; or purge      | the program's end, a lost host |

The outside effects are calls of the driver, keyed `run/step`; every one may be repeated. `settle` is the final
step: it writes the resting state, and after a failure or a cancel first removes what a launch may have left. Which
runs begin when is decided in `hawker.worker.machines` and `hawker.worker.exits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hawker.core.journal import effect_key
from hawker.errors import Abort
from hawker.host import Host
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import LeaseRow, MachineRow, RunRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.drivers.base import Driver, Exit, InstanceSpec, Limits, StartFailed, UnknownInstance
from hawker.worker.flow import Done, Flow, Step, StepContext
from hawker.worker.machine_log import MachineLog, exit_request, get_machine

SHARED_CPU_MILLIS = 62  # a sixteenth of a core, the share that upstream documents for one shared cpu


class MachineFlows:
    """The flows over one driver. `all()` gives them to the runner."""

    def __init__(
        self,
        store: Store,
        host: Host,
        driver: Driver,
        log: MachineLog,
        superseded: Callable[[MachineRow], str] = lambda machine: "",
    ) -> None:
        """`superseded` says why a machine must not be started here any more, or ""."""
        self._store = store
        self._host = host
        self._driver = driver
        self._log = log
        self._superseded = superseded

    def all(self) -> list[Flow]:
        launch = Step("launch", act=self._launch)
        stop = Step("stop", act=self._stop)
        clear = Step("clear", act=self._clear)
        purge = Step("purge", act=self._purge)
        resting = Step("settle", act=self._undo, commit=self._settle)
        gone = Step("settle", act=self._undo, commit=self._settle_destroyed)
        return [
            Flow("machine.create", 1, resting, [launch]),
            Flow("machine.start", 1, resting, [launch, Step("resume", act=self._resume)]),
            Flow("machine.stop", 1, resting, [stop, clear]),
            Flow("machine.restart", 1, resting, [stop, clear, launch]),
            Flow("machine.update", 1, resting, [stop, clear, launch]),
            Flow("machine.suspend", 1, resting, [Step("suspend", act=self._suspend)]),
            Flow("machine.destroy", 1, gone, [stop, purge]),
            Flow("machine.exit", 1, resting, [clear, Step("backoff", act=self._backoff), launch, purge]),
        ]

    # --- acts --------------------------------------------------------------------------------------------------------

    async def _launch(self, context: StepContext) -> Done:
        machine = get_machine(self._store.read, context.run.resource)
        if why := self._superseded(machine):
            raise Abort(f"not started: {why}")
        try:
            instance = await self._driver.start(instance_spec(machine, context.key))
        except StartFailed as error:
            raise Abort(str(error)) from error

        def commit(tx: Tx, run: RunRow) -> None:
            row = get_machine(tx, run.resource)
            if row.state is not State.starting:
                row = self._log.move(tx, row, State.starting, cause=run.cause)
                row = self._log.event(tx, row, "start", "starting", run)
            row = self._log.move(
                tx,
                row,
                State.started,
                cause=run.cause,
                instance=instance.key,
                started_at_ms=instance.started_at_ms,
            )
            self._log.event(tx, row, "start", "started", run)

        return Done(commit)

    async def _stop(self, context: StepContext) -> Done:
        args = context.run.args
        key: str = args["instance"]
        if not key:
            return Done()
        try:
            ended = await self._driver.stop(key, signal=args["signal"], grace_s=args["grace_s"])
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
            row = self._log.move(tx, row, cause=run.cause, instance="")
            self._log.exited(tx, row, run, ended, requested=True, restarting=False)

        return Done(commit)

    async def _clear(self, context: StepContext) -> Done:
        if key := context.run.args["instance"]:
            await self._driver.destroy(key, force=True)
        return Done()

    async def _purge(self, context: StepContext) -> Done:
        await self._clear(context)
        await self._driver.purge(context.run.resource)
        return Done()

    async def _suspend(self, context: StepContext) -> Done:
        key: str = context.run.args["instance"]
        try:
            await self._driver.suspend(key)
        except UnknownInstance as error:
            raise Abort("the program ended before it could be suspended") from error

        def commit(tx: Tx, run: RunRow) -> None:
            row = self._log.move(tx, get_machine(tx, run.resource), State.suspended, cause=run.cause)
            self._log.event(tx, row, "suspend", "suspended", run)

        return Done(commit)

    async def _resume(self, context: StepContext) -> Done:
        key: str = context.run.args["instance"]
        try:
            await self._driver.resume(key)
        except UnknownInstance as error:
            raise Abort("the suspended program is gone") from error

        def commit(tx: Tx, run: RunRow) -> None:
            row = self._log.move(tx, get_machine(tx, run.resource), State.started, cause=run.cause)
            self._log.event(tx, row, "start", "started", run)

        return Done(commit)

    async def _backoff(self, context: StepContext) -> Done:
        """Wait until the time that was recorded when the run began; a worker killed meanwhile waits only for the
        rest."""
        await asyncio.sleep(max(0, context.run.args["resume_at_ms"] - self._host.now_ms()) / 1000)
        return Done()

    # --- final steps -------------------------------------------------------------------------------------------------

    async def _undo(self, context: StepContext) -> Done:
        """After a failure or a cancel: no program may be left that the machine will not know, started or half started.

        A failed suspend leaves the program running, frozen or not before. A machine that was on its way out goes all
        the way.
        """
        run = context.run
        key: str = run.args.get("instance", "")
        if run.flow == "machine.suspend":
            with suppress(UnknownInstance):  # it has ended: its exit is waiting for this run
                await self._driver.resume(key)
            return Done(self._settle)
        if "launch" in run.steps:
            await self._driver.destroy(effect_key(run.id, "launch"), force=True)
        if key:
            await self._driver.destroy(key, force=True)
        if "purge" in run.steps:
            await self._driver.purge(run.resource)
            return Done(self._settle_destroyed)
        return Done(self._settle)

    def _settle(self, tx: Tx, run: RunRow) -> None:
        """Write the resting state a flow ends in."""
        row = get_machine(tx, run.resource)
        if run.ending:
            self._settle_undone(tx, run, row)
        elif run.flow == "machine.exit" and "purge" in run.steps:
            self._settle_destroyed(tx, run)
        elif run.flow == "machine.stop":
            row = self._log.move(tx, row, State.stopped, cause=run.cause)
            self._log.event(tx, row, "stop", "stopped", run)
        elif run.flow == "machine.update":
            changes = {"resources": check_config(row.config).guest.resources()}
            self._log.move(
                tx, row, *([State.stopped] if row.state is State.updating else []), cause=run.cause, **changes
            )
        elif run.flow == "machine.create" and "launch" not in run.steps:
            self._log.move(tx, row, State.stopped, cause=run.cause)

    def _settle_undone(self, tx: Tx, run: RunRow, row: MachineRow) -> None:
        """The state after an abort or a cancel: still running where nothing was stopped, failed or stopped
        otherwise."""
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
        changes = {"resources": check_config(row.config).guest.resources()}
        row = self._log.move(tx, row, *path, cause=run.cause, instance="", desired="stopped", **changes)
        self._log.event(tx, row, "start", row.state, run, request=_why(tx, row, run))

    def _settle_destroyed(self, tx: Tx, run: RunRow) -> None:
        row = get_machine(tx, run.resource)
        tx.delete(LeaseRow, row.id)
        row = self._log.move(tx, row, State.destroyed, cause=run.cause, desired="destroyed", instance="")
        self._log.event(tx, row, "destroy", "destroyed", run)


def _why(tx: Tx, row: MachineRow, run: RunRow) -> dict[str, Any]:
    """Why a flow did not do what it was begun for, as the `request` of the event that tells it."""
    ended = Exit(key=row.instance, machine=row.id, error=run.error, at_ms=tx.now_ms)
    return exit_request(row, ended, requested=run.ending == "cancelled", restarting=False)


def instance_spec(machine: MachineRow, key: str) -> InstanceSpec:
    """What the driver is asked to run: the machine's command line, its environment with ours on top, its limits."""
    config = check_config(machine.config)
    dedicated = config.guest.cpu_kind == "performance"
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **config.env,
        "FLY_APP_NAME": machine.app,
        "FLY_MACHINE_ID": machine.id,
        "FLY_ALLOC_ID": machine.id,
        "FLY_REGION": machine.region,
        "FLY_IMAGE_REF": config.image,
        "FLY_MACHINE_VERSION": machine.version,
        "FLY_PRIVATE_IP": machine.private_ip,
        "FLY_PROCESS_GROUP": config.metadata.get("fly_process_group", "app"),
        "FLY_VM_MEMORY_MB": str(config.guest.memory_mb),
        "PRIMARY_REGION": config.env.get("PRIMARY_REGION", machine.region),
    }
    limits = Limits(
        cpu_millis=config.guest.cpus * (1000 if dedicated else SHARED_CPU_MILLIS),
        memory_mib=config.guest.memory_mb,
        dedicated=dedicated,
    )
    return InstanceSpec(key=key, machine=machine.id, image=config.image, argv=config.argv, env=env, limits=limits)

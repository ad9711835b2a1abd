"""What clients may ask of a machine: the checks that must hold, then the run that does it.

Each request is one change: lease, state and room are checked and the run is recorded in the same commit, so an
answer of 200 means the work survives a crash. What a request does that finds its machine busy is in
`hawker.worker.requests`, what changes a machine's configuration in `hawker.worker.updating`, the steps in
`hawker.worker.flows.machine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from hawker.errors import Conflict, DeadlineExceeded, NotBuilt, PreconditionFailed
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow
from hawker.store.tx import Tx
from hawker.worker.flows.machine import launching
from hawker.worker.flows.runner import active_run
from hawker.worker.machine_log import get_machine
from hawker.worker.request import Request
from hawker.worker.requests import IN_BACKOFF, only_waits, require, runs_on, stop_args
from hawker.worker.updating import Updates

RUN_WAIT_S = 75.0  # less than a broker waits for an answer


class Machines(Updates):
    """The operations on machines that exist. Creating one is the market's: `hawker.worker.market`."""

    async def start(self, app: str, machine_id: str, request: Request) -> tuple[State, str]:
        """Start a machine at rest or in a backoff, or wake a suspended one. Returns its state before, and the run (""
        if none was needed), which for one whose image is on its way is the run that will start it.

        Raises `PreconditionFailed` in a wrong state, `ledger.Full` when the worker has no room for it now.
        """

        def change(tx: Tx) -> tuple[State, str]:
            row = self._leased(tx, app, machine_id, request)
            if begun := self._on_its_way(tx, row):
                return row.state, begun.id
            row, _ = self._freed(tx, app, machine_id, request, of=lambda run: only_waits(run) and not runs_on(run))
            return row.state, self._start(tx, row, request)

        return await self._when_free(change)

    async def wake(self, app: str, machine_id: str, request: Request, run_id: str = "") -> str:
        """`start` for a proxy: what holds the machine is neither waited for nor ended. Returns the run ("" if none was
        needed), which is `run_id` where that is given. Raises `Busy`, too."""
        return await self._store.submit(
            lambda tx: self._start(tx, self._free(tx, app, machine_id, request), request, run_id),
        )

    def _start(self, tx: Tx, row: MachineRow, request: Request, run_id: str = "") -> str:
        if row.state is State.started:
            return ""
        require(row, "start", State.created, State.stopped, State.suspended, State.failed, IN_BACKOFF)
        asleep = row.state is State.suspended

        def writes(tx: Tx, run: RunRow) -> None:
            after = self._log.move(tx, row, State.starting, cause=run.cause, desired="started", restarts=0)
            self._log.event(tx, after, "start", "starting", run)

        steps = ["resume"] if asleep else launching(row.config)
        return self._begin(tx, "machine.start", row, steps, request, writes, {"instance": row.instance}, run_id).id

    async def rest(
        self, app: str, machine_id: str, request: Request, *, suspend: bool = False, instance: str = ""
    ) -> State:
        """Begin to stop an idle machine for a proxy, or to suspend it where its driver can. Returns the state it is
        on its way to, or in. What holds it is left alone, and so is another `instance`: raises `Busy`,
        `PreconditionFailed`."""
        if suspend:
            suspend = (await self._can(get_machine(self._store.read, machine_id, app).driver)).suspend

        def change(tx: Tx) -> State:
            row = self._free(tx, app, machine_id, request)
            if row.state in (State.stopped, State.suspended):
                return row.state
            require(row, "rest", State.started)
            if instance and row.instance != instance:
                raise PreconditionFailed(f"failed_precondition: machine {machine_id} runs as {row.instance} by now")
            if suspend:
                self._suspend(tx, row, request)
            else:
                self._stop(tx, row, request)
            return State.suspended if suspend else State.stopped

        return await self._store.submit(change)

    async def stop(
        self, app: str, machine_id: str, request: Request, *, signal: int | None = None, timeout_s: float | None = None
    ) -> str:
        """Stop a machine: signal, grace time, then kill. One at rest stays as it is. Returns the run ("" if none)."""

        def change(tx: Tx) -> str:
            row = self._free(tx, app, machine_id, request)
            if row.state is State.stopped:
                return ""
            require(row, "stop", State.created, State.started, State.suspended, State.failed)
            return self._stop(tx, row, request, signal, timeout_s)

        return await self._when_free(change, ends_backoff=True)

    def _stop(
        self, tx: Tx, row: MachineRow, request: Request, signal: int | None = None, timeout_s: float | None = None
    ) -> str:
        def writes(tx: Tx, run: RunRow) -> None:
            after = self._log.move(tx, row, State.stopping, cause=run.cause, desired="stopped")
            self._log.event(tx, after, "stop", "stopping", run)

        args = stop_args(row, signal, timeout_s)
        return self._begin(tx, "machine.stop", row, ["stop", "clear"], request, writes, args).id

    async def restart(
        self,
        app: str,
        machine_id: str,
        request: Request,
        *,
        signal: int | None = None,
        timeout_s: float | None = None,
        force: bool = False,
    ) -> str:
        """Stop and start a running machine, keeping its room. With `force` it is killed without a grace time. One in a
        backoff starts now, one whose image is on its way when it is there."""

        def change(tx: Tx) -> str:
            row = self._leased(tx, app, machine_id, request)
            if begun := self._on_its_way(tx, row):
                return begun.id
            row, _ = self._freed(tx, app, machine_id, request)
            require(row, "restart", State.started, IN_BACKOFF)
            waiting = row.state is IN_BACKOFF

            def writes(tx: Tx, run: RunRow) -> None:
                path = [] if waiting else [State.restarting]
                after = self._log.move(tx, row, *path, cause=run.cause, desired="started", restarts=0)
                self._log.event(tx, after, "restart", after.state, run)

            steps = [*([] if waiting else ["stop", "clear"]), *launching(row.config)]
            args = stop_args(row, signal, 0.0 if force else timeout_s)
            return self._begin(tx, "machine.restart", row, steps, request, writes, args).id

        return await self._when_free(change)

    async def suspend(self, app: str, machine_id: str, request: Request) -> str:
        """Freeze a running machine, memory kept. Raises `NotBuilt` where the driver cannot."""
        runtime = get_machine(self._store.read, machine_id, app).driver
        if not (await self._can(runtime)).suspend:
            raise NotBuilt("suspend", machine_id, f"the {runtime} driver cannot suspend on this host; use stop")

        def change(tx: Tx) -> str:
            row = self._free(tx, app, machine_id, request)
            if row.state is State.suspended:
                return ""
            require(row, "suspend", State.started)
            return self._suspend(tx, row, request)

        return await self._when_free(change)

    def _suspend(self, tx: Tx, row: MachineRow, request: Request) -> str:
        def writes(tx: Tx, run: RunRow) -> None:
            after = self._log.move(tx, row, State.suspending, cause=run.cause, desired="suspended")
            self._log.event(tx, after, "suspend", "suspending", run)

        args = {"instance": row.instance}
        return self._begin(tx, "machine.suspend", row, ["suspend"], request, writes, args).id

    async def destroy(self, app: str, machine_id: str, request: Request, *, force: bool = False) -> str:
        """Remove a machine and everything it left. Returns the run ("" if none was needed), which may be one that was
        begun before: repeating is harmless.

        One that runs is refused unless `force`, which also ends whatever run holds the machine, a parked one included,
        and tries the step again at which an earlier destroy was parked.
        """

        def change(tx: Tx) -> str:
            row = self._leased(tx, app, machine_id, request)
            if row.state in (State.destroyed, State.destroying):
                return holder.id if (holder := active_run(tx, row.id)) else ""
            row = self._free(tx, app, machine_id, request)
            if not force:
                resting = (State.created, State.stopped, State.suspended, State.failed)
                require(row, "destroy", *resting, hint="stop it first, or destroy it with force=true")

            def writes(tx: Tx, run: RunRow) -> None:
                after = self._log.move(tx, row, State.destroying, cause=run.cause, desired="destroyed")
                self._log.event(tx, after, "destroy", "destroying", run)

            args = stop_args(row, None, 0.0)
            return self._begin(tx, "machine.destroy", row, ["stop", "purge"], request, writes, args).id

        run_id = await self._when_free(change, force=force, ends_backoff=True)
        if force and run_id and (run := self._store.read.get(RunRow, run_id)) and run.status == "parked":
            with suppress(Conflict):  # another request has unparked it a moment before
                await self._runner.unpark(run_id, request.cause)
        return run_id

    async def cordon(self, app: str, machine_id: str, request: Request, *, cordoned: bool) -> None:
        """Take a machine out of traffic, or put it back. Needs the lease only to cordon, as upstream."""

        def change(tx: Tx) -> None:
            row = self._leased(tx, app, machine_id, request) if cordoned else get_machine(tx, machine_id, app)
            if row.cordoned != cordoned:
                kind = "machine.cordoned" if cordoned else "machine.uncordoned"
                tx.record(kind, row.id, cause=request.cause, trace=request.trace)
                before = row.before and replace(row.before, cordoned=cordoned)
                self._log.move(tx, row, cause=request.cause, cordoned=cordoned, before=before)

        await self._store.submit(change)

    async def set_metadata(
        self,
        app: str,
        machine_id: str,
        request: Request,
        edit: Callable[[dict[str, str]], dict[str, str]],
        *,
        version: str = "",
    ) -> None:
        """Replace a machine's metadata by what `edit` makes of it. No new version: nothing is restarted.

        Raises `PreconditionFailed` when `version` is given and not the present one.
        """

        def change(tx: Tx) -> None:
            row = get_machine(tx, machine_id, app)
            if version and version != row.version:
                raise PreconditionFailed(f"failed_precondition: machine {machine_id} has version {row.version}")
            metadata = edit(dict(check_config(row.config).metadata))
            tx.record("machine.metadata_set", row.id, cause=request.cause, trace=request.trace)
            self._log.move(tx, row, cause=request.cause, config={**row.config, "metadata": metadata})

        await self._store.submit(change)

    async def wait_ended(self, run_id: str) -> RunRow | None:
        """The run's end, or that it is parked; None for the empty run of a request that had nothing to do. Raises
        `DeadlineExceeded` after `RUN_WAIT_S`, as for a driver that is not there; the run goes on."""
        try:
            async with asyncio.timeout(RUN_WAIT_S):
                return await self._runner.wait_ended(run_id) if run_id else None
        except TimeoutError:
            run = self._store.read.get(RunRow, run_id)
            why = f": {run.error}" if run and run.error else ""
            raise DeadlineExceeded(
                f"deadline_exceeded: {run.flow if run else run_id} of machine {run.resource if run else ''} has not "
                f"ended within {RUN_WAIT_S:g} s and is still at it{why}"
            ) from None

"""What clients may ask of a machine: the checks that must hold, then the run that does it.

Each request is one change: lease, state and room are checked and the run is recorded in the same commit, so an
answer of 200 means the work survives a crash. What may be asked when, and what it begins, is decided in
`hawker.core.life.wishes`; `hawker.worker.machine.updates` changes a machine's configuration; the steps are in
`hawker.worker.machine.flows`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from hawker.core.life import wishes
from hawker.core.life.wishes import Wish
from hawker.errors import Conflict, DeadlineExceeded, NotBuilt, PreconditionFailed
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow
from hawker.model.values import is_host_image
from hawker.store.tx import Tx
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.driver_set import capabilities
from hawker.worker.flows.runner import Busy, active_run
from hawker.worker.machine.admission import Admission, stop_args
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import Request

RUN_WAIT_S = 75.0  # less than a broker waits for an answer


class Machines:
    """The operations on machines that exist. Creating one is the market's: `hawker.worker.market`.

    Each raises `PreconditionFailed` in a wrong state, `Busy` when a run is in its way that it does not wait for, and
    `ledger.Full` when the worker has no room for it now. Each returns the run that it has begun or joined, "" where
    none was needed.
    """

    def __init__(self, context: WorkerContext, writer: MachineWriter, admission: Admission) -> None:
        self._store = context.store
        self._drivers = context.drivers
        self._runner = context.runner
        self._writer = writer
        self._admission = admission

    async def start(self, app: str, machine_id: str, request: Request) -> tuple[State, str]:
        """Start a machine at rest or in a backoff, or resume a suspended one. Returns its state before, too."""

        def change(tx: Tx) -> tuple[State, str]:
            row, run = self._begin(tx, Wish.start, app, machine_id, request)
            return row.state, run

        return await self._admission.submit(Wish.start, change)

    async def wake(self, app: str, machine_id: str, request: Request, run_id: str = "") -> str:
        """`start` for a proxy: raises `Busy` for every run in the way. `run_id` is the id of the run that it begins."""

        def change(tx: Tx) -> str:
            if holder := active_run(tx, machine_id):
                raise Busy(holder)
            return self._begin(tx, Wish.wake, app, machine_id, request, run_id=run_id)[1]

        return await self._store.submit(change)

    async def rest(
        self, app: str, machine_id: str, request: Request, *, suspend: bool = False, instance: str = ""
    ) -> State:
        """Begin to stop an idle machine for a proxy, or to suspend it where its driver can. Returns the state it is
        on its way to, or in. Another `instance` is left alone."""
        if suspend:
            suspend = (await capabilities(self._drivers, get_machine(self._store.read, machine_id, app).driver)).suspend
        wish = Wish.rest_suspended if suspend else Wish.rest

        def change(tx: Tx) -> State:
            row, run = self._begin(tx, wish, app, machine_id, request)
            if not run:
                return row.state
            if instance and row.instance != instance:
                raise PreconditionFailed(f"failed_precondition: machine {machine_id} runs as {row.instance} by now")
            return State.suspended if suspend else State.stopped

        return await self._store.submit(change)

    async def stop(
        self, app: str, machine_id: str, request: Request, *, signal: int | None = None, timeout_s: float | None = None
    ) -> str:
        """Stop a machine: signal, grace time, then kill. One at rest stays as it is."""
        return await self._submit(Wish.stop, app, machine_id, request, signal, timeout_s)

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
        return await self._submit(Wish.restart, app, machine_id, request, signal, 0.0 if force else timeout_s)

    async def suspend(self, app: str, machine_id: str, request: Request) -> str:
        """Freeze a running machine, memory kept. Raises `NotBuilt` where the driver cannot."""
        runtime = get_machine(self._store.read, machine_id, app).driver
        if not (await capabilities(self._drivers, runtime)).suspend:
            raise NotBuilt("suspend", machine_id, f"the {runtime} driver cannot suspend on this host; use stop")
        return await self._submit(Wish.suspend, app, machine_id, request)

    async def destroy(self, app: str, machine_id: str, request: Request, *, force: bool = False) -> str:
        """Remove a machine and everything it left. One that is being destroyed goes on so: repeating is harmless.

        One that runs is refused unless `force`, which also ends whatever run holds the machine, a parked one included,
        and tries the step again at which an earlier destroy was parked.
        """
        wish = Wish.force_destroy if force else Wish.destroy

        def change(tx: Tx) -> str:
            row = self._admission.leased(tx, app, machine_id, request)
            if row.state in (State.destroyed, State.destroying):
                return holder.id if (holder := active_run(tx, row.id)) else ""
            return self._begin(tx, wish, app, machine_id, request, timeout_s=0.0)[1]

        run_id = await self._admission.submit(wish, change)
        if force and run_id and (run := self._store.read.get(RunRow, run_id)) and run.status == "parked":
            with suppress(Conflict):  # another request has unparked it a moment before
                await self._runner.unpark(run_id, request.cause)
        return run_id

    async def _submit(
        self,
        wish: Wish,
        app: str,
        machine_id: str,
        request: Request,
        signal: int | None = None,
        timeout_s: float | None = None,
    ) -> str:
        return await self._admission.submit(
            wish, lambda tx: self._begin(tx, wish, app, machine_id, request, signal=signal, timeout_s=timeout_s)[1]
        )

    def _begin(
        self,
        tx: Tx,
        wish: Wish,
        app: str,
        machine_id: str,
        request: Request,
        *,
        run_id: str = "",
        signal: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[MachineRow, str]:
        """The machine as a wish finds it, and the run that it begins or joins, "" for none."""
        admitted = self._admission.admit(tx, wish, app, machine_id, request)
        row = admitted.row
        if admitted.joined:
            return row, admitted.joined.id
        plan = wishes.plan(wish, row.id, row.state, of_host=is_host_image(str(row.config["image"])))
        if plan is None:
            return row, ""
        args = stop_args(row, signal, timeout_s) if plan.stops else {"instance": row.instance}
        return row, self._admission.begin(tx, row, plan, request, args, run_id=run_id).id

    async def cordon(self, app: str, machine_id: str, request: Request, *, cordoned: bool) -> None:
        """Take a machine out of traffic, or put it back. Needs the lease only to cordon, as upstream."""

        def change(tx: Tx) -> None:
            row = self._admission.leased(tx, app, machine_id, request) if cordoned else get_machine(tx, machine_id, app)
            if row.cordoned != cordoned:
                kind = "machine.cordoned" if cordoned else "machine.uncordoned"
                tx.record(kind, row.id, cause=request.cause, trace=request.trace)
                before = row.before and replace(row.before, cordoned=cordoned)
                self._writer.move(tx, row, cause=request.cause, cordoned=cordoned, before=before)

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
            self._writer.move(tx, row, cause=request.cause, config={**row.config, "metadata": metadata})

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

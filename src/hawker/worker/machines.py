"""What clients may ask of a machine: the checks that must hold, then the run that does it.

Each request is one change: lease, state and room are checked and the run is recorded in the same commit, so an
answer of 200 means the work survives a crash. What a request does that finds its machine busy is in
`hawker.worker.requests`, the steps in `hawker.worker.flows`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.core import capacity
from hawker.errors import Conflict, DeadlineExceeded, Invalid, NotBuilt, PreconditionFailed
from hawker.host import Host
from hawker.model.config import Config, check_config
from hawker.model.guest import Guest, Resources, check_guest, larger
from hawker.model.machine import State
from hawker.model.rows import LeaseRow, MachineRow, RunRow, VersionRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker import leases, ledger, ports
from hawker.worker.drivers.base import Capabilities
from hawker.worker.drivers.several import Runtimes
from hawker.worker.flows import Before, launching, resized
from hawker.worker.machine_log import MachineLog, get_machine
from hawker.worker.request import Request
from hawker.worker.requests import IN_BACKOFF, Requests, only_waits, require, runs_on
from hawker.worker.runner import Runner, active_run

RUN_WAIT_S = 75.0  # less than a broker waits for an answer


class Machines(Requests):
    """The operations on machines that exist. Creating one is the market's: `hawker.worker.market`."""

    def __init__(self, store: Store, host: Host, driver: Runtimes, log: MachineLog, runner: Runner) -> None:
        super().__init__(store, runner)
        self._host = host
        self._driver = driver
        self._log = log

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

    async def wake(self, app: str, machine_id: str, request: Request) -> str:
        """`start` for a proxy: what holds the machine is neither waited for nor ended. Returns the run ("" if none was
        needed). Raises `Busy`, too."""
        return await self._store.submit(
            lambda tx: self._start(tx, self._free(tx, app, machine_id, request), request),
        )

    def _start(self, tx: Tx, row: MachineRow, request: Request) -> str:
        if row.state is State.started:
            return ""
        require(row, "start", State.created, State.stopped, State.suspended, State.failed, IN_BACKOFF)
        asleep = row.state is State.suspended

        def writes(tx: Tx, run: RunRow) -> None:
            after = self._log.move(tx, row, State.starting, cause=run.cause, desired="started", restarts=0)
            self._log.event(tx, after, "start", "starting", run)

        steps = ["resume"] if asleep else launching(check_config(row.config))
        return self._begin(tx, "machine.start", row, steps, request, writes, {"instance": row.instance}).id

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

        args = _stop_args(row, signal, timeout_s)
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

            steps = [*([] if waiting else ["stop", "clear"]), *launching(check_config(row.config))]
            args = _stop_args(row, signal, 0.0 if force else timeout_s)
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

    async def update(
        self,
        app: str,
        machine_id: str,
        request: Request,
        *,
        config: Config,
        current_version: str = "",
        skip_launch: bool = False,
        lease_ttl_s: int = 0,
        cordoned: bool | None = None,
    ) -> tuple[MachineRow, LeaseRow | None]:
        """Replace the configuration: a new version. A running machine is stopped and started with it, one in a backoff
        starts with it now, as does one whose image was on its way; one at rest stays at rest. A running one whose new
        image cannot be had stays what it was. Returns the row as it is right after acceptance.

        Raises `Conflict` when `current_version` is not the present one, `ledger.Full` when a larger guest has no room,
        also when it never will have, `NotBuilt` for an image that this worker's driver does not run.
        """
        found = (await self._driver.fingerprints()).get(config.runtime)
        if found and found.healthy and not config.of_host and not found.capabilities.images:
            raise NotBuilt("config.image", config.image, f"the {config.runtime} driver of this worker runs no images")
        if found is None or not found.healthy:
            why = found.problem if found else "it has no such driver"
            raise NotBuilt("config.runtime", config.runtime, f"this worker cannot run it: {why}")

        def change(tx: Tx) -> tuple[MachineRow, LeaseRow | None]:
            row, ended = self._freed(tx, app, machine_id, request, of=only_waits)
            if current_version and current_version != row.version:
                raise Conflict(
                    f"aborted: machine {machine_id} has version {row.version}, not {current_version}: read it again",
                    details={"current_version": row.version},
                )
            at_rest = (State.created, State.stopped, State.failed)
            require(row, "update", State.started, State.suspended, *at_rest, *([row.state] if ended else []))
            overtakes = ended is not None and runs_on(ended)
            waiting = ended is not None and "launch" in ended.steps and not overtakes
            resting = row.state in at_rest and not waiting
            version = self._host.ulid()
            wanted = config.resources()
            if short := capacity.shortfall(self._log.capacity, Resources(), wanted):
                raise ledger.Full(short)
            launch = (row.state is State.started or waiting or overtakes) and not skip_launch
            before = _before(row, ended)
            has = check_config(before["config"]).resources() if overtakes else row.resources
            changes: dict[str, Any] = {
                "version": version,
                "config": config.raw,
                "resources": wanted if resting or waiting else larger(has, wanted),
                "desired": "started" if launch else "stopped",
                "driver": config.runtime,
                "image_digest": "",
            }
            if waiting:
                changes["restarts"] = 0
            if cordoned is not None:
                changes["cordoned"] = cordoned

            def writes(tx: Tx, run: RunRow) -> None:
                tx.put(VersionRow(id=version, machine=row.id, config=config.raw, created_at_ms=tx.now_ms))
                changes["ports"] = ports.assign(tx, self._log.ports, row.id, config, row.ports, self._log.holder)
                path = [State.updating, State.stopped] if resting else [State.updating]
                if waiting:
                    path = [] if launch else _TO_REST[row.state]
                after = self._log.move(tx, row, *path, cause=run.cause, **changes)
                self._log.event(tx, after, "update", after.state, run)

            # What is new is made ready while the old one runs.
            first, last = ([], []) if not launch else (launching(config)[:-1], launching(config)[-1:])
            steps = [*first, *([] if resting or waiting else ["stop", "clear"]), *last]
            args = _stop_args(row, None, None)
            if overtakes and ended:  # of the program that runs
                args = {name: ended.args[name] for name in args}
            if args["driver"] != config.runtime:
                steps.append("vacate")
            if first and "stop" in steps:  # while its image is on its way there is something to go back to
                args["before"] = before
            self._begin(tx, "machine.update", row, steps, request, writes, msgspec.to_builtins(args))
            after = get_machine(tx, machine_id)
            lease = leases.acquire(tx, self._host, after, request, lease_ttl_s) if lease_ttl_s else None
            return after, lease

        return await self._when_free(change)

    async def resize(
        self, app: str, machine_id: str, request: Request, *, memory_mb: int, cpus: int | None = None
    ) -> str:
        """Give a machine another size: one that runs goes on running, one at rest starts with it. No new version: of
        the configuration only the guest changes. Returns the run ("" if it has that size).

        Raises `ledger.Full` when there is no room for more, `NotBuilt` where its driver cannot do it.
        """
        row = get_machine(self._store.read, machine_id, app)
        can = (await self._can(row.driver)).resize

        def change(tx: Tx) -> str:
            row = self._free(tx, app, machine_id, request)
            at_rest = (State.created, State.stopped, State.failed)
            require(row, "resize", State.started, *at_rest)
            present = check_config(row.config)
            guest = _sized(present, memory_mb, cpus)
            if guest == present.guest:
                return ""
            runs = row.state is State.started
            if runs and not can:
                raise NotBuilt(
                    "limit_mb", memory_mb, f"the {row.driver} driver cannot do this to a machine that runs; update it"
                )
            after = replace(present, guest=guest).resources()
            if short := capacity.shortfall(self._log.capacity, Resources(), after):
                raise ledger.Full(short)

            def writes(tx: Tx, run: RunRow) -> None:
                if runs:  # until it is done it may have either
                    now = self._log.move(tx, row, cause=run.cause, resources=larger(row.resources, after))
                else:
                    config = resized(row.config, guest)
                    now = self._log.move(tx, row, cause=run.cause, resources=after, config=config)
                self._log.event(tx, now, "resize", "resizing", run)

            args = {"instance": row.instance, "guest": msgspec.to_builtins(guest)}
            return self._begin(tx, "machine.resize", row, ["resize"] if runs else [], request, writes, args).id

        return await self._when_free(change)

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

            args = _stop_args(row, None, 0.0)
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
                self._log.move(tx, row, cause=request.cause, cordoned=cordoned)

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

    async def _can(self, runtime: str) -> Capabilities:
        """Raises `DriverDown`: what a driver can do that is not there, nobody knows."""
        self._driver.of(runtime)
        found = (await self._driver.fingerprints()).get(runtime)
        return found.capabilities if found else Capabilities()

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


_TO_REST = {
    State.created: [State.stopped],
    State.starting: [State.stopping, State.stopped],
    State.restarting: [State.failed, State.updating],  # whose end is `stopped`
}
"""The way of an update that finds a machine without a program, and shall not start it."""


def _before(row: MachineRow, ended: RunRow | None) -> dict[str, Any]:
    """The fields of a `Before`: of an update that this one takes the place of, its own."""
    if ended and runs_on(ended):
        before: dict[str, Any] = ended.args["before"]
        return before
    return {name: getattr(row, name) for name in Before.__struct_fields__}


def _stop_args(row: MachineRow, signal: int | None, timeout_s: float | None) -> dict[str, Any]:
    """How to stop the present instance, fixed when the run begins: an update may change the configuration after it."""
    stop = check_config(row.config).stop
    stop = replace(
        stop,
        signal=stop.signal if signal is None else signal,
        timeout_s=stop.timeout_s if timeout_s is None else timeout_s,
    )
    return {"instance": row.instance, "driver": row.driver, "signal": stop.signal, "grace_s": stop.timeout_s}


def _sized(config: Config, memory_mb: int, cpus: int | None) -> Guest:
    """The guest asked for. Raises `Invalid` in the words of the request."""
    asked = {"cpu_kind": config.guest.cpu_kind, "cpus": cpus or config.guest.cpus, "memory_mb": memory_mb}
    try:
        guest = check_guest(asked, "guest")
    except Invalid as error:
        field = "cpus" if error.field == "guest.cpus" else "limit_mb"
        raise Invalid(field, error.value, error.remedy) from None
    if config.max_memory_mb and memory_mb > config.max_memory_mb:
        raise Invalid("limit_mb", memory_mb, f"its guest.max_memory_mb is {config.max_memory_mb}")
    return guest

"""What clients may ask of a machine's configuration: another version of it, or another size.

Like all requests (`hawker.worker.machines`) each is one change, and a run that does it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.core import capacity
from hawker.errors import Conflict, Invalid, NotBuilt
from hawker.host import Host
from hawker.model.config import Config, check_config
from hawker.model.guest import Guest, Resources, check_guest, larger
from hawker.model.machine import State
from hawker.model.rows import Before, LeaseRow, MachineRow, RunRow, VersionRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker import leases, ledger, ports
from hawker.worker.drivers.base import Capabilities
from hawker.worker.drivers.several import Runtimes
from hawker.worker.flows.machine import launching
from hawker.worker.flows.runner import Runner
from hawker.worker.flows.settling import resized
from hawker.worker.machine_log import MachineLog, get_machine
from hawker.worker.request import Request
from hawker.worker.requests import Requests, only_waits, require, runs_on, stop_args


class Updates(Requests):
    """See `Machines`."""

    def __init__(self, store: Store, host: Host, driver: Runtimes, log: MachineLog, runner: Runner) -> None:
        super().__init__(store, runner)
        self._host = host
        self._driver = driver
        self._log = log

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
        image_timeout_s: int = 0,
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
            has = check_config(before.config).resources() if overtakes else row.resources
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

            # What is new is made ready while the old one runs.
            first, last = ([], []) if not launch else (launching(config.raw)[:-1], launching(config.raw)[-1:])
            steps = [*first, *([] if resting or waiting else ["stop", "clear"]), *last]
            goes_on = bool(first) and "stop" in steps  # while its image is on its way there is something to go back to
            changes["before"] = before if goes_on else None

            def writes(tx: Tx, run: RunRow) -> None:
                tx.put(VersionRow(id=version, machine=row.id, config=config.raw, created_at_ms=tx.now_ms))
                changes["ports"] = ports.assign(tx, self._log.ports, row.id, config, row.ports, self._log.holder)
                path = [State.updating, State.stopped] if resting else [State.updating]
                if waiting:
                    path = [] if launch else _TO_REST[row.state]
                after = self._log.move(tx, row, *path, cause=run.cause, **changes)
                self._log.event(tx, after, "update", after.state, run)

            args = stop_args(row, None, None)
            if overtakes and ended:  # of the program that runs
                args = {name: ended.args[name] for name in args}
            if args["driver"] != config.runtime:
                steps.append("vacate")
            if goes_on:
                args["before"] = before
                args["cordoned"] = ended.args.get("cordoned") if overtakes and ended and cordoned is None else cordoned
            if image_timeout_s:
                args["image_timeout_s"] = image_timeout_s
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

    async def _can(self, runtime: str) -> Capabilities:
        """Raises `DriverDown`: what a driver can do that is not there, nobody knows."""
        self._driver.of(runtime)
        found = (await self._driver.fingerprints()).get(runtime)
        return found.capabilities if found else Capabilities()


_TO_REST = {
    State.created: [State.stopped],
    State.starting: [State.stopping, State.stopped],
    State.restarting: [State.failed, State.updating],  # whose end is `stopped`
}
"""The way of an update that finds a machine without a program, and shall not start it."""


def _before(row: MachineRow, ended: RunRow | None) -> Before:
    """Of an update that this one takes the place of, its own."""
    if ended and runs_on(ended):
        return row.before or msgspec.convert(ended.args["before"], Before)
    return Before(**{name: getattr(row, name) for name in Before.__struct_fields__})


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

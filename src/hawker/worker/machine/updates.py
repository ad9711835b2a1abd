"""What clients may ask of a machine's configuration: another version of it, or another size.

Like all requests (`hawker.worker.machine.operations`) each is one change, and a run that does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.core import capacity
from hawker.core.life import wishes
from hawker.core.life.phases import Phase, fetches_beside, phase_of
from hawker.core.life.wishes import Found, Wish
from hawker.errors import Conflict, Invalid, NotBuilt
from hawker.model.config import Config, check_config
from hawker.model.guest import Guest, Resources, check_guest, larger
from hawker.model.rows import Before, LeaseRow, MachineRow, RunRow, VersionRow
from hawker.store.tx import Tx
from hawker.worker import ledger, ports
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.driver_set import capabilities
from hawker.worker.machine import leases
from hawker.worker.machine.admission import Admission, stop_args
from hawker.worker.machine.endings import resized
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import Request


class Updates:
    """Changes of what a machine is."""

    def __init__(self, context: WorkerContext, writer: MachineWriter, admission: Admission) -> None:
        self._store = context.store
        self._host = context.host
        self._drivers = context.drivers
        self._writer = writer
        self._admission = admission

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
        found = (await self._drivers.fingerprints()).get(config.runtime)
        if found and found.healthy and not config.of_host and not found.capabilities.images:
            raise NotBuilt("config.image", config.image, f"the {config.runtime} driver of this worker runs no images")
        if found is None or not found.healthy:
            why = found.problem if found else "it has no such driver"
            raise NotBuilt("config.runtime", config.runtime, f"this worker cannot run it: {why}")

        def change(tx: Tx) -> tuple[MachineRow, LeaseRow | None]:
            admitted = self._admission.admit(tx, Wish.update, app, machine_id, request)
            row, replaced = admitted.row, admitted.replaced
            if current_version and current_version != row.version:
                raise Conflict(
                    f"aborted: machine {machine_id} has version {row.version}, not {current_version}: read it again",
                    details={"current_version": row.version},
                )
            gives_way = phase_of(replaced)
            found = wishes.found_by_update(row.id, row.state, gives_way)
            wanted = config.resources()
            if short := capacity.shortfall(self._writer.capacity, Resources(), wanted):
                raise ledger.Full(short)
            before = _before(row, replaced)
            args = stop_args(row)
            has = row.resources
            if replaced and found is Found.updating:  # what runs is of the version before that
                args = {name: replaced.args[name] for name in args}
                has = check_config(before.config).resources()
            moves = args["driver"] != config.runtime
            plan = wishes.update(found, row.state, of_host=config.of_host, skip_launch=skip_launch, moves=moves)
            beside = fetches_beside(plan.steps)
            if beside:
                args["before"] = before
                overtaken = replaced.args.get("cordoned") if replaced and found is Found.updating else None
                args["cordoned"] = overtaken if cordoned is None else cordoned
            if image_timeout_s:
                args["image_timeout_s"] = image_timeout_s
            version = self._host.ulid()

            def changes(tx: Tx) -> Mapping[str, Any]:
                tx.put(VersionRow(id=version, machine=row.id, config=config.raw, created_at_ms=tx.now_ms))
                return {
                    "version": version,
                    "config": config.raw,
                    "resources": wanted if found in (Found.at_rest, Found.waiting) else larger(has, wanted),
                    "driver": config.runtime,
                    "image_digest": "",
                    "before": before if beside else None,
                    "ports": ports.assign(tx, self._writer.ports, row.id, config, row.ports, self._writer.holder),
                    "cordoned": row.cordoned if cordoned is None else cordoned,
                }

            self._admission.begin(tx, row, plan, request, msgspec.to_builtins(args), changes=changes)
            after = get_machine(tx, machine_id)
            lease = leases.acquire(tx, self._host, after, request, lease_ttl_s) if lease_ttl_s else None
            return after, lease

        return await self._admission.submit(Wish.update, change)

    async def resize(
        self, app: str, machine_id: str, request: Request, *, memory_mb: int, cpus: int | None = None
    ) -> str:
        """Give a machine another size: one that runs goes on running, one at rest starts with it. No new version: of
        the configuration only the guest changes. Returns the run ("" if it has that size).

        Raises `ledger.Full` when there is no room for more, `NotBuilt` where its driver cannot do it.
        """
        row = get_machine(self._store.read, machine_id, app)
        can = (await capabilities(self._drivers, row.driver)).resize

        def change(tx: Tx) -> str:
            row = self._admission.admit(tx, Wish.resize, app, machine_id, request).row
            present = check_config(row.config)
            plan = wishes.plan(Wish.resize, row.id, row.state, of_host=present.of_host)
            guest = _sized(present, memory_mb, cpus)
            if plan is None or guest == present.guest:
                return ""
            if plan.steps and not can:
                raise NotBuilt(
                    "limit_mb", memory_mb, f"the {row.driver} driver cannot do this to a machine that runs; update it"
                )
            after = replace(present, guest=guest).resources()
            if short := capacity.shortfall(self._writer.capacity, Resources(), after):
                raise ledger.Full(short)
            changes: dict[str, Any] = {"resources": after, "config": resized(row.config, guest)}
            if plan.steps:  # until it is done it may have either
                changes = {"resources": larger(row.resources, after)}
            args = {"instance": row.instance, "guest": msgspec.to_builtins(guest)}
            return self._admission.begin(tx, row, plan, request, args, changes=lambda tx: changes).id

        return await self._admission.submit(Wish.resize, change)


def _before(row: MachineRow, replaced: RunRow | None) -> Before:
    """What the program is that runs: of an update that this one takes the place of, its own."""
    if replaced and phase_of(replaced) is Phase.fetching_beside:
        assert row.before is not None  # as long as that one fetches
        return row.before
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

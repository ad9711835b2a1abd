"""What a worker tells the catalog: for each kind of its rows, the rows that the fleet sees of it.

The outbox calls a projection with every changed row, inside the change that wrote it
(`hawker.catalog.publish.outbox`). The region sees machines, coarse free capacity and a sketch of the images; every
region sees the worker itself, the apps it has, and what it knows of them. State that somebody waits for is urgent: it
is published in the very commit. The rest may wait for others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec

import hawker
from hawker import __version__
from hawker.catalog import apps
from hawker.catalog.publish.outbox import Outbox, Projected, Projection, published
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.errors import Invalid
from hawker.host import Host
from hawker.model.catalog import Change
from hawker.model.door import stands_in_for
from hawker.model.guest import RESOURCES, Guest, Resources
from hawker.model.machine import SETTLED, State
from hawker.model.rows import (
    AppRow,
    CheckRow,
    LedgerRow,
    MachineRow,
    PublishedRow,
    Row,
    SketchRow,
    TallyRow,
    WorkerRow,
    published_key,
)
from hawker.model.services import Protocol, Service, check_services, concurrency_json, merged, ports_json
from hawker.store.tx import Reads

STEPS = 16
"""Free capacity is published in sixteenths: at most 16 rows from empty to full, and a live offer says the rest."""

LEAVING = frozenset((State.stopping, State.suspending, State.restarting, State.updating, State.destroying))
"""The program is about to end, or to sleep. Proxies wait for that: what is sent to it from then on may be lost."""

AT_REST = frozenset((State.created, State.stopped, State.suspended, State.failed))

Read = dict[tuple[Protocol, int], Service]


class Publishing:
    """The projections of one worker, which other agents reach at `host:port`, and proxies at `host:proxy_port`, if not
    0."""

    def __init__(
        self, name: str, region: str, host: str, port: int, capacity: Resources, driver: str, *, proxy_port: int = 0
    ) -> None:
        self._name = name
        self._region = region
        self._host = host
        self._port = port
        self._proxy_port = proxy_port
        self._capacity = capacity
        self._totals = [(name.removesuffix("_mib"), name, getattr(capacity, name)) for name in RESOURCES]
        self._driver = driver
        self._services: dict[str, set[str]] = {}  # keys by machine that are published, or were since the start
        self._read: dict[str, tuple[str, Read]] = {}  # what machines' services say, and of which version

    def outbox(self, host: Host) -> Outbox:
        """What publishes by these projections."""
        identity = msgspec.json.encode((self._name, self._region, _program()))
        projections_id = blake2b(identity, digest_size=16).hexdigest()
        always = (WorkerRow, LedgerRow)  # what they show follows the settings, and how much of the disk is free
        return Outbox(
            *(host, OwnerLog(host, self._name), self.projections()),
            projections_id=projections_id,
            always=always,
            unhurried=(LedgerRow, SketchRow),
        )

    def recall(self, reads: Reads) -> None:
        """At a start: which services are published, so that they end with what they show."""
        for name in published(reads, "region", "services"):
            self._services.setdefault(name.partition("/")[0], set()).add(name)

    def projections(self) -> Mapping[type[Row], Projection]:
        return {
            WorkerRow: self._worker,
            LedgerRow: self._free,
            MachineRow: self._machine,
            CheckRow: self._check,
            TallyRow: self._app_region,
            AppRow: self._app,
            SketchRow: self._images,
        }

    def _worker(self, reads: Reads, key: str, row: WorkerRow) -> list[Projected]:
        values = {
            "region": row.region,
            "host": self._host,
            "port": self._port,
            "proxy_port": self._proxy_port,
            "state": "cordoned" if row.cordoned else "active",
            "version": __version__,
            "driver": self._driver,
            "capacity": _json(self._capacity),
            "since_ms": row.created_at_ms,
            "began_ms": row.started_again_ms,
        }
        return [("global", Change("workers", row.name, values), True)]

    def _free(self, reads: Reads, key: str, row: LedgerRow) -> list[Projected]:
        free = {column: _sixteenths(total, getattr(row.held, name)) for column, name, total in self._totals}
        return [("region", Change("capacity", self._name, free), False)]

    def _machine(self, reads: Reads, key: str, row: MachineRow | None) -> list[Projected]:
        row = row and row.as_it_runs()
        if row is None or (row.state is State.destroyed and row.generation == 1):
            # A later generation is told of for ever: the worker of the one before it may come back.
            return [("region", Change("machines", key, None), True), *self._ports(key, row, True)]
        guest = row.config.get("guest") or {}
        values = {
            "app": row.app,
            "name": row.name,
            "region": row.region,
            "state": row.state.value,
            "desired": row.desired,
            "generation": row.generation,
            "version": row.version,
            "image": str(row.config.get("image", "")),
            "private_ip": row.private_ip,
            "process_group": _group(row),
            "cpu_kind": str(guest.get("cpu_kind") or Guest().cpu_kind),
            "cpus": row.resources.cpus_shared + row.resources.cpus_dedicated,
            "memory_mib": row.resources.memory_mib,
            "cordoned": row.cordoned,
            "hidden": True if (row.config.get("dns") or {}).get("skip_registration") else None,
            **(_as_standby(reads, row) if row.config.get("standbys") else {}),
            "created_at_ms": row.created_at_ms,
        }
        urgent = row.state in SETTLED or (row.state in LEAVING and bool(row.ports))
        return [("region", Change("machines", key, values), urgent), *self._ports(key, row, urgent)]

    def _ports(self, key: str, row: MachineRow | None, urgent: bool) -> list[Projected]:
        """What the machine serves, and the end of what it served before."""
        served = {}
        if row is not None and row.state is not State.destroyed:
            services = self._services_of(row) if row.ports else {}
            for port in row.ports:
                service = services.get((port.protocol, port.internal_port))
                served[f"{key}/{port.protocol}/{port.internal_port}"] = {
                    "machine": key,
                    "app": row.app,
                    "process_group": _group(row),
                    "protocol": port.protocol,
                    "internal_port": port.internal_port,
                    "host_port": port.host_port,
                    **(_to_proxies(row, service) if service else {}),
                }
        else:
            self._read.pop(key, None)
        before = self._services.get(key)
        if not served and not before:
            return []
        every = self._services[key] = (before or set()) | served.keys()
        return [("region", Change("services", name, served.get(name)), urgent) for name in sorted(every)]

    def _services_of(self, row: MachineRow) -> Read:
        """They are what they are for a version, and a machine's row is published with every change of its state."""
        known = self._read.get(row.id)
        if known is None or known[0] != row.version:
            known = self._read[row.id] = row.version, _services(row)
        return known[1]

    def _check(self, reads: Reads, key: str, row: CheckRow | None) -> list[Projected]:
        """Proxies wait for those that decide about traffic."""
        if row is None:
            return [("region", Change("checks", key, None), False)]
        values = {
            "machine": row.machine,
            "app": row.app,
            "name": row.name,
            "kind": row.kind,
            "service": row.service,
            "status": row.status,
            "updated_at_ms": row.updated_at_ms,
        }
        return [("region", Change("checks", key, values), row.kind != "informational")]

    def _app_region(self, reads: Reads, key: str, row: TallyRow) -> list[Projected]:
        """Whether an app has machines here, not how many: that would travel to every region with every machine."""
        values = {"region": self._region, "machines": 1} if row.machines else None
        return [("global", Change("app_regions", row.app, values), True)]

    def _app(self, reads: Reads, key: str, row: AppRow) -> list[Projected]:
        return [("global", Change("apps", row.name, apps.values(row)), True)]

    def _images(self, reads: Reads, key: str, row: SketchRow | None) -> list[Projected]:
        names, layers = (row.names, row.layers) if row else ((), ())
        values = {"names": _json(names), "layers": _json(layers)} if names or layers else None
        return [("region", Change("images", self._name, values), False)]


@cache
def _program() -> list[tuple[str, int, int]]:
    """The files of this Hawker: between two versions of them nobody knows what has become of the projections."""
    root = os.path.dirname(hawker.__file__)  # pathlib takes three times as long for it, at each start
    found = (os.path.join(place, name) for place, _, names in os.walk(root) for name in names if name.endswith(".py"))
    stats = ((path, os.stat(path)) for path in found)
    return sorted((path[len(root) + 1 :], stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _as_standby(reads: Reads, row: MachineRow) -> dict[str, Any]:
    """Whom it stands by for, and for whose absence it was started last, whatever became of it since: proxies go by it
    that began later."""
    there = reads.get(PublishedRow, published_key("region", "machines", row.id))
    before = (there.values if there else None) or {}
    stood_for, at_ms = before.get("stood_for"), before.get("stood_at_ms")
    now = stands_in_for(row.cause) if row.state not in AT_REST else ""
    if now and (now != stood_for or before.get("state") in AT_REST):
        stood_for, at_ms = now, row.updated_at_ms
    return {"standbys": _json(row.config["standbys"]), "stood_for": stood_for, "stood_at_ms": at_ms}


def _services(row: MachineRow) -> Read:
    """By port inside. A configuration that an older Hawker took and this one would refuse keeps its ports: nothing that
    is published may fail the commit that it is published in."""
    try:
        return merged(check_services(row.config.get("services"), "config.services"))
    except Invalid:
        return {}


def _to_proxies(row: MachineRow, service: Service) -> dict[str, Any]:
    """The columns that say how proxies treat it. `min_machines_running` counts in the app's primary region alone, if
    its configuration names one as flyctl does (environment variable PRIMARY_REGION)."""
    primary = (row.config.get("env") or {}).get("PRIMARY_REGION") or row.region
    return {
        "ports": ports_json(service.ports),
        "concurrency": concurrency_json(service.concurrency),
        "autostart": service.autostart,
        "autostop": service.autostop,
        "min_machines_running": service.min_machines_running if primary == row.region else 0,
    }


def _group(row: MachineRow) -> str:
    metadata = row.config.get("metadata") or {}
    return str(metadata.get("fly_process_group", "app"))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sixteenths(total: int, held: int) -> int:
    """Rounded down: nobody counts on what may not be there."""
    return max(0, (total - held) * STEPS // total) if total else 0

"""What the catalog shows of a worker's machines: the machines themselves, what they serve, and their health checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hawker.catalog.publish.outbox import Projected, Projection, published
from hawker.errors import Invalid
from hawker.model.catalog import Change
from hawker.model.door import stands_in_for
from hawker.model.guest import Guest
from hawker.model.machine import SETTLED, State
from hawker.model.rows import CheckRow, MachineRow, PublishedRow, Row, published_key
from hawker.model.services import Protocol, Service, catalog_json, check_services, merged
from hawker.store.tx import Reads

LEAVING = frozenset((State.stopping, State.suspending, State.restarting, State.updating, State.destroying))
"""The program is about to end, or to sleep. Proxies wait for that: what is sent to it from then on may be lost."""

AT_REST = frozenset((State.created, State.stopped, State.suspended, State.failed))

Read = dict[tuple[Protocol, int], Service]


def projections(reads: Reads) -> Mapping[type[Row], Projection]:
    found = _Projections(reads)
    return {MachineRow: found.machine, CheckRow: found.check}


class _Projections:
    """`reads` tell which services are published when the worker begins, so that they end with what they show."""

    def __init__(self, reads: Reads) -> None:
        self._services: dict[str, set[str]] = {}  # keys by machine that are published, or were since the start
        self._read: dict[str, tuple[str, Read]] = {}  # what machines' services say, and of which version
        for name in published(reads, "region", "services"):
            self._services.setdefault(name.partition("/")[0], set()).add(name)

    def machine(self, reads: Reads, key: str, row: MachineRow | None) -> list[Projected]:
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

    def check(self, reads: Reads, key: str, row: CheckRow | None) -> list[Projected]:
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
        "ports": catalog_json(service.ports),
        "concurrency": catalog_json(service.concurrency),
        "autostart": service.autostart,
        "autostop": service.autostop,
        "min_machines_running": service.min_machines_running if primary == row.region else 0,
    }


def _group(row: MachineRow) -> str:
    metadata = row.config.get("metadata") or {}
    return str(metadata.get("fly_process_group", "app"))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

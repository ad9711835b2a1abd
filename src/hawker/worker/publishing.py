"""What a worker tells the catalog of itself: for each type of its rows, the rows that the fleet sees of it.

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
from hawker.catalog.publish.outbox import Outbox, Projected, Projection
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.host import Host
from hawker.model.catalog import Change
from hawker.model.guest import RESOURCES, Resources
from hawker.model.rows import (
    AppRow,
    LedgerRow,
    Row,
    SketchRow,
    TallyRow,
    WorkerRow,
)
from hawker.store.tx import Reads

STEPS = 16
"""Free capacity is published in sixteenths: at most 16 rows from empty to full, and a live offer says the rest."""


class Publishing:
    """The projections of one worker, which other agents reach at `host:port`, and proxies at `host:proxy_port`, if not
    0."""

    def __init__(
        self,
        name: str,
        region: str,
        host: str,
        port: int,
        capacity: Resources,
        driver: str,
        *,
        proxy_port: int = 0,
        of_kinds: Mapping[type[Row], Projection] | None = None,
    ) -> None:
        """`of_kinds` are the projections of what the kinds bring."""
        self._name = name
        self._region = region
        self._host = host
        self._port = port
        self._proxy_port = proxy_port
        self._capacity = capacity
        self._totals = [(name.removesuffix("_mib"), name, getattr(capacity, name)) for name in RESOURCES]
        self._driver = driver
        self._of_kinds = of_kinds or {}

    def outbox(self, host: Host) -> Outbox:
        """The outbox that publishes what these projections show."""
        identity = msgspec.json.encode((self._name, self._region, _program()))
        projections_id = blake2b(identity, digest_size=16).hexdigest()
        if not all(row.__module__.startswith("hawker.") for row in self._of_kinds):
            projections_id = ""  # nobody knows here when another package changes: compare all at every start
        always = (WorkerRow, LedgerRow)  # what they show follows the settings, and how much of the disk is free
        return Outbox(
            *(host, OwnerLog(host, self._name), self.projections()),
            projections_id=projections_id,
            always=always,
            unhurried=(LedgerRow, SketchRow),
        )

    def projections(self) -> Mapping[type[Row], Projection]:
        return {
            WorkerRow: self._worker,
            LedgerRow: self._free,
            TallyRow: self._app_region,
            AppRow: self._app,
            SketchRow: self._images,
            **self._of_kinds,
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


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sixteenths(total: int, held: int) -> int:
    """Rounded down: nobody counts on what may not be there."""
    return max(0, (total - held) * STEPS // total) if total else 0

"""What an engine of the catalog is to the rest of Hawker: `Catalog`, and what it takes from a worker: `Source`.

An engine brings what every worker publishes to every node, and shows it there as the tables of `catalog.tables.schema`.
Each row has one owner, and an owner's versions are shown whole and in their order. The configuration names the engine
(`[catalog] engine`); `catalog.engines` finds it by the entry point group `hawker.catalogs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hawker.catalog.view import RowView
from hawker.host import Host
from hawker.http.handlers import Route
from hawker.model.api import Member
from hawker.model.catalog import Change, Position, Range, Tier, Version
from hawker.store.sql import TEXT_MAX, Found
from hawker.telemetry import Metrics


class Source(Protocol):
    """The log of what one worker publishes, in the worker's database: durable, numbered, newest version of each key
    only. An engine keeps the position up to which it took the log beside what it took, in one transaction, and asks
    `since` there: then nothing is lost or doubled, wherever either of the two was cut off."""

    @property
    def owner(self) -> str: ...

    async def open(self, seen: Mapping[Tier, Position], ready: Callable[[Version], None]) -> None:
        """Begin a new epoch, above those of `seen`: how much of this log the engine holds. `ready` is called with each
        version after its commit, in order; the engine takes what is there before by `since`."""

    async def close(self) -> None: ...

    def since(self, tier: Tier, at: Position) -> Range:
        """What brings an engine that stands at `at` to the end of this log. Raises `StoreError`."""

    async def raise_epoch(self, tier: Tier, above: int) -> None:
        """Somebody holds more of this log than there is: begin an epoch above theirs. Raises `StoreError`."""

    async def put(self, tier: Tier, change: Change, kind: str, cause: str) -> None:
        """Publish a row that no row of the worker's shows, with a record of this `kind`. Raises `StoreError`."""


class Readable(RowView, Protocol):
    """A view that also answers people's queries."""

    def ask(self, query: str, text_max: int = TEXT_MAX) -> Found:
        """Read one statement within limits. Raises `Invalid`, `StoreError`."""


class Catalog(Protocol):
    """One node's engine. The view can be read from the beginning, as it was left the last time."""

    @property
    def view(self) -> Readable: ...

    async def open(self, source: Source | None) -> None:
        """Take part; publish `source`, if this node has a worker. Raises what keeps the node from taking part."""

    async def close(self) -> None:
        """Leave. May be called again."""

    async def joined(self, within_s: float) -> None:
        """Wait until what is known elsewhere was read, at most so long, and not at all with nobody to ask. Raises
        `HawkerError` when another node has this one's name."""

    def routes(self) -> Iterable[Route]:
        """What other nodes ask of this one. Nodes ask before the agent's roles serve."""

    def seen(self, owner: str) -> Mapping[Tier, Position]:
        """How much of an owner's log is here."""

    def complete(self) -> bool:
        """Whether all is here that this region knows, so that what the view does not show is not there. Raises
        `StoreError`."""

    def unfit(self) -> str:
        """Why this node should get no traffic now, "" when it may. Raises `StoreError`."""

    def owners(self) -> list[Member]:
        """Every node that the engine knows of, and how fresh its rows are here. Raises `StoreError`."""

    async def forget(self, name: str, cause: str) -> None:
        """Tell all nodes to drop what `name` published, which is gone for good. It comes back by publishing again.
        Raises `NotFound`, `StoreError`."""

    def measure(self, metrics: Metrics) -> None:
        """Set the gauges of this engine, just before somebody reads the metrics."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is made of. `host`, `port`: where others reach this agent; `bind` is the address it listens on,
    with `bind_port` where that differs from `port`. `path` is the engine's own file, on `machine.vfs` where that is a
    simulated disk. `settings` is the engine's own table of the configuration, `[catalog.<engine>]`."""

    name: str
    region: str
    roles: tuple[str, ...] = ()
    host: str
    port: int
    bind: str
    bind_port: int = 0
    cluster: str
    secrets: tuple[str, ...]
    token: str
    join: tuple[tuple[str, int], ...] = ()
    path: Path
    machine: Host
    metrics: Metrics
    settings: Mapping[str, Any] = {}


MakeCatalog = Callable[[Site], Catalog]
"""What an entry point of the group `hawker.catalogs` names."""

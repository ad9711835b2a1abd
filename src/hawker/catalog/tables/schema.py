"""The tables of the catalog: their columns and the views that readers see.

A table is a struct of its columns. Every column may be missing (None), and readers see its default: adding one
replicates nothing. How a table is laid out in SQLite, and which rows it takes, is in `layout`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hawker.model.catalog import Tier

TEXT_MOST = 4096
NAME_CHARACTERS = "A-Za-z0-9._-"
"""Of a node's name, as every agent's configuration is held to. Readers ask nodes by their names, in headers and paths:
one of other characters is no node, and is not shown."""

Text = Annotated[str, Meta(max_length=TEXT_MOST, extra={"default": ""})]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1, extra={"default": 0})]
Flag = Annotated[bool, Meta(extra={"default": False})]
JsonList = Annotated[str, Meta(max_length=TEXT_MOST, extra={"default": "[]", "json": list})]
JsonMap = Annotated[str, Meta(max_length=TEXT_MOST, extra={"default": "{}", "json": dict})]


class Columns(msgspec.Struct, frozen=True):
    """Base of a table's columns."""


class Worker(Columns, frozen=True):
    """A node and how to reach its API. The key is its name."""

    region: Text | None = None
    host: Text | None = None
    port: Count | None = None
    proxy_port: Count | None = None  # of the proxy that is the door to its machines; 0: it has none
    state: Text | None = None  # active, cordoned
    version: Text | None = None  # of Hawker
    driver: Text | None = None
    capacity: JsonMap | None = None
    since_ms: Count | None = None  # when its database was made
    began_ms: Count | None = None  # when it was started last


class AppRegion(Columns, frozen=True):
    """That a node has machines of an app. The key is the app's name; `machines` counts in coarse steps."""

    region: Text | None = None
    machines: Count | None = None


class App(Columns, frozen=True):
    """An app, merged: the newest stamp wins. The key is its name."""

    org: Text | None = None
    network: Text | None = None
    number: Count | None = None
    app_id: Text | None = None
    created_at_ms: Count | None = None
    deployed: Flag | None = None
    role: Text | None = None
    deleted: Flag | None = None
    stamp: Count | None = None


class Machine(Columns, frozen=True):
    """A machine. The key is its id. Of several workers that show one id, the highest generation counts."""

    app: Text | None = None
    name: Text | None = None
    region: Text | None = None
    state: Text | None = None
    desired: Text | None = None
    generation: Count | None = None
    version: Text | None = None
    image: Text | None = None
    private_ip: Text | None = None
    process_group: Text | None = None
    cpu_kind: Text | None = None
    cpus: Count | None = None
    memory_mib: Count | None = None
    cordoned: Flag | None = None
    hidden: Flag | None = None  # no name that many machines share leads to it
    standbys: JsonList | None = None  # machines that it is started for when their worker is gone
    stood_for: Text | None = None  # the worker for whose absence it was started last, and when that was
    stood_at_ms: Count | None = None
    created_at_ms: Count | None = None


class Service(Columns, frozen=True):
    """A port that a machine serves. The key is "machine/protocol/internal_port". `host_port` is where its worker's host
    takes connections for it, 0 where it does not: then it is reached by its private address alone. `ports` and
    `concurrency` as `hawker.model.services` writes them; `min_machines_running` counts within this region."""

    machine: Text | None = None
    app: Text | None = None
    process_group: Text | None = None
    protocol: Text | None = None
    internal_port: Count | None = None
    host_port: Count | None = None
    ports: JsonList | None = None
    concurrency: JsonMap | None = None
    autostart: Flag | None = None
    autostop: Text | None = None
    min_machines_running: Count | None = None


class CheckStatus(Columns, frozen=True):
    """A health check of a machine that has a program: the key is "machine/name". `kind`: service (then `service` is the
    port it is of, "tcp/8080"), readiness, informational; `status`: passing, warning, critical. Of the first two kinds
    none may be other than passing where requests go."""

    machine: Text | None = None
    app: Text | None = None
    name: Text | None = None
    kind: Text | None = None
    service: Text | None = None
    status: Text | None = None
    updated_at_ms: Count | None = None  # when the status became what it is


class Capacity(Columns, frozen=True):
    """What a worker has free, in sixteenths of what it has. The key is its name."""

    cpus_shared: Count | None = None
    cpus_dedicated: Count | None = None
    memory: Count | None = None
    disk: Count | None = None
    machines: Count | None = None


class Images(Columns, frozen=True):
    """What a worker has of images, as a sketch (`hawker.core.sketch`): for guesses, the worker knows. The key is its
    name."""

    names: JsonList | None = None
    layers: JsonList | None = None


class Forgotten(Columns, frozen=True):
    """That an operator gave a node up that is gone for good. The key is its name; `epoch` is the last of its global log
    that is not to be shown any more. It comes back by itself with a later one."""

    epoch: Count | None = None
    deleted: Flag | None = None
    stamp: Count | None = None


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """`merged`: rows of one key from several owners are one row to readers, that with the greatest (stamp, owner).
    `indexes` are lists of columns. `views` are further `create view` statements by name, over `<name>_rows`: all rows
    that are no tombstones, defaults filled in, with `worker` (the owner) and `id`. Without one of the table's own name,
    that shows every row."""

    name: str
    tier: Tier
    columns: type[Columns]
    merged: bool = False
    indexes: tuple[tuple[str, ...], ...] = ()
    views: dict[str, str] = {}


TABLES = (
    Table(
        name="workers",
        tier="global",
        columns=Worker,
        views={
            "workers": "select worker as name, region, host, port, proxy_port, state, version, driver, capacity, "
            f"since_ms, began_ms from workers_rows where id = worker and id not glob '*[^{NAME_CHARACTERS}]*'"
        },
    ),
    Table(
        name="app_regions",
        tier="global",
        columns=AppRegion,
        indexes=(("id",),),
        views={
            "app_regions": "select id as app, region, count(*) as workers from app_regions_rows "
            "where machines > 0 group by id, region",
            "app_workers": "select id as app, region, worker from app_regions_rows where machines > 0",
        },
    ),
    Table(name="apps", tier="global", columns=App, merged=True),
    Table(name="forgotten", tier="global", columns=Forgotten, merged=True),
    Table(
        name="machines",
        tier="region",
        columns=Machine,
        indexes=(("id",), ("app", "name")),
        views={
            "machines_all": "select * from machines_rows",
            # One id on two workers: a backup brought back, or a host that returned. Who holds it by the highest
            # generation has it; then who has had it longer; then the smaller name. It may have been destroyed there.
            "machines": "select * from machines_rows m where state <> 'destroyed' and not exists (select 1 from "
            "machines_rows o where o.id = m.id and o.worker <> m.worker and (o.generation, -o.created_at_ms, m.worker) "
            "> (m.generation, -m.created_at_ms, o.worker))",
        },
    ),
    Table(name="services", tier="region", columns=Service, indexes=(("machine",), ("app",))),
    Table(name="checks", tier="region", columns=CheckStatus, indexes=(("machine",), ("app",))),
    Table(name="capacity", tier="region", columns=Capacity),
    Table(name="images", tier="region", columns=Images),
)

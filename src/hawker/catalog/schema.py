"""The tables of the catalog: their columns, what a row must be to be taken, and the views that readers see.

A table is a struct of its columns. Every column may be missing (None), and readers see its default: adding one
replicates nothing. A physical table has the columns beside `_owner`, `_number` (of the version that wrote the row),
`_deleted` (a tombstone) and `_extra` (columns that a newer node knows, as JSON, passed on as they came). Readers use
the views, which carry the plain names.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hawker.model.catalog import Tier, Values

KEY_MOST = 256
TEXT_MOST = 4096
ROW_MOST = 64 << 10
"""Bytes of a row as it travels, when it has columns that are not known here; those that are have bounds of their own,
and to measure every row would cost as much as to check it."""
DEPTH_MOST = 100
"""Lists and maps inside each other in a column of JSON; SQLite reads 1,000."""

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
    created_at_ms: Count | None = None
    updated_at_ms: Count | None = None


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
            "since_ms from workers_rows where id = worker"
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
        indexes=(("id",), ("app",)),
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


class Bad(Exception):
    """A row that cannot be taken, and why."""


class Layout:
    """A table's physical side: SQL made from its columns, and the check of a row."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.name = table.name
        self.tier = table.tier
        self.merged = table.merged
        hints = get_type_hints(table.columns, include_extras=True)
        self.names = tuple(field.name for field in msgspec.structs.fields(table.columns))
        metas = {name: _meta(hints[name]) for name in self.names}
        self._types = {name: metas[name][0] for name in self.names}
        self._defaults = {name: metas[name][1]["default"] for name in self.names}
        self._known = frozenset(self.names)
        self._columns = table.columns
        # The same columns and no others: most rows have none that are unknown, and this tells so while it checks.
        fields = [(field.name, hints[field.name], None) for field in msgspec.structs.fields(table.columns)]
        self._exactly = msgspec.defstruct(f"{table.columns.__name__}Exactly", fields, forbid_unknown_fields=True)
        self._json = [(name, extra["json"]) for name, (_, extra) in metas.items() if "json" in extra]
        self._flags = frozenset(name for name in self.names if self._types[name] is bool)
        self.physical = f"{table.name}_of"
        everything = ("_owner", "id", "_number", "_deleted", "_extra", *(_quoted(name) for name in self.names))
        self.insert = (
            f"insert or replace into {self.physical} ({', '.join(everything)}) "
            f"values ({', '.join('?' * len(everything))})"
        )
        self.read = f"select {', '.join(everything[1:])} from {self.physical} where _owner = ?"
        indexes = (*table.indexes, ("id", "stamp")) if table.merged else table.indexes
        # On what readers compare with: SQLite finds an index only for the very expression that it is on.
        self.indexes = {
            f"{self.physical}_{'_'.join(index)}": f"on {self.physical} ({', '.join(map(self._shown, index))})"
            for index in indexes
        }
        self._none = (None,) * len(self.names)

    def _shown(self, name: str) -> str:
        """A column as readers see it."""
        return f"coalesce({_quoted(name)}, {_literal(self._defaults[name])})" if name in self._known else name

    def ddl(self) -> list[str]:
        columns = [f"{_quoted(name)} {'text' if self._types[name] is str else 'integer'}" for name in self.names]
        shown = [f"{self._shown(name)} as {_quoted(name)}" for name in self.names]
        name, rows = self.name, f"{self.name}_rows"
        made = [
            f"create table {self.physical} (_owner text not null, id text not null, _number integer not null, "
            f"_deleted integer not null, _extra text, {', '.join(columns)}, primary key (_owner, id)) "
            "strict, without rowid",
            f"create view {rows} as select _owner as worker, id, {', '.join(shown)} "
            f"from {self.physical} where not _deleted",
            *(f"create index {index} {on}" for index, on in self.indexes.items()),
        ]
        views = dict(self.table.views)
        if self.merged:
            views[name] = self.newest()
        views.setdefault(name, f"select * from {rows}")
        made += [f"create view {view} as {body}" for view, body in views.items()]
        return made

    def newest(self) -> str:
        """The view of a merged table. SQLite compares text by its bytes in UTF-8: the same order as `hlc.newest`."""
        return (
            f"select * from {self.name}_rows m where not deleted and not exists (select 1 from {self.physical} o "
            "where o.id = m.id and not o._deleted and (coalesce(o.stamp, 0), o._owner) > (m.stamp, m.worker))"
        )

    def describe(self) -> Described:
        return Described(self.name, self.tier, self.names, tuple(sorted(self._flags)), tuple(self.ddl()))

    def row(self, owner: str, number: int, key: str, values: Values) -> tuple[Any, ...]:
        """What `insert` takes. Raises `Bad`."""
        if not key or len(key) > KEY_MOST or "\0" in key:
            raise Bad(_BAD_KEY)
        extra = None
        try:
            row = _convert(values, self._exactly)
        except msgspec.ValidationError:
            try:
                row = _convert(values, self._columns)
            except msgspec.ValidationError as error:
                raise Bad(str(error)) from error
            extra = self.extra(values)
        for name, kind in self._json:
            text = getattr(row, name)
            if text is not None:
                _check_json(name, text, kind)
        return (owner, key, number, 0, extra, *_astuple(row))

    def extra(self, values: Values) -> str | None:
        """The columns that this node does not know, as JSON. Raises `Bad`."""
        return _extra(values, self._known)

    def tombstone(self, owner: str, number: int, key: str) -> tuple[Any, ...]:
        """The same for a row that is gone."""
        if not key or len(key) > KEY_MOST or "\0" in key:
            raise Bad(_BAD_KEY)
        return (owner, key, number, 1, None, *self._none)

    def values(self, extra: str | None, columns: Sequence[Any]) -> Values:
        """The row as it came, from what is stored."""
        flags = self._flags
        found = {
            name: bool(value) if name in flags else value
            for name, value in zip(self.names, columns, strict=True)
            if value is not None
        }
        if extra is not None:
            found.update(msgspec.json.decode(extra))
        return found


class Described(msgspec.Struct, frozen=True):
    """A table as a file has it, to read its rows when this Hawker would lay it out differently."""

    name: str
    tier: Tier
    names: tuple[str, ...]
    flags: tuple[str, ...]
    ddl: tuple[str, ...]


_BAD_KEY = f"a key has 1 to {KEY_MOST} characters, none of them NUL"
_convert = msgspec.convert
_astuple = msgspec.structs.astuple
_packed = msgspec.msgpack.Encoder().encode
_Scalar = str | int | float | bool | None


def _extra(values: Values, known: frozenset[str]) -> str | None:
    """Columns that this node does not know, as JSON."""
    found: dict[str, _Scalar] = {}
    for name, value in values.items():
        if name in known or value is None:
            continue
        match value:
            case bool():
                good = True
            case str():
                good = len(value) <= TEXT_MOST
            case int():
                good = -(1 << 63) <= value < 1 << 63
            case float():
                good = isfinite(value)
            case _:
                good = False
        if not good or len(name) > KEY_MOST:
            raise Bad(f"column {name[:KEY_MOST]}: its value is of no type that columns have, or too long")
        found[name] = value
    if len(_packed(values)) > ROW_MOST:
        raise Bad(f"the row has more than {ROW_MOST} bytes")
    return msgspec.json.encode(found).decode() if found else None


def _check_json(name: str, text: str, kind: type) -> None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise Bad(f"column {name}: it is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise Bad(f"column {name}: it is not a {'list' if kind is list else 'map'}")
    if text.count("[") + text.count("{") > DEPTH_MOST and _depth(found) > DEPTH_MOST:
        raise Bad(f"column {name}: lists and maps in it are nested more than {DEPTH_MOST} deep")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each if isinstance(each, list) else each.values())
        ]
    return depth


def _meta(hint: Any) -> tuple[type, dict[str, Any]]:
    """The plain type and the extra of a column's `Annotated[...] | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    plain, meta = get_args(hint)
    return plain, meta.extra


def _literal(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return f'"{name}"'

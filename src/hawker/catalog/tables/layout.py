"""How a table of the catalog is laid out in SQLite, and what a row must be to be taken.

A physical table has the columns beside `_owner`, `_number` (of the version that wrote the row), `_deleted` (a
tombstone) and `_extra` (columns that a newer node knows, as JSON, passed on as they came). Readers use the views, which
carry the plain names.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from hawker.catalog.tables.schema import TEXT_MOST, Table
from hawker.model.catalog import Tier, Values

KEY_MOST = 256
ROW_MOST = 64 << 10
"""Bytes of a row as it travels, if it has columns that are not known here. Known columns have bounds of their own, and
to measure every row would cost as much as to check it."""
DEPTH_MOST = 100
"""Lists and maps inside each other in a column of JSON; SQLite reads 1,000."""


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
        # The same columns and no others: most rows have no unknown ones, and this check says so.
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
        # Indexes are on what readers compare with: SQLite finds an index only for the very expression that it is on.
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
        """The row as `insert` takes it. Raises `Bad`."""
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
        """A tombstone as `insert` takes it. Raises `Bad`."""
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

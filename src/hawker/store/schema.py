"""The tables that a kind of thing brings to a worker's database, beside those that every database has.

Every table is a key and a body. A `Schema` names the rows of one kind; opening the database makes the tables that are
missing and then runs the kind's own scripts, each once. Which kinds have tables in a database, and how many of their
scripts have run, stands in its table `kind`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import apsw

from hawker.errors import StoreError
from hawker.model.rows import ROWS, Row

NOT_OF_ROWS = ("log", "kind")
"""Tables whose rows have no type of ours."""
_BUILT_IN = frozenset(kind.table for kind in ROWS)


@dataclass(frozen=True)
class Schema:
    """The tables of the kind `name`. `migrations` are SQL scripts, such as for generated columns and indexes: they run
    in this order, and later releases append to them."""

    name: str
    rows: tuple[type[Row], ...]
    migrations: tuple[str, ...] = ()


def types(schemas: Iterable[Schema]) -> Mapping[str, type[Row]]:
    """The type of the rows of each table."""
    return {kind.table: kind for kind in (*ROWS, *(kind for schema in schemas for kind in schema.rows))}


def tables(db: apsw.Connection) -> list[str]:
    """The tables of a database that are made of rows, whoever brought them."""
    found = db.execute("select name from sqlite_schema where type = 'table' and name not like 'sqlite_%' order by name")
    return [name for (name,) in found if name not in NOT_OF_ROWS]


def migrate(db: apsw.Connection, schemas: Iterable[Schema]) -> None:
    """Bring the tables of kinds up to date. Raises `StoreError` for a database that has things of a kind that is not
    among `schemas`, or of a newer version of it: what this program does not know it could not keep."""
    brought = {schema.name: schema for schema in schemas if {kind.table for kind in schema.rows} - _BUILT_IN}
    there = "kind" in (name for (name,) in db.execute("select name from sqlite_schema where type = 'table'"))
    found = db.execute("select name, version from kind").fetchall() if there else []
    done = dict(cast("list[tuple[str, int]]", found))
    for name, version in done.items():
        if name not in brought:
            raise StoreError(f"this database has things of the kind {name}, which is not installed: install it again")
        if version > (newest := len(brought[name].migrations)):
            raise StoreError(
                f"this database has version {version} of {name}; version {newest} is installed: upgrade it"
            )
    wanted = [schema for schema in brought.values() if done.get(schema.name) != len(schema.migrations)]
    if not wanted:
        return
    with db:
        db.execute("create table if not exists kind (name text primary key, version integer not null) strict")
        for schema in wanted:
            for kind in schema.rows:
                db.execute(
                    f"create table if not exists {kind.table} (id text primary key, body text not null) without rowid"
                )
            for script in schema.migrations[done.get(schema.name, 0) :]:
                db.execute(script)
            db.execute("insert or replace into kind values (?, ?)", (schema.name, len(schema.migrations)))

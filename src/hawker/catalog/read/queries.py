"""People's queries on a view: read-only, within limits, and never on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hawker.catalog.base import Readable
from hawker.errors import Invalid
from hawker.host import Host
from hawker.store import sql
from hawker.store.sql import Found

T = TypeVar("T")

ROW_TABLES = "_of"
"""The names of the tables that the view tells of end like this in the database."""


class Queries:
    """Reads one view."""

    def __init__(self, view: Readable, host: Host) -> None:
        self._view = view
        self._host = host

    async def ask(self, query: str) -> Found:
        """Run one query. Raises `Invalid`."""
        return await self.run(lambda: self.read(check(query)))

    def read(self, query: str, text_max: int = sql.TEXT_MAX) -> Found:
        """Read within `run`. Raises `Invalid`."""
        return self._view.ask(query, text_max)

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function beside the event loop. A simulated disk takes one connection, so there it runs on the loop."""
        if self._host.vfs is not None:
            return function()
        return await asyncio.get_running_loop().run_in_executor(None, function)


def check(query: str) -> str:
    """The query without what surrounds it. Raises `Invalid` when nothing is left."""
    text = query.strip().removesuffix(";").rstrip()
    if not text:
        raise Invalid("query", query, "give a select statement")
    return text


def tables_told_of(found: Found) -> frozenset[str] | None:
    """The names under which the view tells that what a query read has changed. None: the query also read what the view
    does not tell of."""
    stored = [name for name in found.tables if not name.startswith("sqlite_")]
    if any(name.startswith("_") or name in _UNTOLD for name in stored):
        return None
    return frozenset(name.removesuffix(ROW_TABLES) for name in stored if name.endswith(ROW_TABLES))


_UNTOLD = frozenset({"members"})

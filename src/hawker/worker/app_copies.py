"""Copies of apps on a few workers, so that an app outlives the disk of the worker that decided its name.

An app is written by one worker and may have machines nowhere. For every app the first workers in its rank
(`core.rendezvous`) keep a copy of its row and publish it with the same stamp: readers see no difference.
"""

from __future__ import annotations

from hawker.catalog import apps
from hawker.catalog.read.watch import Watch
from hawker.catalog.view import View
from hawker.core.rendezvous import ranked
from hawker.errors import StoreError
from hawker.model.rows import AppRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.tx import Tx

COPIES = 3
LOOK_S = 1.0
"""How long changes of the catalog are gathered before a look. Nobody waits for a copy."""
AT_ONCE = 200


class AppCopies(Service):
    """The copies of apps that one worker keeps."""

    def __init__(self, name: str, view: View, store: Store) -> None:
        self._name = name
        self._view = view
        self._store = store
        self._workers: list[str] = []
        self._seen: dict[str, int] = {}  # stamps of apps that were looked at, under these workers
        self._watch = Watch(view, {"apps", "workers"}, LOOK_S, self._adopt)

    async def open(self) -> None:
        self._watch.begin()

    async def close(self) -> None:
        await self._watch.close()

    async def _adopt(self) -> None:
        missing = self._missing()
        for begin in range(0, len(missing), AT_ONCE):
            some = missing[begin : begin + AT_ONCE]
            try:
                await self._store.submit(lambda tx, some=some: self._keep(tx, some))  # type: ignore[misc]
            except StoreError:  # a full disk: another look begins at the start
                self._seen.clear()
                raise

    def _missing(self) -> list[AppRow]:
        """Apps that are ours to copy, and newer in the catalog than when they were looked at last."""
        workers = [name for (name,) in self._view.rows("select name from workers order by name")]
        if workers != self._workers:
            self._workers = workers
            self._seen.clear()
        found = []
        for row in self._view.rows(_NEWEST):
            app = apps.read(row)
            if self._seen.get(app.name) != app.stamp_ms:
                self._seen[app.name] = app.stamp_ms
                if self._name in ranked(f"app/{app.name}", workers)[:COPIES]:
                    found.append(app)
        return found

    def _keep(self, tx: Tx, found: list[AppRow]) -> None:
        for app in found:
            there = tx.get(AppRow, app.name)
            if there is None or there.stamp_ms < app.stamp_ms:
                tx.record("app.copied", app.name, cause="local rule: apps are kept on several workers")
                tx.put(app)


_NEWEST = f"select {apps.COLUMNS.replace('stamp', 'max(stamp)')} from apps_rows group by id order by id"

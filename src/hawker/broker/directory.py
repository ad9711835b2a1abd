"""What the catalog tells a broker of workers, apps and images. It is a hint: the workers decide.

The fleet follows the catalog's directory of workers; a row says where a worker listens, never what it has. An app's
row may be older than its worker's own, so what is not here is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hawker.broker.fleet import Fleet, WorkerAddress
from hawker.catalog import apps
from hawker.catalog.view import View
from hawker.host import clock_s
from hawker.model.rows import AppRow

HOLDERS_S = 2.0
"""How old the sketches of images may be. To read them all for every order would cost more than they save."""


class Directory:
    """Keeps the list of `fleet` as the catalog has it. `close` when the broker ends."""

    def __init__(self, view: View, fleet: Fleet) -> None:
        self._view = view
        self._fleet = fleet
        self._holders: tuple[float, Mapping[str, frozenset[str]]] | None = None
        self._look()
        view.on_applied.append(self._hint)

    def close(self) -> None:
        self._view.on_applied.remove(self._hint)

    def app(self, name: str) -> AppRow | None:
        """The app's newest row, which may be that of its deletion."""
        sql = f"select {apps.COLUMNS} from apps_rows where id = ? order by stamp desc, worker desc limit 1"
        found = self._view.rows(sql, (name,))
        return apps.read(found[0]) if found else None

    def apps(self) -> list[AppRow]:
        newest: dict[str, AppRow] = {}
        for row in self._view.rows(f"select {apps.COLUMNS} from apps_rows order by id, stamp, worker"):
            app = apps.read(row)
            newest[app.name] = app
        return list(newest.values())

    def worker_of(self, machine: str) -> str:
        """The worker of our region that has a machine; "" when none is known to."""
        found = self._view.rows("select worker from machines where id = ?", (machine,))
        return found[0][0] if found else ""

    def machine_named(self, app: str, name: str) -> str:
        """The machine of an app that has this name, in our region; "" when none is known to."""
        sql = "select id from machines where app = ? and name = ? and state <> 'destroyed' order by id limit 1"
        found = self._view.rows(sql, (app, name))
        return found[0][0] if found else ""

    def image_holders(self, region: str) -> Mapping[str, frozenset[str]]:
        """Workers by the short hash of an image (`hawker.core.sketch`), of our region alone: no sketch leaves it."""
        now = clock_s()
        if self._holders is None or now > self._holders[0]:
            found: dict[str, set[str]] = {}
            for worker, names in self._view.rows("select id, names from images where id = worker"):
                try:
                    sketch = msgspec.json.decode(names, type=list[str])
                except msgspec.ValidationError:  # another version of Hawker wrote it, or a faulty one
                    continue
                for name in sketch:
                    found.setdefault(name, set()).add(worker)
            self._holders = now + HOLDERS_S, {name: frozenset(workers) for name, workers in found.items()}
        return self._holders[1] if region == self._fleet.home else {}

    def _hint(self, tables: tuple[str, ...]) -> None:
        if "workers" in tables:
            self._look()

    def _look(self) -> None:
        rows = self._view.rows("select name, region, host, port, since_ms from workers order by name")
        self._fleet.update(
            [
                WorkerAddress(name=name, region=region, host=host, port=port, since_ms=since_ms)
                for name, region, host, port, since_ms in rows
            ]
        )

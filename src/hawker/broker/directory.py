"""Which workers there are, and which apps, as the catalog has it: a broker's hints.

The fleet follows the catalog's directory of workers; a row says where a worker listens, never what it has. An app's
row may be older than its worker's own, so what is not here is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hawker.broker.fleet import Fleet, WorkerAddress
from hawker.model.rows import AppRow

STAMP_BITS = 16


class View(Protocol):
    """A replica of the catalog."""

    on_applied: list[Callable[[tuple[str, ...]], None]]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...


class Directory:
    """Keeps `fleet` as the catalog says. `close` when the broker ends."""

    def __init__(self, view: View, fleet: Fleet) -> None:
        self._view = view
        self._fleet = fleet
        self._look()
        view.on_applied.append(self._hint)

    def close(self) -> None:
        self._view.on_applied.remove(self._hint)

    def app(self, name: str) -> AppRow | None:
        """The app's newest row, which may be that of its deletion."""
        found = self._view.rows(f"{_APPS} where id = ? order by stamp desc, worker desc limit 1", (name,))
        return _app(found[0]) if found else None

    def apps(self) -> list[AppRow]:
        newest: dict[str, AppRow] = {}
        for row in self._view.rows(f"{_APPS} order by id, stamp, worker"):
            app = _app(row)
            newest[app.name] = app
        return list(newest.values())

    def worker_of(self, machine: str) -> str:
        """The worker of our region that has a machine; "" when none is known to."""
        found = self._view.rows("select worker from machines where id = ?", (machine,))
        return found[0][0] if found else ""

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


_APPS = "select id, app_id, org, network, number, created_at_ms, stamp, deleted, deployed, role from apps_rows"


def _app(row: tuple[Any, ...]) -> AppRow:
    name, app_id, org, network, number, created_at_ms, stamp, deleted, deployed, role = row
    return AppRow(
        name=name,
        id=app_id,
        org=org,
        network=network,
        number=number,
        created_at_ms=created_at_ms,
        stamp_ms=stamp >> STAMP_BITS,
        deleted=bool(deleted),
        deployed=bool(deployed),
        role=role,
    )

"""Keeps in memory what the catalog says of apps and workers: each app from its first use on, and all workers.

    directory = CatalogIndex(view, region)
    app = directory.find("web") or directory.load("web")

The catalog tells of changed keys, and the rows of those are read again one by one, so that a fleet that changes all the
time costs in proportion to its changes, not to its size. A row that makes no sense is passed over and counted; the rows
beside it stand. Listeners are told of machines that are different now.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from sys import intern
from typing import Any

import msgspec

from hawker.catalog.view import Changed, RowView
from hawker.core.doubt import doubted
from hawker.errors import StoreError
from hawker.proxy.catalog_view.published import Served, served
from hawker.telemetry import get_logger

ROWS_A_TURN = 200
"""How many machines or apps are read before the event loop has its turn: about 10 ms."""
BAD_KEPT = 100
"""How many rows that made no sense are kept to be shown; all are counted."""
PASSING = "passing"
NONE: frozenset[str] = frozenset()
"""All machines without failing checks share this set: a set takes as much memory as the rest of a machine."""
AGAIN_S = 1.0
"""The pause after the catalog's database has refused a query."""

_MACHINE = "id, app, worker, region, state, cordoned, private_ip"
_SERVICE = (
    "machine",
    "app",
    "protocol",
    "internal_port",
    "host_port",
    "ports",
    "concurrency",
    "autostart",
    "autostop",
    "min_machines_running",
)
_APP = "select org from apps where id = ?"
_WORKERS = "select name, region, host, port, proxy_port from workers"
_MEMBERS = "select name, status from members"


class Machine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A machine as the catalog shows it. `services` are those that proxies serve: TCP, with public ports. `checked`: it
    has checks that requests wait for; `failing` are the services whose checks do not pass, "tcp/8080", or "" for all.
    """

    id: str
    app: str
    worker: str
    region: str
    state: str
    cordoned: bool
    private_ip: str
    services: tuple[Served, ...] = ()
    checked: bool = False
    failing: frozenset[str] = frozenset()

    def passes(self, internal_port: int) -> bool:
        return not self.failing or ("" not in self.failing and f"tcp/{internal_port}" not in self.failing)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's API is, and its proxy; `proxy_port` 0: it has no proxy."""

    name: str
    region: str
    host: str
    port: int
    proxy_port: int = 0


class App:
    """An app's machines in this region, by id, and the other regions that have some. `gone`: it was deleted."""

    def __init__(self, name: str, org: str) -> None:
        self.name = name
        self.org = org
        self.machines: dict[str, Machine] = {}
        self.elsewhere: tuple[str, ...] = ()
        self.gone = False
        self.stale = False  # any of its rows may have changed


OnMachine = Callable[[App, Machine | None, Machine | None], None]
"""Is told what a machine of a loaded app was, and what it is now; None: it is not there."""


class CatalogIndex:
    """`close` when done. `bad` are rows that were passed over, by table and key, with the reason; `skipped` counts
    them. `on_app` is told of apps that were deleted, or exist in other regions now, `on_worker` of workers, `on_doubt`
    of those that are in doubt now, or no more (`hawker.core.doubt`)."""

    def __init__(self, view: RowView, region: str) -> None:
        self._view = view
        self._region = region
        self._apps: dict[str, App] = {}
        self._app_of: dict[str, str] = {}  # machines of loaded apps
        self._machines: dict[str, None] = {}  # to be read again, in order
        self._stale: dict[str, None] = {}  # apps to be read again as a whole
        self._timer: asyncio.Handle | None = None
        self.workers: dict[str, Worker] = {}
        self.doubted: frozenset[str] = frozenset()
        self.bad: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.skipped = 0
        self.on_machine: list[OnMachine] = []
        self.on_app: list[Callable[[App], None]] = []
        self.on_worker: list[Callable[[Worker | None, Worker | None], None]] = []
        self.on_doubt: list[Callable[[str], None]] = []
        view.on_rows.append(self._changed)
        self._read_workers()
        self._read_members()

    def workers_of(self, app: str, region: str) -> list[Worker]:
        """The workers of another region that have machines of this app, and a proxy. Raises `StoreError`."""
        rows = self._view.rows("select worker from app_workers where app = ? and region = ? order by 1", (app, region))
        found = (self.workers.get(name) for (name,) in rows)
        return [worker for worker in found if worker is not None and worker.proxy_port]

    def close(self) -> None:
        if self._changed in self._view.on_rows:
            self._view.on_rows.remove(self._changed)
        if self._timer:
            self._timer.cancel()

    @property
    def loaded(self) -> int:
        return len(self._apps)

    def find(self, name: str) -> App | None:
        """The app as it is now, if it was loaded before. Raises `StoreError`."""
        app = self._apps.get(name)
        if app is not None and app.stale:
            self._read_again(app)
            return None if app.gone else app
        return app

    def load(self, name: str) -> App | None:
        """The app, read if need be; None when there is none of this name. Raises `StoreError`."""
        if app := self.find(name):
            return app
        found = self._view.rows(_APP, (name,))
        if not found:
            return None
        app = self._apps[name] = App(name, found[0][0])
        try:
            self._read_whole(app)
        except StoreError:
            self.forget(name)
            raise
        return app

    def forget(self, name: str) -> None:
        """Drop a loaded app; listeners are not told. It is read again when it is asked for."""
        if app := self._apps.pop(name, None):
            for machine in app.machines:
                self._app_of.pop(machine, None)

    def settle(self) -> None:
        """Read at once what has changed."""
        while self._machines or self._stale:
            self._look()

    # --- what has changed --------------------------------------------------------------------------------------------

    def _changed(self, changed: Changed) -> None:
        """The catalog calls this inside its commit: it only notes what to read."""
        for table in ("machines", "services", "checks"):
            keys = changed.get(table, ())
            if keys is None:
                self._all_stale()
            else:
                for key in sorted(keys):
                    self._machines[key.partition("/")[0]] = None
        for table in ("apps", "app_regions"):
            keys = changed.get(table, ())
            if keys is None:
                self._all_stale()
            else:
                for name in sorted(keys):
                    self._make_stale(name)
        if "workers" in changed or "forgotten" in changed:
            self._read_workers()
        if "members" in changed:
            self._read_members()
        if self._machines or self._stale:
            self._later()

    def _all_stale(self) -> None:
        for name in self._apps:
            self._make_stale(name)

    def _make_stale(self, name: str) -> None:
        if app := self._apps.get(name):
            app.stale = True
            self._stale[name] = None

    def _later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._timer = None
        try:
            self._look()
        except StoreError as error:
            _logger.warning("directory.not_read", error=error.message, cause="a change of the catalog")
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._turn)
        else:
            if self._machines or self._stale:
                self._later()

    def _look(self) -> None:
        """Read as much as one turn of the loop may take. Raises `StoreError`; what was not read then is read later."""
        for name in list(self._stale)[:ROWS_A_TURN]:
            app = self._apps.get(name)
            if app is not None and app.stale:
                self._read_again(app)
            self._stale.pop(name, None)
        some = list(self._machines)[:ROWS_A_TURN]
        if some:
            self._read_machines(some)
            for machine in some:
                self._machines.pop(machine, None)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_machines(self, ids: Sequence[str]) -> None:
        marks = ",".join("?" * len(ids))
        rows = self._view.rows(f"select {_MACHINE} from machines where id in ({marks})", ids)
        wanted = [row for row in rows if row[1] in self._apps]
        now = self._made(wanted, "id", [row[0] for row in wanted])
        for machine in ids:
            new = now.get(machine)
            if new is not None:
                self._set(self._apps[new.app], machine, new)
            elif before := self._app_of.get(machine):
                self._set(self._apps[before], machine, None)

    def _read_again(self, app: App) -> None:
        found = self._view.rows(_APP, (app.name,))
        app.stale = False
        if not found:
            app.gone = True
            for machine in list(app.machines):
                self._set(app, machine, None)
            self.forget(app.name)
        else:
            app.org = found[0][0]
            self._read_whole(app)
        for told in self.on_app:
            told(app)

    def _read_whole(self, app: App) -> None:
        rows = self._view.rows(f"select {_MACHINE} from machines where app = ? order by id", (app.name,))
        regions = "select region from app_regions where app = ? and region <> ? order by region"
        app.elsewhere = tuple(region for (region,) in self._view.rows(regions, (app.name, self._region)))
        now = self._made(rows, "app", (app.name,))
        for machine in [machine for machine in app.machines if machine not in now]:
            self._set(app, machine, None)
        for machine, new in now.items():
            self._set(app, machine, new)

    def _made(self, rows: Sequence[Sequence[Any]], column: str, keys: Sequence[str]) -> dict[str, Machine]:
        """Machines by id, from their rows and those beside them; `column` of the machines finds them."""
        services, checks = self._services(column, keys), self._checks(column, keys)
        made = {}
        for row in rows:
            id_, app, worker, region, state = map(intern, row[:5])  # the same words again and again
            made[id_] = Machine(
                id=id_,
                app=app,
                worker=worker,
                region=region,
                state=state,
                cordoned=bool(row[5]),
                private_ip=row[6],
                services=tuple(services.get(id_, ())),
                checked=id_ in checks,
                failing=frozenset(found) if (found := checks.get(id_)) else NONE,
            )
        return made

    def _checks(self, column: str, keys: Sequence[str]) -> dict[str, set[str]]:
        """The services whose checks fail, by machine."""
        if not keys:
            return {}
        found: dict[str, set[str]] = {}
        sql = (
            "select c.machine, c.service, c.status from checks c join machines m on m.id = c.machine "
            f"and m.worker = c.worker where m.{column} in ({','.join('?' * len(keys))}) and c.kind <> 'informational'"
        )
        for machine, service, status in self._view.rows(sql, keys):
            failing = found.setdefault(machine, set())
            if status != PASSING:
                failing.add(service)
        return found

    def _services(self, column: str, keys: Sequence[str]) -> dict[str, list[Served]]:
        """The rows of checks, by machine. A machine that has moved to another worker may have rows of both; those of
        its own worker are beside it in the view `machines`."""
        if not keys:
            return {}
        found: dict[str, list[Served]] = {}
        marks = ",".join("?" * len(keys))
        sql = (
            f"select s.id, {', '.join(f's.{name}' for name in _SERVICE)} from services s join machines m "
            f"on m.id = s.machine and m.worker = s.worker where m.{column} in ({marks}) order by s.id"
        )
        for key, *columns in self._view.rows(sql, keys):
            try:
                one = served(dict(zip(_SERVICE, columns, strict=True)))
                _check(one)
            except (ValueError, TypeError, msgspec.MsgspecError) as error:
                self._skip("services", key, str(error))
                continue
            self.bad.pop(("services", key), None)
            if one.protocol == "tcp" and one.ports:
                found.setdefault(one.machine, []).append(one)
        return found

    def _set(self, app: App, machine: str, new: Machine | None) -> None:
        before = self._app_of.get(machine)
        if before is not None and before != app.name:  # it was another app's, which has it no more
            if new is None:
                return
            self._set(self._apps[before], machine, None)
        old = app.machines.get(machine)
        if new is None:
            app.machines.pop(machine, None)
            self._app_of.pop(machine, None)
        else:
            app.machines[machine] = new
            self._app_of[machine] = app.name
        if old != new:
            for told in self.on_machine:
                told(app, old, new)

    def _skip(self, table: str, key: str, why: str) -> None:
        self.skipped += 1
        if (table, key) not in self.bad:
            _logger.warning("directory.row_skipped", table=table, key=key, why=why, cause="a change of the catalog")
        self.bad[table, key] = why
        if len(self.bad) > BAD_KEPT:
            self.bad.popitem(last=False)

    def _read_workers(self) -> None:
        try:
            rows = self._view.rows(_WORKERS)
        except StoreError as error:
            _logger.warning("directory.not_read", error=error.message, cause="a change of the catalog")
            return
        now: dict[str, Worker] = {}
        for name, region, host, port, proxy_port in rows:
            if not host or not 0 < port < 65536 or not 0 <= proxy_port < 65536:
                self._skip("workers", name, f"host {host!r}, port {port}, proxy_port {proxy_port}")
                continue
            now[name] = Worker(name=name, region=region, host=host, port=port, proxy_port=proxy_port)
        before, self.workers = self.workers, now
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                for told in self.on_worker:
                    told(before.get(name), now.get(name))

    def _read_members(self) -> None:
        try:
            rows = self._view.rows(_MEMBERS)
        except StoreError as error:
            _logger.warning("directory.not_read", error=error.message, cause="membership")
            return
        before, self.doubted = self.doubted, doubted(dict(rows))
        for name in sorted(before ^ self.doubted):
            for told in self.on_doubt:
                told(name)


def _check(one: Served) -> None:
    if not 0 < one.internal_port < 65536 or not 0 <= one.host_port < 65536:
        raise ValueError(f"internal_port {one.internal_port}, host_port {one.host_port}")
    for each in one.ports:
        if not 0 < each.first <= each.last < 65536:
            raise ValueError(f"public ports {each.first} to {each.last}")


_logger = get_logger()

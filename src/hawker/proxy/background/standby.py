"""Starts the machines that stand by for those of a worker that is gone (`standbys` of a machine's configuration).

Every proxy of the region looks by itself. Each that takes a worker for gone (`hawker.core.outage`) asks for the same
starts; to ask twice is harmless. A standby is started once for an outage: what becomes of it then is its user's
business, also when the worker comes back. The standby's row tells what others did: when it was started last for that
worker. A proxy that has heard of the worker compares this with what the row said then; a proxy that began in the middle
of an outage compares it with when the worker itself began last.

Only workers whose machines have standbys are looked at, with one connection a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from hawker.catalog.view import Changed, RowView
from hawker.core.outage import NONE_STOOD, Outage
from hawker.errors import HawkerError
from hawker.model.door import Wake, standby_cause
from hawker.proxy.app_table import AppTable
from hawker.proxy.background.loop import BackgroundLoop
from hawker.telemetry import get_logger

LOOK_S = 1.0
CONNECT_S = 0.8
AGAIN_S = 5.0
"""The pause after a start that the standby's worker refused or did not answer."""

_STANDBYS = (
    "select id, app, worker, standbys, case when desired = 'started' then '' else stood_for end, stood_at_ms "
    "from machines where standbys <> '[]' and state in ('stopped', 'suspended', 'created')"
)
_BEGAN_MS = "select began_ms from workers where name = ?"
_NAMED = "select id from machines_rows where standbys <> '[]'"
ROWS_A_QUERY = 500


class Standby(msgspec.Struct, frozen=True):
    """A machine, and those that it stands by for. `stood_for` is the worker for whose absence it was started last, at
    `stood_at_ms`, if it was stopped by order since then."""

    machine: str
    app: str
    worker: str
    of: tuple[str, ...]
    stood_for: str = ""
    stood_at_ms: int = 0


class Named:
    """The machines that name others that they stand by for. Few do; of all other rows only changes are read. `close`
    when done."""

    def __init__(self, view: RowView) -> None:
        self._view = view
        self._ids: set[str] = set()
        self._changed: set[str] = set()
        self._all = True
        view.on_rows.append(self._note)

    def close(self) -> None:
        if self._note in self._view.on_rows:
            self._view.on_rows.remove(self._note)

    def standing(self) -> list[Standby]:
        """The standbys that could be started for others. Raises `StoreError`."""
        if self._all:
            self._ids = {machine for (machine,) in self._view.rows(_NAMED)}
            self._changed, self._all = set(), False
        for some in _some(self._changed):
            named = self._view.rows(f"{_NAMED} and id in ({','.join('?' * len(some))})", some)
            self._changed.difference_update(some)
            self._ids.difference_update(some)
            self._ids.update(machine for (machine,) in named)
        found = []
        for some in _some(self._ids):
            sql = f"{_STANDBYS} and id in ({','.join('?' * len(some))}) order by id"
            for machine, app, worker, text, stood_for, stood_at_ms in self._view.rows(sql, some):
                try:
                    of = msgspec.json.decode(text, type=tuple[str, ...])
                except msgspec.MsgspecError:
                    continue  # one bad row stops nothing
                found.append(Standby(machine, app, worker, of, stood_for, stood_at_ms))
        return found

    def _note(self, changed: Changed) -> None:
        keys = changed.get("machines", ())
        if keys is None:
            self._all = True
        elif not self._all:
            self._changed.update(keys)


def _some(ids: set[str]) -> list[list[str]]:
    """The rows of these machines, in order, as many at a time as a query may name."""
    ordered = sorted(ids)
    return [ordered[first : first + ROWS_A_QUERY] for first in range(0, len(ordered), ROWS_A_QUERY)]


class Standbys(BackgroundLoop):
    """`outages` are what is known of each worker that is looked at, by its name."""

    def __init__(self, app_table: AppTable, view: RowView, random: Callable[[], float]) -> None:
        super().__init__("standbys", LOOK_S, random)
        self._app_table = app_table
        self._view = view
        self._named = Named(view)
        self.outages: dict[str, Outage] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}  # by machine

    async def close(self) -> None:
        self._named.close()
        await super().close()
        tasks = list(self._starting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Look once at the workers, and start the standbys of those that are gone. Raises `StoreError`."""
        standing = self._named.standing()
        workers = self._workers_of({machine for standby in standing for machine in standby.of})
        # An outage that was acted on is not over because the standby runs now: its user may stop it meanwhile.
        acted_on = {name for name, its in self.outages.items() if its.told and name in self._app_table.index.workers}
        looked_at = sorted(acted_on.union(workers.values()))
        for name in self.outages.keys() - set(looked_at):
            del self.outages[name]
        stood: dict[str, dict[str, int]] = {}
        for standby in standing:
            stood.setdefault(standby.stood_for, {})[standby.machine] = standby.stood_at_ms
        await asyncio.gather(*(self._look_at(worker, stood.get(worker, NONE_STOOD)) for worker in looked_at))
        if not looked_at:
            return
        dead = {name for (name,) in self._view.rows("select name from members where status = 'dead'")}
        now = asyncio.get_running_loop().time()
        after_s = self._app_table.settings.gone_s
        gone = [name for name in looked_at if self.outages[name].gone(now, dead=name in dead, after_s=after_s)]
        if any(not self.outages[name].told for name in gone):
            standing = self._named.standing()  # others may have acted during the looks
        for worker in gone:
            outage = self.outages[worker]
            if outage.told:
                continue
            outage.told = True
            began_at_ms = next((ms for (ms,) in self._view.rows(_BEGAN_MS, (worker,))), 0)
            lost = {machine for machine, its in workers.items() if its == worker}
            _logger.warning("worker.gone", worker=worker, dead=worker in dead, cause="local rule: standbys")
            for standby in standing:
                if standby.worker == worker or lost.isdisjoint(standby.of):
                    continue
                if standby.stood_for == worker and outage.stood_up(standby.machine, standby.stood_at_ms, began_at_ms):
                    continue  # its user has stopped it
                self._start(standby, worker)

    def _workers_of(self, machines: set[str]) -> dict[str, str]:
        """The worker of each machine that is meant to run, by machine."""
        ids = sorted(machines)
        marks = ",".join("?" * len(ids))
        sql = f"select id, worker from machines where id in ({marks}) and desired <> 'stopped' order by id"
        return dict(self._view.rows(sql, ids)) if ids else {}

    async def _look_at(self, worker: str, stood: Mapping[str, int]) -> None:
        now = asyncio.get_running_loop().time
        outage = self.outages.setdefault(worker, Outage(now()))
        at = self._app_table.index.workers.get(worker)
        if at is not None and await self._app_table.listen_probe.connects((at.host, at.port), CONNECT_S):
            outage.heard(now(), stood)
        else:
            outage.failed()

    def _start(self, standby: Standby, gone: str) -> None:
        if standby.machine not in self._starting:
            task = asyncio.get_running_loop().create_task(self._started(standby, gone), name=f"start {standby.machine}")
            self._starting[standby.machine] = task
            task.add_done_callback(lambda done: self._starting.pop(standby.machine, None))

    def _stood_since(self, before: Standby, gone: str) -> bool:
        """Whether another proxy has started it meanwhile, and its user has stopped it. Raises `StoreError`."""
        now = [standby for standby in self._named.standing() if standby.machine == before.machine]
        return any(standby.stood_for == gone and standby.stood_at_ms > before.stood_at_ms for standby in now)

    async def _started(self, standby: Standby, gone: str) -> None:
        """Start a standby: try until it runs, or the worker is back, or somebody else has decided otherwise."""
        why = standby_cause(gone)
        wish = Wake(app=standby.app, machine=standby.machine, why=why)
        while (outage := self.outages.get(gone)) is not None and outage.told:
            worker = self._app_table.index.workers.get(standby.worker)
            if worker is None:
                return
            try:
                if self._stood_since(standby, gone):
                    return
                await self._app_table.workers.of(worker).wake(wish)
            except HawkerError as error:
                _logger.warning("standby.not_started", machine=standby.machine, error=error.message, cause=why)
                await asyncio.sleep(AGAIN_S)
            else:
                return


_logger = get_logger()

"""The generations of a machine: the rule for one id on two workers.

A machine whose worker does not answer may be ordered again on another worker. It keeps its id there and gets the next
*generation*. When the first worker is back it learns from the catalog that the id is held by a higher generation: it
starts such a machine no more, and removes what it has of it. Only a copied database can make two equal generations:
then the machine that was created first stays, and of two created at once the one on the worker whose name sorts first.
The catalog's view `machines` has the same order. A machine that was destroyed there stays so: rows of a later
generation are never taken back. A worker that reaches nobody goes by what it knew last."""

from __future__ import annotations

from hawker.catalog.read.watch import Watch
from hawker.catalog.view import Changed, RowView
from hawker.errors import HawkerError, StoreError
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.telemetry import get_logger
from hawker.worker.machine.operations import Machines
from hawker.worker.request import Request

LOOK_S = 0.2
"""Changes in the catalog come in bursts; one look for all of them."""
AT_ONCE = 500
"""Machines that are looked for in one query."""


class Generations:
    """Who else has the machines of the worker `name`, as far as the catalog shows."""

    def __init__(self, name: str, view: RowView | None) -> None:
        self.name = name
        self._view = view

    def by(self, machine: MachineRow) -> str:
        """Why a machine of ours must not run: "generation 2 of it is on ord-2"; "" when it may.

        Goes by our own row, which the catalog may not show yet.
        """
        if self._view is None:
            return ""
        sql = "select worker, generation, created_at_ms from machines_all where id = ? and worker <> ?"
        found = self._view.rows(sql, (machine.id, self.name))  # to have SQLite sort none takes longer than to find it
        for worker, generation, created_at_ms in sorted(found, key=lambda row: (-row[1], row[2], row[0]))[:1]:
            theirs = generation, -created_at_ms, self.name
            if theirs > (machine.generation, -machine.created_at_ms, worker):
                return f"generation {generation} of it is on {worker}"
        return ""


class Replaced(Service):
    """Removes what this worker has of a machine that another worker has by now. It looks when it opens, and whenever
    the catalog's machines change."""

    def __init__(self, generations: Generations, view: RowView | None, store: Store, machines: Machines) -> None:
        self._generations = generations
        self._view = view
        self._store = store
        self._machines = machines
        self._watch = Watch(view, {"machines"}, LOOK_S, self._remove) if view else None
        self._changed: set[str] | None = None  # machines to be looked at; None: all of ours

    async def open(self) -> None:
        if self._watch and self._view:
            self._view.on_rows.append(self._note)
            self._watch.begin()

    async def close(self) -> None:
        if self._watch and self._view:
            self._view.on_rows.remove(self._note)
            await self._watch.close()

    def _note(self, changed: Changed) -> None:
        machines = changed.get("machines", ())
        if machines is None:
            self._changed = None
        elif self._changed is not None:
            self._changed.update(machines)

    async def _remove(self) -> None:
        """What was changed is looked at, not all that is there: with each of our machines' changes comes one of the
        catalog."""
        changed, self._changed = self._changed, set()
        try:
            await self._remove_of(changed)
        except StoreError:  # a full disk: it is looked at again in a while
            self._changed = None
            raise

    def _lost(self, changed: set[str] | None) -> list[str]:
        """Which of these machines, or of all of ours, another worker has, too."""
        assert self._view is not None  # there is a watch
        if changed is None:
            sql = (
                "select distinct m.id from machines_all m join machines_all o on o.id = m.id and o.worker <> m.worker "
                "where m.worker = ? order by m.id"
            )
            return [machine for (machine,) in self._view.rows(sql, (self._generations.name,))]
        ids, lost = sorted(changed), list[str]()
        for some in (ids[first : first + AT_ONCE] for first in range(0, len(ids), AT_ONCE)):
            sql = f"select id from machines_all where id in ({','.join('?' * len(some))}) and worker <> ? order by id"
            lost += dict.fromkeys(machine for (machine,) in self._view.rows(sql, (*some, self._generations.name)))
        return lost

    async def _remove_of(self, changed: set[str] | None) -> None:
        for machine in self._lost(changed):
            row = self._store.read.get(MachineRow, machine)
            if row is None or row.state is State.destroyed or not (why := self._generations.by(row)):
                continue
            rule = f"local rule: superseded, {why}"
            _logger.warning("machine.superseded", resource=machine, cause=rule)
            try:
                await self._machines.destroy(row.app, machine, Request(id="", rule=rule), force=True)
            except StoreError:
                raise
            except HawkerError as error:  # parked: the next change of the catalog looks again
                self._note({"machines": {machine}})
                _logger.error("superseded.left", resource=machine, error=error.message, cause=rule)


_logger = get_logger()

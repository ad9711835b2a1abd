"""What must hold of a worker, its database and the world around it, whatever happened before.

`check` looks at a worker at rest: every run has ended or is parked, and nothing is on its way. It returns what is
wrong, a line each. `check_history` needs the database alone and holds at any moment: it replays the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import msgspec

from hawker.core import capacity as ledger_rules
from hawker.core import journal
from hawker.model.guest import Resources
from hawker.model.machine import MOVES, SETTLED, State
from hawker.model.rows import LeaseRow, LedgerRow, MachineRow, RunRow, VersionRow
from hawker.sim.world import World
from hawker.store.log import read_images
from hawker.store.verify import verify
from hawker.worker import ledger

if TYPE_CHECKING:
    from tests.kit.sim_worker import SimWorker

MOVES_IN_A_RECORD = 2
"""A record keeps a row once, as it was left: at rest -> updating -> at rest shows as one move."""


def check(worker: SimWorker) -> list[str]:
    """Everything that is wrong with a worker at rest."""
    return [
        *worker.world.violations,
        *check_history(worker.path, worker.capacity),
        *_check_ledger(worker),
        *_check_machines(worker),
        *_check_world(worker, worker.world),
        *_check_runs(worker),
    ]


def check_history(path: Path, capacity: Resources) -> list[str]:
    """The tables follow from the log, its numbers have no gap, and every record, move and total in it was legal."""
    wrong = list(verify(path).faults)
    states: dict[str, State] = {}
    holders: dict[str, str] = {}  # the exclusive run by resource
    finals: set[str] = set()
    runs: dict[str, RunRow] = {}
    for seq, (number, kind, run_id, step, cause, writes) in enumerate(_records(path), start=1):
        where = f"log record {number} ({kind})"
        if number != seq:
            wrong.append(f"{where}: expected number {seq}")
        if not cause:
            wrong.append(f"{where}: has no cause")
        if kind == "step.completed" and run_id in runs and step == runs[run_id].steps[-1]:
            finals.add(run_id)
        for table, key, body in read_images(writes):
            if body is None:
                continue
            if table == LedgerRow.table:
                wrong += _oversold(where, capacity, msgspec.json.decode(body, type=LedgerRow).held)
            elif table == MachineRow.table:
                row = msgspec.json.decode(body, type=MachineRow)
                wrong += _illegal(where, row, states.get(key))
                states[key] = row.state
            elif table == RunRow.table:
                run = runs[key] = msgspec.json.decode(body, type=RunRow)
                wrong += _second_holder(where, run, holders)
    for run in runs.values():
        if run.status in ("done", "failed", "cancelled") and run.id not in finals:
            wrong.append(f"run {run.id} ({run.flow}) ended {run.status}, but its final step did not run")
    return wrong


def _records(path: Path) -> Iterator[tuple[int, str, str, str, str, bytes]]:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield from db.execute("select seq, kind, run, step, cause, writes from log order by seq")
    finally:
        db.close(True)


def _oversold(where: str, capacity: Resources, held: Resources) -> list[str]:
    try:
        ledger_rules.check(capacity, held)
    except AssertionError as error:
        return [f"{where}: {error}"]
    return []


def _illegal(where: str, row: MachineRow, before: State | None) -> list[str]:
    if before is None:
        return [] if row.state in reach(State.created) else [f"{where}: machine {row.id} begins {row.state}"]
    if row.state in reach(before):
        return []
    return [f"{where}: machine {row.id} went from {before} to {row.state}"]


def reach(state: State) -> set[State]:
    """States that one record may leave a machine in."""
    found = {state}
    for _ in range(MOVES_IN_A_RECORD):
        found |= {new for old in found for new in MOVES[old]}
    return found


def _second_holder(where: str, run: RunRow, holders: dict[str, str]) -> list[str]:
    if not run.exclusive:
        return []
    if run.status not in ("active", "parked"):
        if holders.get(run.resource) == run.id:
            del holders[run.resource]
        return []
    holder = holders.setdefault(run.resource, run.id)
    return [] if holder == run.id else [f"{where}: {run.resource} is held by {holder} and by {run.id}"]


def _check_ledger(worker: SimWorker) -> list[str]:
    reads = worker.store.read
    return [*ledger.audit(reads), *_oversold("ledger", worker.capacity, ledger.held(reads))]


def _check_machines(worker: SimWorker) -> list[str]:
    wrong: list[str] = []
    reads = worker.store.read
    parked = {run.resource for run in worker.runs() if run.status == "parked"}
    for row in reads.select(MachineRow):
        where = f"machine {row.id} ({row.state})"
        if row.state not in SETTLED and row.id not in parked:
            wrong.append(f"{where}: is at rest in a state that is none")
        if not reads.get(VersionRow, row.version):
            wrong.append(f"{where}: its version {row.version} is not known")
        events = worker.events(row.id)
        if any(later.at_ms <= sooner.at_ms for sooner, later in pairwise(events)):
            wrong.append(f"{where}: its events do not rise in time: {[(e.at_ms, e.id) for e in events]}")
        runs = {run.id: run for run in worker.runs(row.id)}
        for event in events:
            if not event.cause or event.run not in runs or not runs[event.run].cause:
                wrong.append(f"{where}: event {event.type} {event.status} has no run with a cause")
        if row.state is State.destroyed:
            if reads.get(LeaseRow, row.id):
                wrong.append(f"{where}: left a lease")
            if row.held() != Resources():
                wrong.append(f"{where}: holds {row.held()}")
            if row.id in worker.world.directories:
                wrong.append(f"{where}: left its directory")
    return wrong


def _check_world(worker: SimWorker, world: World) -> list[str]:
    """The programs that are there are the ones that the rows say, and nothing of the others is left."""
    wrong: list[str] = []
    reads = worker.store.read
    rows = {row.id: row for row in reads.select(MachineRow)}
    runs = {run.id: run for run in worker.runs()}
    parked = {run.resource for run in runs.values() if run.status == "parked"}
    placed = defaultdict(list)
    for instance in world.instances.values():
        placed[instance.spec.machine].append(instance)
    for machine in rows.keys() | placed.keys():
        if machine in parked:
            continue  # half done, for a person to look at
        row, there = rows.get(machine), placed[machine]
        keys = [instance.spec.key for instance in there]
        if row is None:
            wrong.append(f"instances {keys}: no machine {machine} is known")
        elif keys != ([row.instance] if row.instance else []):
            wrong.append(f"machine {machine} ({row.state}): its instance is {row.instance!r}, the world has {keys}")
        elif (row.state in (State.started, State.suspended)) != bool(there):
            wrong.append(f"machine {machine} ({row.state}): the world has {keys}")
        elif there and (there[0].exit or there[0].suspended != (row.state is State.suspended)):
            wrong.append(f"machine {machine} ({row.state}): the world has {there[0].shown()}")
    for spec in world.starts:
        run_id, _, step = spec.key.partition("/")
        run = runs.get(run_id)
        if run is None or step not in run.steps or run.resource != spec.machine or not run.cause:
            wrong.append(f"{spec.key} of machine {spec.machine} was started without a run")
    for key in world.stops:
        if not any(run.args.get("instance") == key and "stop" in run.steps for run in runs.values()):
            wrong.append(f"{key} was stopped without a run")
    return wrong


def _check_runs(worker: SimWorker) -> list[str]:
    wrong: list[str] = []
    for run in worker.runs():
        if run.status == "active":
            wrong.append(f"run {run.id} ({run.flow}) is active at step {run.steps[run.next]}")
        if not run.cause:
            wrong.append(f"run {run.id} ({run.flow}) has no cause")
        try:
            journal.check(run)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong

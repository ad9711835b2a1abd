"""What must hold of a worker, its database and the world around it, whatever happened before.

`check` looks at a worker at rest: every run has ended or is parked, and nothing is on its way. It returns what is
wrong, a line each. `read_history` needs the database alone and holds at any moment: it replays the log, so what it
checks held after every commit. The names are those of the list of invariants in the design: capacity (S1), events
append-only (S9), one active run (S10), no order taken while cordoned (S16), log before effect (S8), accounting (S20),
machines as desired (L3), what requests set (S2, in `hawker.sim.checks.operations`).
If the beginning of a log was cut off, only the rest is judged: what a row was before is not known there.
`hawker.store.verify` compares the tables with the log (S19).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from hawker.core import capacity as ledger_rules
from hawker.core import journal
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.machine import MOVES, SETTLED, State
from hawker.model.rows import (
    CheckRow,
    EventRow,
    FillRow,
    LeaseRow,
    LedgerRow,
    LogFloorRow,
    MachineRow,
    Row,
    RunRow,
    VersionRow,
    WorkerRow,
)
from hawker.sim.checks.operations import Operations
from hawker.sim.hosts.world import World
from hawker.store.log import read_images
from hawker.store.tx import Reads
from hawker.worker import ledger
from hawker.worker.invariants import audit
from hawker.worker.kinds import Kinds
from hawker.worker.machine.instance_spec import limits_of
from hawker.worker.machine.kind import MACHINE

MOVES_IN_A_RECORD = 2
"""A record keeps a row once, as it was left: at rest -> updating -> at rest shows as one move."""
_AS_DESIRED = {
    "started": (State.started,),
    "stopped": (State.stopped, State.failed),
    "suspended": (State.suspended,),
    "destroyed": (State.destroyed,),
}
ENDED = ("done", "failed", "cancelled")


def check(
    reads: Reads,
    world: World,
    capacity: Resources,
    kinds: Kinds = (MACHINE,),
    *,
    since: tuple[int, int] = (0, 0),
    history: History | None = None,
) -> list[str]:
    """Everything that is wrong with a worker at rest. `since`: how many starts and stops of the world are from before
    this database, which was made anew or brought back from a backup. `history` where it was read before."""
    runs = {run.id: run for run in reads.select(RunRow)}
    whole = not _cut_off(reads)
    history = history or read_history(reads, capacity)
    barred = {row.id for row in reads.select(FillRow)}
    return [
        *world.violations,
        *history.end(),
        *(f"S3: order {key} was given up, and would be taken" for key in sorted(history.operations.given_up - barred)),
        *audit(reads, kinds),
        *_oversold("ledger", capacity, ledger.held(reads)),
        *_check_machines(reads, world, runs, whole=whole),
        *_check_checks(reads),
        *_check_world(reads, world, runs),
        *(_check_effects(world, runs, since) if whole else ()),
        *_check_runs(runs),
    ]


class History:
    """What the log has said so far, record by record."""

    def __init__(self, capacity: Resources, *, whole: bool = True) -> None:
        self._whole = whole
        self._begun: set[str] = set()
        self.wrong: list[str] = []
        self.kinds: defaultdict[str, int] = defaultdict(int)
        self.runs: dict[str, RunRow] = {}
        self.operations = Operations(whole=whole)
        self._capacity = capacity
        self._states: dict[str, State] = {}
        self._holders: dict[str, str] = {}  # the exclusive run by resource
        self._finals: set[str] = set()
        self._cordoned = False

    def add(self, number: int, kind: str, resource: str, run_id: str, step: str, cause: str, writes: bytes) -> None:
        where = f"log record {number} ({kind})"
        self.kinds[kind] += 1
        self.operations.record(where, kind, resource, cause)
        if not cause:
            self.wrong.append(f"{where}: has no cause")
        if kind == "reservation.held" and self._cordoned:
            self.wrong.append(f"{where}: taken while the worker was cordoned")
        if kind == "run.started":
            self._begun.add(run_id)
        if kind == "step.completed" and run_id in self.runs and step == self.runs[run_id].steps[-1]:
            self._finals.add(run_id)
        for table, key, body in read_images(writes):
            if body is not None and (look := _LOOKS.get(table)):
                kind_of, method = look
                row = msgspec.json.decode(body, type=kind_of)
                method(self, where, key, row)
                if isinstance(row, MachineRow):
                    self.operations.machine(where, kind, cause, row)
            elif table == LeaseRow.table:
                self.operations.lease(cause, None if body is None else msgspec.json.decode(body, type=LeaseRow))
            elif table == FillRow.table and body is None:
                self.operations.forgotten(key)

    def end(self) -> list[str]:
        for run in self.runs.values():
            if run.status in ENDED and run.id not in self._finals and (self._whole or run.id in self._begun):
                self.wrong.append(f"run {run.id} ({run.flow}) ended {run.status}, but its final step did not run")
        return self.wrong + self.operations.wrong

    def _ledger(self, where: str, key: str, row: LedgerRow) -> None:
        self.wrong += _oversold(where, self._capacity, row.held)

    def _worker(self, where: str, key: str, row: WorkerRow) -> None:
        self._cordoned = row.cordoned

    def _machine(self, where: str, key: str, row: MachineRow) -> None:
        if self._whole or key in self._states:
            self.wrong += _illegal(where, row, self._states.get(key))
        self._states[key] = row.state

    def _run(self, where: str, key: str, run: RunRow) -> None:
        before = self.runs.get(key)
        if before:
            if before.status in ENDED and run != before:
                self.wrong.append(f"{where}: run {key} had ended {before.status} and was changed")
            for step, output in before.outputs.items():
                if run.outputs.get(step, output) != output:
                    self.wrong.append(
                        f"{where}: run {key}: step {step} has given {output!r}, then {run.outputs[step]!r}"
                    )
        self.runs[key] = run
        self.wrong += _second_holder(where, run, self._holders)


_LOOKS: dict[str, tuple[type[Row], Callable[[History, str, str, Any], None]]] = {
    LedgerRow.table: (LedgerRow, History._ledger),
    WorkerRow.table: (WorkerRow, History._worker),
    MachineRow.table: (MachineRow, History._machine),
    RunRow.table: (RunRow, History._run),
}


def read_history(reads: Reads, capacity: Resources) -> History:
    """The whole log, judged record by record."""
    through = _cut_off(reads)
    history = History(capacity, whole=not through)
    records = reads.query("select seq, kind, resource, run, step, cause, writes from log order by seq")
    for due, record in enumerate(records, start=through + 1):
        if record[0] != due:
            history.wrong.append(f"log record {record[0]}: expected number {due}")
        history.add(*record)
    return history


def _cut_off(reads: Reads) -> int:
    """The last record that compaction has taken off the log."""
    floor = reads.get(LogFloorRow, LogFloorRow.KEY)
    return floor.through if floor else 0


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


def _parked(runs: dict[str, RunRow]) -> set[str]:
    return {run.resource for run in runs.values() if run.status == "parked"}


def _check_machines(reads: Reads, world: World, runs: dict[str, RunRow], *, whole: bool) -> list[str]:
    wrong: list[str] = []
    parked = _parked(runs)
    versions = {row.id for row in reads.select(VersionRow)}
    events: defaultdict[str, list[EventRow]] = defaultdict(list)
    for event in reads.select(EventRow, "true order by id"):
        events[event.machine].append(event)
    for row in reads.select(MachineRow, "true order by id"):
        where = f"machine {row.id} ({row.state})"
        if row.state not in SETTLED and row.id not in parked:
            wrong.append(f"{where}: is at rest in a state that is none")
        if row.state in SETTLED and row.state not in _AS_DESIRED[row.desired] and row.id not in parked:
            wrong.append(f"{where}: is not as desired: {row.desired}")
        if row.version not in versions:
            wrong.append(f"{where}: its version {row.version} is not known")
        if any(later.at_ms <= sooner.at_ms for sooner, later in pairwise(events[row.id])):
            wrong.append(f"{where}: its events do not rise in time: {[(e.at_ms, e.id) for e in events[row.id]]}")
        for event in events[row.id]:
            run = runs.get(event.run)
            if not event.cause or (not run.cause if run else whole):
                wrong.append(f"{where}: event {event.type} {event.status} has no run with a cause")
        if row.state is State.destroyed:
            if reads.get(LeaseRow, row.id):
                wrong.append(f"{where}: left a lease")
            if row.held() != Resources():
                wrong.append(f"{where}: holds {row.held()}")
            if row.id in world.directories:
                wrong.append(f"{where}: left its directory")
    return wrong


def _check_checks(reads: Reads) -> list[str]:
    """A machine that has an instance has rows of its checks, all of them of that instance; no other has any."""
    wanted = {
        (row.id, check.name, row.instance)
        for row in reads.select(MachineRow, "instance > ''")
        for check in check_config(row.config).checks
    }
    there = {(row.machine, row.name, row.instance) for row in reads.select(CheckRow)}
    missing, left = sorted(wanted - there), sorted(there - wanted)
    return [
        *(f"machine {machine}: its check {name} of {key} has no row" for machine, name, key in missing),
        *(f"machine {machine}: the row of check {name} of {key} is left" for machine, name, key in left),
    ]


def _check_world(reads: Reads, world: World, runs: dict[str, RunRow]) -> list[str]:
    """The programs that are there are the ones that the rows say, and nothing of the others is left."""
    wrong: list[str] = []
    rows = {row.id: row for row in reads.select(MachineRow, "true order by id")}
    parked = _parked(runs)
    placed = defaultdict(list)
    for instance in world.instances.values():
        placed[instance.spec.machine].append(instance)
    for machine in [*rows, *(machine for machine in placed if machine not in rows)]:
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
        elif there and world.limits[row.instance] != limits_of(check_config(row.config).guest):
            wrong.append(f"machine {machine} ({row.state}): its program has {world.limits[row.instance]}")
        elif there and (there[0].exit or there[0].suspended != (row.state is State.suspended)):
            wrong.append(f"machine {machine} ({row.state}): the world has {there[0].shown()}")
    return wrong


def _check_effects(world: World, runs: dict[str, RunRow], since: tuple[int, int]) -> list[str]:
    wrong: list[str] = []
    starts_before, stops_before = since
    for spec in world.starts[starts_before:]:
        run_id, _, step = spec.key.partition("/")
        run = runs.get(run_id)
        if run is None or step not in run.steps or run.resource != spec.machine or not run.cause:
            wrong.append(f"{spec.key} of machine {spec.machine} was started without a run")
    stopped = {run.args.get("instance") for run in runs.values() if "stop" in run.steps}
    wrong += [f"{key} was stopped without a run" for key in world.stops[stops_before:] if key not in stopped]
    return wrong


def _check_runs(runs: dict[str, RunRow]) -> list[str]:
    wrong: list[str] = []
    for run in runs.values():
        if run.status == "active":
            wrong.append(f"run {run.id} ({run.flow}) is active at step {run.steps[run.next]}")
        if not run.cause:
            wrong.append(f"run {run.id} ({run.flow}) has no cause")
        try:
            journal.check(run)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong

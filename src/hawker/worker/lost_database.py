"""Whether the database that a worker starts with is all that the worker knew, and what to do where it is not.

An empty database, or an older one, looks like that of a worker that has no such machines: what runs would be removed.
So what is there besides is looked at first: programs that run and that no row knows, directories of machines, and this
worker's own copy of what it told the catalog. Where that is more than the database knows, the worker does not start. It
waits for a person to decide: `hawker worker recover` writes down how, and the next start does it.

A driver keeps with each program what its machine was when it was started (`Instance.note`): enough to make the rows
anew. A machine that had no program then has left nothing but its row in the catalog, without its configuration.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from hawker.catalog import apps
from hawker.catalog.view import View
from hawker.errors import HawkerError, Invalid
from hawker.model.catalog import TIERS, Position, Tier
from hawker.model.config import CONTAINER, MICROVM, PROCESS
from hawker.model.guest import Resources
from hawker.model.rows import AppRow, LogHeadRow, MachineRow, WorkerRow
from hawker.store.tx import Reads, Tx
from hawker.worker.drivers.base import Instance
from hawker.worker.machine.unknown import take_over, unknown
from hawker.worker.settings import Way

ASKED = "recover"
"""The file beside the database that says how, from `hawker worker recover` to the start that does it."""
CAUSE = "hawker worker recover"


class Own(Protocol):
    """This node's copy of the catalog."""

    @property
    def view(self) -> View: ...

    def seen(self, owner: str) -> Mapping[Tier, Position]: ...


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What is there and the database does not know. `new`: it knows no worker. `behind`: the worker had told the
    catalog of more changes than it has."""

    new: bool
    behind: bool = False
    programs: tuple[Instance, ...] = ()
    directories: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.behind or self.programs or self.directories or self.machines)


class DatabaseLost(HawkerError):
    """The worker must not start with this database before a person has decided."""

    code = "database_lost"


def look(reads: Reads, name: str, instances: Collection[Instance], directory: Path | None, own: Own | None) -> Lost:
    """What the database of the worker `name` has lost. A program that has ended is no loss; nor is a directory that is
    left over, if the database knows its worker."""
    new = reads.get(WorkerRow, "worker") is None
    programs = tuple(each for each in unknown(reads, instances) if each.exit is None)
    if not new:
        return Lost(new=False, programs=programs, behind=own is not None and _behind(reads, name, own))
    told = own.view.rows("select id from machines_rows where worker = ? order by id", (name,)) if own else []
    return Lost(
        new=True,
        programs=programs,
        directories=_directories(directory) if directory else (),
        machines=tuple(machine for (machine,) in told),
    )


def _behind(reads: Reads, name: str, own: Own) -> bool:
    seen = own.seen(name)
    for tier in TIERS:
        head, told = reads.get(LogHeadRow, tier), seen[tier]
        if head is not None and (told.epoch, told.head) > (head.epoch, head.head):
            return True
    return False


def _directories(directory: Path) -> tuple[str, ...]:
    found: set[str] = set()
    for driver in (PROCESS, CONTAINER, MICROVM):
        for place in ("work", "roots"):
            with suppress(FileNotFoundError, NotADirectoryError):
                found.update(os.listdir(directory / driver / place))
    return tuple(sorted(found))


def check(lost: Lost, name: str, directory: Path) -> None:
    """Raises `DatabaseLost`, which says what was found, where anything is lost."""
    if not lost:
        return
    running = _counted(len(lost.programs), "program that runs", "programs that run")
    beside = [
        running,
        _counted(len(lost.directories), "directory of a machine", "directories of machines"),
        _counted(len(lost.machines), "machine in the catalog", "machines in the catalog"),
    ]
    if lost.new:
        found = [f"is empty beside {', '.join(text for text in beside if text)}"]
    else:
        found = ["is older than what its worker had told the catalog of"] if lost.behind else []
        found += [f"does not know {running}"] if running else []
    raise DatabaseLost(
        f"{directory / 'worker.db'}, of worker {name}, {' and '.join(found)}: nothing was changed or ended",
        hint=f"bring back the right worker.db; or `hawker worker recover {directory}` takes over what runs, "
        "and with --discard ends it; then start the agent again",
    )


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}" if count else ""


# --- what was asked --------------------------------------------------------------------------------------------------


def asked(directory: Path) -> Way:
    """How a person decided. Raises `Invalid`."""
    try:
        way = (directory / ASKED).read_text().strip()
    except FileNotFoundError:
        return ""
    if way == "adopt":
        return "adopt"
    if way == "discard":
        return "discard"
    raise Invalid(str(directory / ASKED), way, "remove the file, and run `hawker worker recover` again")


def ask(directory: Path, way: Way) -> None:
    (directory / ASKED).write_text(f"{way}\n")


def done(directory: Path) -> None:
    (directory / ASKED).unlink(missing_ok=True)


# --- taking over -----------------------------------------------------------------------------------------------------


def adopt(tx: Tx, lost: Lost, name: str, capacity: Resources, own: Own | None) -> list[str]:
    """Make rows for the programs that run, and for the apps that only this worker had told of. Returns what could not
    be recovered, a sentence each."""
    tx.record("worker.recovered", name, cause=CAUSE)
    left: list[str] = []
    for program in lost.programs:
        if why := take_over(tx, program, capacity, CAUSE):
            left.append(f"program {program.key} of machine {program.machine} runs on and is not known: {why}")
    if own is not None:
        for row in own.view.rows(f"select {apps.COLUMNS} from apps_rows where worker = ? order by id", (name,)):
            app = apps.read(row)
            if tx.get(AppRow, app.name) is None:
                tx.put(app)
        told = own.view.rows("select id, app, state from machines_rows where worker = ? order by id", (name,))
        left += [
            f"machine {machine} of app {app} was {state}: its configuration is lost"
            for machine, app, state in told
            if tx.get(MachineRow, machine) is None
        ]
    return left

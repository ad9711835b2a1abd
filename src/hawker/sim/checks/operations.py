"""What the log says of operations: who may change what of a machine, and what became of what was asked (S2, S3).

What a request sets when it is accepted stays until another request sets it. Three rules of the worker's own change
what a request wished for: the restart policy and a lost program change a machine that was to run, the end of a
suspended program one that was to be suspended, and one that has gone to another worker is destroyed. A run that comes
to nothing takes back what it set itself, and nothing that was asked for since.

`Operations.of` gives the rows of a request; `hawker.sim.checks.acknowledged` compares them with what clients were told.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hawker.model.rows import LeaseRow, MachineRow

_OF_ENDS = {
    "restart policy ": "started",
    "worker start: ": "started",
    "the suspended program is gone": "suspended",
}
"""What a worker does when a program ends has such a cause; before it the machine must have had this wish."""
_SUPERSEDED = "local rule: superseded"
_GIVEN_UP = ("reservation.released", "reservation.lapsed")
_BY = "request "


class Operations:
    """Reads a log, record by record. `machines` has all rows of each machine, in order; `given_up` has the orders that
    were released or lapsed; `wrong` has the violations. `whole`: the log has its beginning."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole
        self.wrong: list[str] = []
        self.machines: defaultdict[str, list[MachineRow]] = defaultdict(list)
        self._set_by: dict[tuple[str, str], str] = {}  # causes, by machine and part
        self._images: defaultdict[str, list[MachineRow | LeaseRow | None]] = defaultdict(list)
        self.given_up: set[str] = set()
        self._undone: set[str] = set()

    def of(self, request: str) -> list[MachineRow | LeaseRow | None]:
        """Rows of machines and leases as the records that a request caused left them; None: a lease that was given
        back."""
        return self._images.get(request, [])

    def came_to_nothing(self, request: str) -> bool:
        """Whether the run that a request began was given up."""
        return request in self._undone

    def record(self, where: str, kind: str, resource: str, cause: str) -> None:
        if kind in ("step.aborted", "run.cancelled"):
            self._undone.add(_request(cause))
        elif kind in _GIVEN_UP:
            self.given_up.add(resource)
        elif kind == "reservation.held" and resource in self.given_up:
            self.wrong.append(f"S3: {where}: order {resource} was taken after it had been given up")

    def forgotten(self, key: str) -> None:
        """Forget a finished order that nobody asks about again."""
        self.given_up.discard(key)

    def lease(self, cause: str, row: LeaseRow | None) -> None:
        if request := _request(cause):
            self._images[request].append(row)

    def machine(self, where: str, kind: str, cause: str, row: MachineRow) -> None:
        rows = self.machines[row.id]
        before = rows[-1] if rows else None
        rows.append(row)
        if request := _request(cause):
            self._images[request].append(row)
        had = _parts(before) if before else {}
        for part, now in _parts(row).items():
            if before and now != had[part]:
                self._changed(where, kind, cause, part, before, row)
            if not kind.startswith(("step.", "run.cancelled")) and (before is None or now != had[part]):
                self._set_by[row.id, part] = cause

    def _changed(self, where: str, kind: str, cause: str, part: str, before: MachineRow, row: MachineRow) -> None:
        what = f"{where}: machine {row.id}: {cause!r} changed its {part}"
        for rule, wished in _OF_ENDS.items():
            if cause.startswith(rule) and not (part == "desired" and wished == before.desired):
                self.wrong.append(f"S2: {what} from {_parts(before)[part]!r} to {_parts(row)[part]!r}")
        if cause.startswith(_SUPERSEDED) and not (part == "desired" and row.desired == "destroyed"):
            self.wrong.append(f"S2: {what} from {_parts(before)[part]!r} to {_parts(row)[part]!r}")
        set_by = self._set_by.get((row.id, part), cause)
        if kind.startswith("step.") and part != "desired" and set_by != cause:
            self.wrong.append(f"S2: {what}, which {set_by!r} had set, from {_parts(before)[part]!r}")


def _parts(row: MachineRow) -> dict[str, Any]:
    """The columns of a machine's row that requests set, and nothing else does. Its size follows at the end of a run."""
    config = {name: value for name, value in row.config.items() if name not in ("metadata", "guest")}
    return {
        "desired": row.desired,
        "configuration": config,
        "metadata": row.config.get("metadata"),
        "cordoned": row.cordoned,
    }


def _request(cause: str) -> str:
    return cause.split()[1] if cause.startswith(_BY) else ""

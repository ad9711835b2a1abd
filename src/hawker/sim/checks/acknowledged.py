"""Every operation on a machine that was acknowledged is in its worker's log, and did there what was asked for (S2).

The log is read by `hawker.sim.checks.operations`, which also says what may change it afterwards. An operation that
found nothing to do left no record: then its machine has been as was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hawker.model.rows import LeaseRow, MachineRow
from hawker.sim.checks.operations import Operations
from hawker.sim.fleet import Fleet

Shows = Callable[[MachineRow, Any], bool]


def check(fleet: Fleet, logs: Mapping[str, Operations]) -> Iterator[str]:
    """What is wrong. `logs` by worker; one that does not serve has none."""
    for told in fleet.oracle.acknowledged:
        # A machine that was ordered anew may be on a worker that no client was told of.
        workers = list(fleet.losses) if told.machine in fleet.oracle.replaced else [told.worker]
        if any(fleet.forgot(worker, told.asked_s, told.told_s) for worker in workers):
            continue
        if any(worker in logs and not logs[worker].whole for worker in workers) or told.worker not in logs:
            continue  # the record may have been cut off
        if fleet.oracle.replaced.get(told.machine, -1.0) >= told.asked_s:
            continue  # the request may have gone to a worker that no longer has the machine
        what = f"{told.what} of machine {told.machine}, acknowledged at {told.told_s:.3f} (request {told.request})"
        found = [row for log in logs.values() for row in log.of(told.request)]
        if told.what in _LEASES:
            if not any(_LEASES[told.what](row, told.wanted) for row in found):
                yield f"S2: {what} is not in the log of {told.worker}"
            continue
        shows = _SHOWS[told.what]
        rows = [row for row in found if isinstance(row, MachineRow)]
        if not rows and any(
            shows(row, told.wanted) for log in logs.values() for row in log.machines.get(told.machine, ())
        ):
            continue
        if not rows:
            yield f"S2: {what} is not in the log of {told.worker}"
        elif told.what == "resize" and any(log.came_to_nothing(told.request) for log in logs.values()):
            continue
        elif not any(shows(row, told.wanted) for row in (rows if told.what == "resize" else rows[:1])):
            yield f"S2: {what} left it {rows[0].desired}, {rows[0].config}"


def _wished(desired: str) -> Shows:
    return lambda row, wanted: row.desired == desired


def _has_note(row: MachineRow, wanted: tuple[str, str | None]) -> bool:
    name, value = wanted
    return (row.config.get("metadata") or {}).get(name) == value


_SHOWS: dict[str, Shows] = {
    "start": _wished("started"),
    "restart": _wished("started"),
    "stop": _wished("stopped"),
    "suspend": _wished("suspended"),
    "destroy": _wished("destroyed"),
    "update": lambda row, program: row.config["init"]["exec"] == [program],
    "metadata": _has_note,
    "cordon": lambda row, cordoned: row.cordoned == cordoned,
    "resize": lambda row, memory_mb: row.config["guest"]["memory_mb"] == memory_mb,
}
"""Whether a machine's row is as an operation wants it, by the operation."""

_LEASES: dict[str, Callable[[MachineRow | LeaseRow | None, Any], bool]] = {
    "lease": lambda row, nonce: isinstance(row, LeaseRow) and row.nonce == nonce,
    "release lease": lambda row, nonce: row is None,
}
OPERATIONS = (*_SHOWS, *_LEASES)
"""What clients do to machines, and are told to be done."""

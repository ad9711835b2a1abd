"""What a worker and its world have come to, as lines of text that two runs of one scenario share.

Times are left out and ids replaced by what they stand for, in order of appearance: whatever differs between two
descriptions is a difference that a client, a person or a program could see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from tests.kit.sim_worker import SimWorker

from hawker.model.rows import (
    AppRow,
    EventRow,
    FillRow,
    LeaseRow,
    LedgerRow,
    MachineRow,
    ReservationRow,
    Row,
    RunRow,
    VersionRow,
)

_LEFT_OUT = {
    "at_ms",
    "created_at_ms",
    "updated_at_ms",
    "started_at_ms",
    "expires_at_ms",
    "stamp_ms",
    "exited_at",
    "resume_at_ms",
    "not_before_ms",
    "nonce",
    "private_ip",  # made from the machine's id
    "host_port",  # this, too
}
_TABLES: tuple[type[Row], ...] = (
    MachineRow,
    EventRow,
    VersionRow,
    LeaseRow,
    ReservationRow,
    FillRow,
    LedgerRow,
    AppRow,
    RunRow,
)
_NUMBERED: tuple[tuple[type[Row], str, str], ...] = (
    (RunRow, "run", "resource"),
    (VersionRow, "version", "machine"),
    (EventRow, "event", "machine"),
)


def describe(worker: SimWorker) -> list[str]:
    """The state as lines, in an order that is the same in every run."""
    reads, world = worker.store.read, worker.world
    names = {
        **{row.machine: f"machine({row.id})" for row in reads.select(FillRow) if row.machine},
        **{row.machine: f"machine({row.id})" for row in reads.select(ReservationRow)},
    }
    numbers: Counter[tuple[str, str]] = Counter()
    for kind, what, machine in _NUMBERED:
        for row in reads.select(kind, "true order by id"):
            of = names.get(getattr(row, machine), "")
            numbers[what, of] += 1
            names[row.key] = f"{what} {numbers[what, of]} of {of}"
    lines = [_line(kind.table, row) for kind in _TABLES for row in reads.select(kind, "true order by id")]
    lines += [_line(row.table, row) for kind in worker.kinds for of in kind.schema.rows for row in reads.select(of)]
    lines += [_line("placed", placed.shown()) for placed in world.instances.values()]
    lines += [f"directory of {machine}" for machine in world.directories]
    starts = [f"start on {s.machine}: {s.key} {list(s.argv)}" for s in world.starts]
    return [*sorted(_named(starts, names), key=_machine), *sorted(_named(lines, names))]


def _machine(start: str) -> str:
    """Starts of one machine keep their order; between machines there is none."""
    return start.partition(":")[0]


def _line(what: str, value: msgspec.Struct) -> str:
    return f"{what} {_without_times(msgspec.to_builtins(value))}"


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_times(inner) for key, inner in value.items() if key not in _LEFT_OUT}
    return [_without_times(inner) for inner in value] if isinstance(value, list | tuple) else value


def _named(lines: list[str], names: Mapping[str, str]) -> list[str]:
    text = "\n".join(lines)
    for key, name in names.items():
        text = text.replace(key, name)
    return text.split("\n") if lines else []

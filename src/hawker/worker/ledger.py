"""The worker's ledger: one durable row of totals, changed in the transaction of whatever it counts.

Whatever reservations and things hold passes through `adjust`, so the totals are right by construction, and `audit` can
prove it from the rows. The one writer of the database makes check and booking a single act: no two callers can both get
the last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hawker.core import capacity
from hawker.errors import Conflict
from hawker.model.guest import RESOURCES, Resources
from hawker.model.rows import LedgerRow, ReservationRow, Row
from hawker.store.tx import Reads, Tx

_WORDS = {
    "cpus_shared": "CPUs",
    "cpus_dedicated": "CPUs",
    "memory_mib": "memory",
    "disk_mib": "disk",
    "machines": "machine slots",
}


ROW = LedgerRow, "ledger"
"""The one row: its type and key."""


class Full(Conflict):
    """The worker has no room for the rest of a change. The text is the one that clients of this API match."""

    code = "insufficient_capacity"

    def __init__(self, short: capacity.Shortfall) -> None:
        super().__init__(
            "aborted: could not reserve resource for machine: "
            f"insufficient {_WORDS[short.resource]} available to fulfill request "
            f"({short.resource}: {short.wanted} wanted, {short.free} free)",
            details={"resource": short.resource, "wanted": short.wanted, "free": short.free},
            hint=f"stop or destroy a machine of this worker, or raise {capacity.setting_of(short.resource)} there",
        )
        self.short = short


def held(reads: Reads) -> Resources:
    """What reservations and things hold together."""
    row = reads.get(*ROW)
    return row.held if row else Resources()


def adjust(tx: Tx, total: Resources, before: Resources, after: Resources) -> Resources:
    """Book the difference between what something held and what it holds from now on. Returns the new totals.

    Giving back always works. Raises `Full` with true figures when what is taken in addition does not fit in `total`;
    nothing is written then.
    """
    if before == after:
        return held(tx)
    now = held(tx)
    if short := capacity.shortfall(total, now, after - before):
        raise Full(short)
    then = now + (after - before)
    tx.put(LedgerRow(held=then))
    return then


def audit(reads: Reads, holds: Mapping[type[Row], Callable[[Any], Resources]]) -> list[str]:
    """Compare the totals with the rows they stand for. `holds` says what rows of each type hold, beside reservations.
    Returns what differs, resource by resource."""
    total = Resources()
    for reservation in reads.select(ReservationRow):
        total += reservation.resources
    for kind, held_by in holds.items():
        for row in reads.select(kind):
            total += held_by(row)
    now = held(reads)
    return [
        f"{name}: the ledger says {getattr(now, name)}, rows hold {getattr(total, name)}"
        for name in RESOURCES
        if getattr(now, name) != getattr(total, name)
    ]

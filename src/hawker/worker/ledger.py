"""The worker's ledger: one durable row of totals, changed in the transaction of whatever it counts.

Every reservation and every machine passes through `adjust`, so the totals are right by construction, and `audit` can
prove it from the rows. The one writer of the database makes check and booking a single act: no two callers can both get
the last slot.
"""

from __future__ import annotations

from hawker.core import capacity
from hawker.errors import Conflict
from hawker.model.guest import RESOURCES, Resources
from hawker.model.machine import State
from hawker.model.rows import LedgerRow, MachineRow, ReservationRow, TallyRow
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
    """What reservations and machines hold together."""
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


def count(tx: Tx, app: str, more: int) -> None:
    """One machine of an app more or fewer."""
    there = tx.get(TallyRow, app)
    tx.put(TallyRow(app=app, machines=(there.machines if there else 0) + more))


def audit(reads: Reads) -> list[str]:
    """Compare the totals with the rows they stand for. Returns what differs, resource by resource."""
    total = Resources()
    apps: dict[str, int] = {}
    for machine in reads.select(MachineRow):
        total += machine.held()
        apps[machine.app] = apps.get(machine.app, 0) + (machine.state is not State.destroyed)
    for reservation in reads.select(ReservationRow):
        total += reservation.resources
    now = held(reads)
    tallies = {row.app: row.machines for row in reads.select(TallyRow)}
    miscounted = [
        f"{app}: the tally says {tallies.get(app, 0)}, there are {there} machines"
        for app, there in apps.items()
        if tallies.get(app, 0) != there
    ]
    return miscounted + [
        f"{name}: the ledger says {getattr(now, name)}, machines and reservations hold {getattr(total, name)}"
        for name in RESOURCES
        if getattr(now, name) != getattr(total, name)
    ]

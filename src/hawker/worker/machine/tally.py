"""How many machines each app has here: counted as they come and go, because every offer asks."""

from __future__ import annotations

from hawker.model.machine import State
from hawker.model.rows import MachineRow, TallyRow
from hawker.store.tx import Reads, Tx


def count(tx: Tx, app: str, more: int) -> None:
    """One machine of an app more or fewer."""
    there = tx.get(TallyRow, app)
    tx.put(TallyRow(app=app, machines=(there.machines if there else 0) + more))


def audit(reads: Reads) -> list[str]:
    """Compare the tallies with the machines. Returns which apps were miscounted."""
    apps: dict[str, int] = {}
    for machine in reads.select(MachineRow):
        apps[machine.app] = apps.get(machine.app, 0) + (machine.state is not State.destroyed)
    tallies = {row.app: row.machines for row in reads.select(TallyRow)}
    return [
        f"{app}: the tally says {tallies.get(app, 0)}, there are {there} machines"
        for app, there in apps.items()
        if tallies.get(app, 0) != there
    ]

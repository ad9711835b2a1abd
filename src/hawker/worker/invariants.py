"""Checks of what a change leaves, in its transaction: with `validate` in the configuration, and in every simulation.

A change that breaks one is undone and answered as an internal error.
"""

from __future__ import annotations

from hawker.core import journal
from hawker.core.life.invariants import broken
from hawker.core.life.phases import phase_of
from hawker.model.rows import LedgerRow, MachineRow, RunRow
from hawker.store.tx import Known, Tx
from hawker.worker import ledger
from hawker.worker.flows.runner import active_run


def validate(tx: Tx, changed: Known) -> None:
    """Raises `AssertionError`: rows that cannot have come of the rules for runs, machines and capacity."""
    wrong: list[str] = []
    for row in changed.values():
        if isinstance(row, RunRow):
            journal.check(row)
        elif isinstance(row, MachineRow):
            wrong += broken(row, phase_of(active_run(tx, row.id)))
        elif isinstance(row, LedgerRow):
            wrong += ledger.audit(tx)
    if wrong:
        raise AssertionError("; ".join(wrong))

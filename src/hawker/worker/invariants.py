"""Checks of what a change leaves, in its transaction: with `validate` in the configuration, and in every simulation.

A change that breaks one is undone and answered as an internal error.
"""

from __future__ import annotations

from collections.abc import Callable

from hawker.core import journal
from hawker.model.rows import LedgerRow, RunRow
from hawker.store.tx import Known, Reads, Tx
from hawker.worker import ledger
from hawker.worker.kinds import Kinds, holds


def validator(kinds: Kinds) -> Callable[[Tx, Known], None]:
    """For `Store.on_change`. Raises `AssertionError` for rows that cannot have come of the rules for runs, for
    capacity, and for things of these kinds."""
    by_type = {row: kind for kind in kinds for row in kind.schema.rows}

    def validate(tx: Tx, changed: Known) -> None:
        wrong: list[str] = []
        for (of, _), row in changed.items():
            if isinstance(row, RunRow):
                journal.check(row)
            elif isinstance(row, LedgerRow):
                wrong += audit(tx, kinds)
            elif row is not None and (kind := by_type.get(of)):
                wrong += kind.broken(tx, row)
        if wrong:
            raise AssertionError("; ".join(wrong))

    return validate


def audit(reads: Reads, kinds: Kinds) -> list[str]:
    """Compare the totals of the ledger and of the kinds with the rows they stand for."""
    return [*ledger.audit(reads, holds(kinds)), *(wrong for kind in kinds for wrong in kind.audit(reads))]

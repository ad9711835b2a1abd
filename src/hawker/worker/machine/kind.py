"""The kind *machine*: what it brings to a worker. Start reading here."""

from __future__ import annotations

from hawker.core.life.invariants import broken
from hawker.core.life.phases import phase_of
from hawker.model.rows import CheckRow, DecisionRow, EventRow, LeaseRow, MachineRow, PortRow, Row, VersionRow
from hawker.store.schema import Schema
from hawker.store.tx import Tx
from hawker.worker.flows.runner import active_run
from hawker.worker.kinds import Kind
from hawker.worker.machine import tally
from hawker.worker.machine.history import over
from hawker.worker.machine.parts import MachineParts
from hawker.worker.machine.projections import projections


def _broken(tx: Tx, row: Row) -> list[str]:
    return broken(row, phase_of(active_run(tx, row.id))) if isinstance(row, MachineRow) else []


def _life() -> str:
    from hawker.core.life.page import page  # for who writes the documentation

    return page()


MACHINE = Kind(
    # The numbered files of the store make these tables: they are older than kinds.
    schema=Schema("machine", (MachineRow, DecisionRow, VersionRow, EventRow, PortRow, CheckRow, LeaseRow)),
    parts=MachineParts,
    holds={MachineRow: MachineRow.held},
    projections=projections,
    broken=_broken,
    audit=tally.audit,
    over=over,
    life=_life,
)

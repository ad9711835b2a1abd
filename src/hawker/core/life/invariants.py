"""What holds of a machine between any two changes."""

from __future__ import annotations

from hawker.core.life.endings import HAS_PROGRAM
from hawker.core.life.phases import Phase
from hawker.model.machine import RESTING, State
from hawker.model.rows import MachineRow


def broken(row: MachineRow, phase: Phase) -> list[str]:
    """What does not hold. `phase` is that of the run that holds the machine."""
    wrong = []
    if phase is Phase.free and row.state not in RESTING | {State.destroyed}:
        wrong.append(f"machine {row.id} is {row.state}, and no run goes on with it")
    if phase is Phase.free and bool(row.instance) != (row.state in HAS_PROGRAM):
        wrong.append(f"machine {row.id} is {row.state} with the program {row.instance!r}")
    if row.before and phase not in (Phase.fetching_beside, Phase.parked):
        wrong.append(f"machine {row.id} keeps its version before, and no update fetches an image: {phase}")
    return wrong

"""A failed run again: is it the same, what led to it, and which of its faults does it need?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hawker.errors import Invalid
from hawker.sim.faults.drawing import faults_of
from hawker.sim.plan import Plan
from hawker.sim.running import Report, simulate

ABOUT_MAX = 80
SHRINK_RUNS_MAX = 80
_NAMES = re.compile(r"\b(?:[0-9a-f]{14}|client\d+-\d+|[0-9A-HJKMNP-TV-Z]{26})\b")
_INVARIANT = re.compile(r"\b[SL]\d+\b")


def save(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def load(path: Path) -> Report:
    """Raises `Invalid`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise Invalid("record", str(path), error.strerror or str(error)) from error
    except msgspec.DecodeError as error:
        raise Invalid("record", str(path), f"it is not the record of a simulation: {error}") from error


def kinds_of(violations: Sequence[str]) -> set[str]:
    """The invariants that were violated, by their names in the list; other texts by their first words."""
    return {found[0] if (found := _INVARIANT.search(text)) else " ".join(text.split()[:4]) for text in violations}


def rerun(plan: Plan, violations: Sequence[str]) -> tuple[Report, list[str]]:
    """The run again, and the events that speak of what its violations name."""
    names = sorted({name for text in violations for name in _NAMES.findall(text)})
    about: list[str] = []

    def tell(number: int, line: str) -> None:
        if " fault " in line or " agent " in line or any(name in line for name in names):
            about.append(f"{number} {line}")

    return simulate(plan, tell=tell), about


def shrink(plan: Plan, wanted: set[str], note: Callable[[str], None]) -> Plan:
    """A plan with fewer faults that still violates one of the wanted invariants. Halves of the faults are left out,
    then quarters, down to single ones."""
    faults = faults_of(plan)
    runs, size = 0, max(1, len(faults) // 2)
    while runs < SHRINK_RUNS_MAX:
        start = 0
        while start < len(faults) and runs < SHRINK_RUNS_MAX:
            fewer = faults[:start] + faults[start + size :]
            runs += 1
            if kinds_of(simulate(replace(plan, faults=fewer, dropped=[])).violations) & wanted:
                faults = fewer
                note(f"{len(faults)} faults are enough")
            else:
                start += size
        if size == 1:
            break
        size //= 2
    return replace(plan, faults=faults, dropped=[])

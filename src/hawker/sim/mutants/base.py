"""What a mutation of our own code is.

A mutant replaces a method, or something that a module uses, for the length of one run. What it says is the fault that a
person could make; `breaks` names the invariants of which at least one must then be violated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hawker.sim.platform.replacing import Change, replaced


class Mutant(NamedTuple):
    """`breaks`: what a violation that notices it has in its text. `faults`: the kinds that it takes to show, () for the
    usual ones."""

    says: str
    breaks: tuple[str, ...]
    changes: tuple[Change, ...]
    faults: tuple[str, ...] = ()

    def noticed(self, violations: Sequence[str]) -> bool:
        return any(word in text for text in violations for word in self.breaks)


@contextmanager
def mutated(mutant: Mutant | None) -> Iterator[None]:
    """Run with a mutant."""
    with replaced(mutant.changes if mutant else ()):
        yield

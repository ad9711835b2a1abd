"""What a mutation of our own code is.

A mutant replaces a method, or something that a module uses, for the length of one run. `says` describes the mistake
that a person could make; at least one of the invariants that `breaks` names must then be violated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hawker.sim.platform.replacing import Change, replaced


class Mutant(NamedTuple):
    """`breaks`: a violation that notices the mutant has one of these in its text. `faults`: the kinds of faults that
    make it show, () for the usual ones."""

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

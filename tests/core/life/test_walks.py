"""Long lives of a machine, drawn: its image comes and goes with updates, and runs follow upon one another.

`test_everything` reaches every position; this goes on from each for a while, between images and programs of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from tests.kit.lives import At, begun, happens, wished

from hawker.core.life.endings import Correction, found
from hawker.core.life.invariants import broken
from hawker.core.life.phases import Phase, fetches_beside, phase_of
from hawker.core.life.wishes import Wish, create
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import Before, MachineRow

NOTHING = Resources()
BEFORE = Before(version="v", config={}, driver="process", image_digest="", ports=(), cordoned=False)


def row(at: At) -> MachineRow:
    """The machine as its worker would have it there."""
    beside = fetches_beside(at.steps) and not at.prepared and bool(at.flow)
    return MachineRow(
        id="m",
        app="web",
        name="m",
        region="ord",
        state=at.state,
        desired="started",
        version="v",
        config={},
        resources=NOTHING,
        created_at_ms=0,
        updated_at_ms=0,
        cause="a test",
        private_ip="",
        instance=at.program,
        before=BEFORE if beside else None,
    )


GOES_ON = [wish for wish in Wish if wish not in (Wish.destroy, Wish.force_destroy)]
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 63), st.booleans()), min_size=40, max_size=120)
"""Whether somebody wishes something, which of all that may happen does, and whether a program of the host is meant. A
drawn life goes on until it is left: to destroy the machine is the business of `test_everything`."""


def life(steps: list[tuple[bool, int, bool]]) -> Iterator[At]:
    at = begun(At(State.created), create(of_host=False, skip_launch=False))
    yield at
    for asked, number, of_host in steps:
        by_itself = [after for _, after in happens(at, of_host)]
        wishes = [wished(at, wish, of_host, skip) for wish, skip in product(GOES_ON, (False, True))]
        choices = ([after for after in wishes if after] if asked else by_itself) or by_itself
        if not choices:
            return  # it was destroyed when its program ended
        at = choices[number % len(choices)]
        yield at


@given(steps=STEPS)
def test_whatever_happens_in_whatever_order_no_rule_of_a_machine_is_broken(steps: list[tuple[bool, int, bool]]) -> None:
    for at in life(steps):
        if not at.ending:
            assert broken(row(at), phase_of(at.run())) == []


@given(steps=STEPS)
def test_a_worker_that_comes_back_makes_program_and_row_agree(steps: list[tuple[bool, int, bool]]) -> None:
    """Where no run goes on with the machine: a program that is gone has ended, one that is as the row says is left
    alone, and any other is corrected."""
    for at in life(steps):
        if phase_of(at.run()) is Phase.free and at.program:
            frozen = at.state is State.suspended
            assert found(at.state, there=False, frozen=False) is Correction.ended
            assert found(at.state, there=True, frozen=frozen) is Correction.nothing
            assert found(at.state, there=True, frozen=not frozen) in (Correction.freeze, Correction.thaw)

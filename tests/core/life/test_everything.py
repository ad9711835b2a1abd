"""Everything that can happen to a machine, in every order: the tables of `hawker.core.life` are walked whole.

A position is a machine's state, whether it has a program, and the run that holds it. From each that can be reached
every wish is tried, every step ends well or not, the run is cancelled, and the program ends by itself.
"""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from tests.kit.lives import At, begun, happens, wished

from hawker.core.life.phases import FETCHES, Phase, phase_of
from hawker.core.life.wishes import BEGINS, MEETS, UPDATES_FROM, Way, Wish, create
from hawker.model.machine import RESTING, State

ONLY_WAITS = FETCHES | {Phase.backing_off}
"""Phases in which a run has nothing under way that would have to be undone: another may take its place."""


def reached(of_host: bool) -> dict[At, str]:
    """Every position, with how it was come to."""
    first = [begun(At(State.created), create(of_host=of_host, skip_launch=skip)) for skip in (False, True)]
    found = dict.fromkeys(first, "created")
    waiting = deque(first)
    while waiting:
        at = waiting.popleft()
        nexts = list(happens(at, of_host))
        for wish, skip in product(Wish, (False, True)):
            if after := wished(at, wish, of_host, skip):
                nexts.append((wish.value, after))
        for how, after in nexts:
            if after not in found:
                found[after] = f"{found[at]}; {how}"
                waiting.append(after)
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["with an image", "of the host"])
def everywhere(request: pytest.FixtureRequest) -> dict[At, str]:
    return reached(request.param)


def test_a_machine_that_no_run_holds_rests(everywhere: dict[At, str]) -> None:
    for at, how in everywhere.items():
        if not at.flow:
            assert at.state in RESTING | {State.destroyed}, how


def test_a_machine_that_runs_has_a_program_and_one_at_rest_has_none(everywhere: dict[At, str]) -> None:
    for at, how in everywhere.items():
        if not at.flow:
            assert bool(at.program) == (at.state in (State.started, State.suspended)), how


def test_whatever_a_machine_is_at_a_forced_destroy_ends_it(everywhere: dict[At, str]) -> None:
    for at, how in everywhere.items():
        while at.state is not State.destroyed:
            at = wished(at, Wish.force_destroy, False, False) or next(after for _, after in happens(at, False))
        assert (at.program, at.flow) == ("", ""), how


def test_every_wish_has_one_answer_whatever_its_machine_is_at() -> None:
    for wish, phase in product(Wish, Phase):
        assert phase in MEETS[wish]
        if MEETS[wish][phase] is Way.replace:
            assert phase in ONLY_WAITS, f"{wish} ends a run that is {phase}, which would have to be undone"


def test_every_state_that_can_be_wished_from_is_reached(everywhere: dict[At, str]) -> None:
    """With no run in the way, or with one that gives way."""
    free = {at.state for at in everywhere if not at.flow}
    left = {at.state for at in everywhere if phase_of(at.run()) in ONLY_WAITS}
    for wish in set(Wish) - {Wish.force_destroy}:
        begins = UPDATES_FROM if wish is Wish.update else {state for state, plan in BEGINS[wish].items() if plan}
        assert begins - {State.created} <= free | left


def test_every_phase_is_reached(everywhere: dict[At, str]) -> None:
    fetches = next(iter(everywhere)).steps[:1] == ("prepare",)
    phases = {phase_of(at.run()) for at in everywhere if not at.ending}
    assert phases == set(Phase) - {Phase.parked} - (set() if fetches else FETCHES)

"""Everything that can happen to a machine, in every order: the tables of `hawker.core.life` are walked whole.

A position is a machine's state, whether it has a program, and the run that holds it. From each that can be reached
every wish is tried, every step ends well or not, the run is cancelled, and the program ends by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from hawker.core.life import endings
from hawker.core.life.endings import Undo
from hawker.core.life.phases import FETCHES, ONLY_WAITS, RUNS_ON, Phase, phase_of
from hawker.core.life.wishes import BEGINS, MEETS, UPDATES_FROM, Plan, Way, Wish, create, found_by_update, plan, update
from hawker.errors import PreconditionFailed
from hawker.model.machine import RESTING, State, check_move
from hawker.model.rows import RunRow


@dataclass(frozen=True)
class At:
    """A position. `program`: what runs, or is suspended: "" for none, else the run or the program that it came from.
    `before`: the program of the version before runs while an update gets its image."""

    state: State
    program: str = ""
    flow: str = ""
    steps: tuple[str, ...] = ()
    next: int = 0
    ending: str = ""
    had: str = ""
    beside: bool = False
    prepared: bool = False

    def run(self) -> RunRow | None:
        if not self.flow:
            return None
        args: dict[str, Any] = {"instance": self.had} | ({RUNS_ON: {}} if self.beside else {})
        return RunRow(
            id="run",
            flow=self.flow,
            flow_version=1,
            resource="m",
            exclusive=True,
            args=args,
            steps=[*self.steps, "settle"],
            cause="a test",
            source="user",
            trace="",
            started_at_ms=0,
            updated_at_ms=0,
            next=self.next,
            ending=self.ending,  # type: ignore[arg-type]
            outputs={"prepare": True} if self.prepared else {},
        )


def moved(at: At, path: tuple[State, ...]) -> At:
    state = at.state
    for new in path:
        state = check_move("m", state, new)
    return replace(at, state=state)


def begun(at: At, plan: Plan) -> At:
    at = moved(at, plan.path)
    beside = plan.flow == "machine.update" and plan.steps[:2] == ("prepare", "stop")
    at = replace(at, flow=plan.flow, steps=plan.steps, next=0, ending="", had=at.program, beside=beside, prepared=False)
    return settled(at) if not plan.steps else at


def settled(at: At, kept: bool = False) -> At:
    run = at.run()
    assert run is not None
    launched = at.program == "new"
    rest = endings.rest(run, at.state, launched=launched, kept=kept)
    return At(moved(at, rest.path).state, "old" if at.program and not rest.program_gone else "")


def happens(at: At, of_host: bool) -> Iterator[tuple[str, At]]:
    """All that may happen next, by itself."""
    run = at.run()
    if run is None:
        if at.program:
            for again, auto_destroy in product((False, True), repeat=2):
                after = begun(
                    replace(at, program=""), endings.ended(again=again, auto_destroy=auto_destroy, of_host=of_host)
                )
                yield f"ends, {again=}, {auto_destroy=}", replace(after, had="old" if after.flow else "")
        return
    if at.ending:
        undone = endings.undo(run, launched=at.program == "new")
        if Undo.keep_program in undone:
            yield "kept", settled(at, kept=True)
            undone = undone[1:]
        yield f"undone: {undone}", settled(at)
        return
    step = run.steps[at.next]
    after = moved(at, endings.stepped(step, at.state))
    program = {"launch": "new", "stop": ""}.get(step, at.program)
    after = replace(after, program=program, next=at.next + 1, prepared=at.prepared or step == "prepare")
    yield f"{step} is done", settled(after) if after.next == len(at.steps) else after
    for ending in ("failed", "cancelled"):
        yield f"{step} {ending}", replace(at, next=len(at.steps), ending=ending)


def wished(at: At, wish: Wish, of_host: bool, skip_launch: bool) -> At | None:
    """What a wish makes of a position at once; None where it begins nothing."""
    run = at.run()
    way = MEETS[wish][phase_of(run)] if not at.ending else Way.wait
    gives_way = Phase.free
    if way is Way.replace:
        gives_way = phase_of(run)
        at = At(at.state, at.program)
    elif way is Way.cancel:
        return replace(at, next=len(at.steps), ending="cancelled")
    elif way is not Way.begin:
        return None
    try:
        if wish is Wish.update:
            found = found_by_update("m", at.state, gives_way)
            return begun(at, update(found, at.state, of_host=of_host, skip_launch=skip_launch))
        plan_ = plan(wish, "m", at.state, of_host=of_host)
    except PreconditionFailed:
        return None
    return begun(at, plan_) if plan_ else None


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

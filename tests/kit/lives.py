"""Positions in the life of a machine: what may happen next, and what a wish makes of it (`hawker.core.life`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hawker.core.life import endings
from hawker.core.life.endings import Undo
from hawker.core.life.phases import Phase, phase_of
from hawker.core.life.wishes import MEETS, Plan, Way, Wish, found_by_update, plan, update
from hawker.errors import PreconditionFailed
from hawker.model.machine import State, check_move
from hawker.model.rows import RunRow


@dataclass(frozen=True)
class At:
    """A position. `program`: what runs, or is suspended: "" for none, else the run or the program that it came from."""

    state: State
    program: str = ""
    flow: str = ""
    steps: tuple[str, ...] = ()
    next: int = 0
    ending: str = ""
    had: str = ""
    prepared: bool = False

    def run(self) -> RunRow | None:
        if not self.flow:
            return None
        args: dict[str, Any] = {"instance": self.had}
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
    at = replace(at, flow=plan.flow, steps=plan.steps, next=0, ending="", had=at.program, prepared=False)
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

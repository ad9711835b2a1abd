"""The tables of a machine's life as a page; `docs/machine-states.md` holds it, and a test compares the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hawker.core.life.endings import CANCELLED, DESTROYED, DONE, FAILED, FOUND, RESTARTED, STOPPED, UNDOES
from hawker.core.life.phases import Phase
from hawker.core.life.wishes import BEGINS, MEETS, UPDATES, Plan, Wish
from hawker.model.machine import State

_RUNS = [phase for phase in Phase if phase is not Phase.free]
_ENDED = {"started again": RESTARTED, "stopped": STOPPED, "destroyed": DESTROYED}


def page() -> str:
    parts = (
        ("What a request begins", ["request", "of a machine that is", "steps", "states on the way", "then"], _begins()),
        (
            "What a request does about a run that is under way",
            ["request", *(str(phase) for phase in _RUNS)],
            ([str(wish), *(MEETS[wish][phase].value for phase in _RUNS)] for wish in Wish),
        ),
        ("What an update begins", ["it finds its machine", "launches", "steps"], _updates()),
        (
            "What is done when a program ends by itself",
            ["the machine is to be", "steps", "states on the way"],
            ([meant, *_of(plan)] for meant, plan in _ENDED.items()),
        ),
        (
            "What a worker that starts does about a machine that has a program by its row",
            ["the machine is", "the program is gone", "it runs", "it is frozen"],
            ([str(state), *(one.value for one in FOUND[state])] for state in FOUND),
        ),
        ("What is undone when a run ends early", ["run", "undone, in this order"], _undone()),
        ("Where a run leaves its machine", ["run", "states"], _done()),
        (
            "Where a run leaves its machine that ended early",
            ["found in", "failed", "cancelled"],
            ([str(state), _listed(FAILED[state]), _listed(CANCELLED[state])] for state in FAILED),
        ),
    )
    return "\n\n".join(f"## {title}\n\n{_table(head, rows)}" for title, head, rows in parts)


def _begins() -> Iterable[Sequence[str]]:
    for wish, table in BEGINS.items():
        for plan in dict.fromkeys(table.values()):
            states = _listed([state for state in State if state in table and table[state] == plan])
            yield [str(wish), states, *(_of(plan) if plan else ("nothing", "")), (plan and plan.desired) or ""]


def _updates() -> Iterable[Sequence[str]]:
    for found, (launching, resting) in UPDATES.items():
        for launches, plan in {"yes": launching, "no": resting}.items():
            yield [str(found), launches, _listed(plan.steps)]


def _undone() -> Iterable[Sequence[str]]:
    return ([flow, _listed(undone)] for flow, undone in UNDOES.items())


def _done() -> Iterable[Sequence[str]]:
    return ([flow, _listed(rest.path)] for flow, rest in DONE.items() if rest.path)


def _of(plan: Plan) -> tuple[str, str]:
    return _listed(plan.steps), _listed(plan.path)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(str, words)) or "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

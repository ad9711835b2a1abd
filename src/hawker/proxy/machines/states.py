"""What the rows of a machine tell of its way to running and back, in the order in which they come."""

from __future__ import annotations

from hawker.model.door import Awake
from hawker.model.machine import State

_RUNNING = State.started.value

_TOWARDS_RUNNING = {
    **dict.fromkeys(("stopping", "suspending"), 1),
    **dict.fromkeys(("stopped", "suspended", "created"), 2),
    **dict.fromkeys(("starting", "restarting", "updating"), 3),
}


def on_the_way(before: str, state: str, to: str) -> bool:
    """Whether a row of this state, after one of the state `before`, may come ahead of the row that tells what is
    believed. Rows come in order, though this proxy does not see each of them: a row that leads back tells of something
    later."""
    if to == _RUNNING:
        return _TOWARDS_RUNNING.get(before, 0) < _TOWARDS_RUNNING.get(state, 0)
    return state == _RUNNING


def leads_back(before: str, state: str) -> bool:
    """Whether a machine ran when it came from one state into the other, or came to run in between."""
    return before == _RUNNING or _TOWARDS_RUNNING.get(state, 0) < _TOWARDS_RUNNING.get(before, 0)


def runs_on(told: Awake, before: Awake) -> bool:
    """Whether a worker that is asked again tells of the very start that it told of before. If so, a row that came
    between the two and led back tells of something earlier: rows come after the worker's own word."""
    return told.before == State.started and bool(told.instance) and told.instance == before.instance

"""What a flow is made of: named steps, and what a step may do.

A step is one of three kinds of code: an outside effect named by its key (`act`), then one commit that holds its
event and its domain writes (`Done.commit`); or a commit alone (`commit`), which the runner joins to the commit
before it. The final step always runs, also after a failure or a cancel, and puts right what the others left: its
`act` runs only then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hawker.model.rows import RunRow
from hawker.store.tx import Tx

Commit = Callable[[Tx, RunRow], Any]
"""Domain writes of a step. The record is open; the value returned is the step's output."""


@dataclass(frozen=True, slots=True)
class Done:
    """An act succeeded. `commit` writes what follows from it, in the same transaction as the step's event. That
    transaction is not begun before `not_before_s`, by the event loop's clock."""

    commit: Commit | None = None
    not_before_s: float = 0.0


Act = Callable[["StepContext"], Awaitable[Done]]
Ahead = Callable[[Tx, RunRow], None]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What an act is told. `key` names its outside effect, the same in every attempt and after every crash."""

    run: RunRow
    step: str
    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Step:
    """One named step. `attempts` bounds how often an unexpected error is retried before the run is parked.

    `ahead`, of a first step, is called inside the change that begins the run, after its writes: what it does beside the
    commit must leave nothing when that does not come to be.
    """

    name: str
    act: Act | None = None
    commit: Commit | None = None
    attempts: int = 8
    ahead: Ahead | None = None


@dataclass(frozen=True)
class Flow:
    """A named kind of work and every step it may consist of; a run records which of them it takes, in which order.

    `version` changes when a step changes its meaning. Steps of old versions stay for one release, so that runs that
    began before an upgrade can end.
    """

    name: str
    version: int
    final: Step
    steps: Sequence[Step] = ()
    by_name: dict[str, Step] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {s.name: s for s in (*self.steps, self.final)})

    def needs_act(self, run: RunRow) -> bool:
        """Whether the step that is due reaches outside; if not, it is only a commit."""
        step = self.by_name[run.steps[run.next]]
        if step is self.final and not run.ending:
            return False
        return step.act is not None

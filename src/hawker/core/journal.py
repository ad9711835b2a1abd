"""The life of a run as pure functions: from its row and what just happened to its next row and what to do.

A run is a recorded list of named steps, the *final* one last. Steps run in order; each ends with one commit that
holds both its event and its domain writes. After an abort or a cancel the steps left are skipped and the final step
runs, told why. A step that asks for a retry runs again after a delay; one that is broken parks the run until a
person looks. A step this program does not know parks the run too: skipping it silently would drop a real action
after a downgrade.

`hawker.worker.flows.runner` performs what `decide` says and stores what the other functions return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from hawker.core import deadlines
from hawker.model.rows import RunRow

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from random import Random

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0


class Act(msgspec.Struct, frozen=True):
    """Run this step now. `key` names its outside effect: the same in every attempt and after every crash."""

    step: str
    key: str
    attempt: int


class Wait(msgspec.Struct, frozen=True):
    """Wait for so long, then go on with the run as `waited` gives it."""

    left_ms: int


class Park(msgspec.Struct, frozen=True):
    """Store the run as parked and raise an alarm: a person must look."""

    why: str


class Finished(msgspec.Struct, frozen=True):
    """The run has ended or is parked; there is nothing to do."""


def decide(run: RunRow, now_ms: int, known: AbstractSet[str]) -> Act | Wait | Park | Finished:
    """What to do about a run. `known` are the steps this program has code for."""
    if run.status != "active":
        return Finished()
    step = run.steps[run.next]
    if step not in known:
        return Park(f"step {step} of {run.flow} version {run.flow_version} is not known to this program")
    if left_ms := deadlines.left_ms(run.not_before_ms, run.not_before_ms - run.updated_at_ms, now_ms):
        return Wait(left_ms)
    return Act(step, effect_key(run.id, step), run.attempt)


def waited(run: RunRow) -> RunRow:
    """The row whose next step may begin now, whatever the clock says."""
    return replace(run, not_before_ms=0)


def effect_key(run_id: str, step: str) -> str:
    """The name of a step's outside effect: `run/step`."""
    return f"{run_id}/{step}"


def completed(run: RunRow, output: Any, now_ms: int) -> RunRow:
    """The step that was due is done. After the last one the run has ended, well or as an earlier error decided.

    `error` is cleared with it, unless it says why the run ends early.
    """
    step = run.steps[run.next]
    last = run.next == len(run.steps) - 1
    return replace(
        run,
        next=run.next + 1,
        attempt=0,
        not_before_ms=0,
        outputs=run.outputs if output is None else {**run.outputs, step: output},
        status=(run.ending or "done") if last else "active",
        error=run.error if run.ending else "",
        updated_at_ms=now_ms,
    )


def retried(run: RunRow, why: str, after_s: float | None, now_ms: int, rng: Random) -> RunRow:
    """The step asks for another try. Without `after_s`: exponential from 0.1 s to 5 s, spread by half either way.

    In the final step after an abort or a cancel, `error` stays what ended the run: the step reads it there.
    """
    if after_s is None:
        after_s = min(RETRY_MOST_S, RETRY_FIRST_S * 2.0 ** min(run.attempt, 16)) * rng.uniform(0.5, 1.5)
    return replace(
        run,
        attempt=run.attempt + 1,
        not_before_ms=now_ms + int(after_s * 1000),
        error=run.error if run.ending else why,
        updated_at_ms=now_ms,
    )


def worth_recording(before: RunRow, after: RunRow) -> bool:
    """Whether a retry goes into the log: the first one, one with a changed text, and those at powers of two do, so that
    a stuck run cannot flood it."""
    n = after.attempt
    return before.error != after.error or n & (n - 1) == 0


def aborted(run: RunRow, why: str, now_ms: int) -> RunRow:
    """A step gave up: go to the final step. If that was the final step, no step is left to undo it, so park the run."""
    if _ended(run):
        return run
    return _to_final(run, why, "failed", now_ms)


def cancelled(run: RunRow, why: str, now_ms: int) -> RunRow:
    """Someone asked for the run to end. A run already in its final step is left to finish it, an ended one stays.

    A parked run stays parked: its final step runs once it is unparked.
    """
    if _ended(run) or run.next == len(run.steps) - 1:
        return run
    return _to_final(run, why, "cancelled", now_ms)


def parked(run: RunRow, why: str, now_ms: int) -> RunRow:
    """Park the run for a person. The earlier error stays in `error`, in front of the reason for parking."""
    if run.ending and run.error not in why:
        why = f"{run.error}; {why}"
    return replace(run, status="parked", error=why, updated_at_ms=now_ms)


def unparked(run: RunRow, now_ms: int) -> RunRow:
    """A person has looked: the step that was due is tried again from its beginning."""
    return replace(run, status="active", attempt=0, not_before_ms=0, updated_at_ms=now_ms)


def check(run: RunRow) -> None:
    """Raises when a row cannot have come from these functions."""
    if not run.steps or len(set(run.steps)) != len(run.steps):
        raise AssertionError(f"run {run.id}: steps {run.steps} are empty or repeat")
    ended = _ended(run)
    if ended != (run.next == len(run.steps)):
        raise AssertionError(f"run {run.id}: {run.status} at step {run.next} of {len(run.steps)}")
    if ended and run.status != (run.ending or "done"):
        raise AssertionError(f"run {run.id}: ended {run.status}, decided {run.ending or 'done'}")
    if run.ending and run.next < len(run.steps) - 1:
        raise AssertionError(f"run {run.id}: is to end {run.ending}, but is at step {run.steps[run.next]}")


def _ended(run: RunRow) -> bool:
    return run.status in ("done", "failed", "cancelled")


def _to_final(run: RunRow, why: str, ending: Literal["failed", "cancelled"], now_ms: int) -> RunRow:
    final = len(run.steps) - 1
    if run.next == final:
        return parked(run, why, now_ms)
    return replace(run, next=final, attempt=0, not_before_ms=0, error=why, ending=ending, updated_at_ms=now_ms)

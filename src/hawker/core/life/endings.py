"""What follows when a run ends, when a program ends by itself, and when a worker finds its machines again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from hawker.core.life.phases import fetches_beside
from hawker.core.life.wishes import LAUNCHING, Plan
from hawker.model.machine import State
from hawker.model.rows import Desired, RunRow

# --- a step that is done ----------------------------------------------------------------------------------------------

_STEPS: Mapping[str, tuple[State, ...]] = {
    "launch": (State.starting, State.started),
    "resume": (State.started,),
    "suspend": (State.suspended,),
}


def stepped(step: str, state: State) -> tuple[State, ...]:
    """The states that a machine in `state` is taken through with a step that is done. Most steps move nothing."""
    path = _STEPS.get(step, ())
    return path[1:] if path[:1] == (state,) else path


# --- a run that ended early -------------------------------------------------------------------------------------------


class Undo(StrEnum):
    """One thing that is put right after a run was aborted or cancelled. Each may be repeated."""

    resume = "resume"
    """The program runs again, frozen or not."""
    resize_back = "resize back"
    """The program has the room that it had."""
    keep_program = "keep the program"
    """Nothing was stopped yet: where the program of the version before still runs, the machine is that again, and the
    rest of the list is left out."""
    remove_new = "remove the new program"
    """The program that the run started, or half started, is removed."""
    remove_old = "remove the old program"
    """The program that the run began with is removed."""
    purge = "purge"
    """Everything that the machine has on this host is removed."""


_REMOVE = (Undo.remove_new, Undo.remove_old)
UNDOES: Mapping[str, tuple[Undo, ...]] = {
    "machine.create": _REMOVE,
    "machine.start": _REMOVE,
    "machine.stop": (Undo.remove_old,),
    "machine.restart": _REMOVE,
    "machine.update": (Undo.keep_program, *_REMOVE),
    "machine.suspend": (Undo.resume,),
    "machine.resize": (Undo.resize_back,),
    "machine.destroy": (Undo.remove_old, Undo.purge),
    "machine.exit": (*_REMOVE, Undo.purge),
}
"""By flow. What a run cannot have done is left out of its list (`undo`)."""


def undo(run: RunRow, *, launched: bool) -> tuple[Undo, ...]:
    """What is put right after `run` ended early. `launched`: its own program runs, and only what came after that was
    given up: that program stays."""
    if launched:
        return ()
    cannot = set()
    if not fetches_beside(run.steps) or "prepare" in run.outputs:
        cannot.add(Undo.keep_program)
    if "launch" not in run.steps:
        cannot.add(Undo.remove_new)
    if not run.args.get("instance"):
        cannot |= {Undo.remove_old, Undo.resume, Undo.resize_back}
    if "purge" not in run.steps:
        cannot.add(Undo.purge)
    return tuple(one for one in UNDOES[run.flow] if one not in cannot)


# --- where a machine rests --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rest:
    """What the end of a run writes: the states that the machine is taken through; what it is meant to be from now on
    (None leaves that); and the event that says so ("" for none), whose `status` is the state then unless given."""

    path: tuple[State, ...] = ()
    desired: Desired | None = None
    event: str = ""
    status: str = ""
    early: bool = False
    """The run did not do what it was begun for; the event says why."""
    program_gone: bool = False
    """It has no program any more."""
    resized: bool = False
    """It holds only what its configuration says."""
    one_version: bool = False
    """The worker gives back what only the other version of an update needed."""


_GONE = Rest((State.destroyed,), "destroyed", "destroy", "destroyed", program_gone=True)

DONE: Mapping[str, Rest] = {
    "machine.stop": Rest((State.stopped,), None, "stop", "stopped"),
    "machine.resize": Rest((), None, "resize", resized=True),
    "machine.update": Rest(resized=True, one_version=True),
}
"""After a run that did all it was begun for, by flow. Most leave the machine where their last step brought it."""

_EARLY = Rest(early=True, resized=True)

FAILED: Mapping[State, tuple[State, ...]] = {
    State.created: (State.starting, State.failed),
    State.starting: (State.failed,),
    State.stopping: (State.failed,),
    State.restarting: (State.failed,),
    State.updating: (State.failed,),
}
CANCELLED: Mapping[State, tuple[State, ...]] = {
    State.created: (State.stopped,),
    State.starting: (State.stopping, State.stopped),
    State.stopping: (State.stopped,),
    State.restarting: (State.failed,),
    State.updating: (State.stopped,),
}
"""After a run that ended early, by the state it left the machine in. From any other the machine does not move."""


def rest(run: RunRow, state: State, *, launched: bool, kept: bool = False) -> Rest:
    """What the end of `run` writes. `launched` as for `undo`. `kept`: the program of the version before runs on."""
    if "purge" in run.steps:
        return _GONE  # also after a failure: what is on its way out goes all the way
    if run.ending and not launched:
        return _early(run, state, kept)
    done = DONE.get(run.flow, Rest())
    rests = state is State.updating or (run.flow == "machine.create" and "launch" not in run.steps)
    return replace(done, path=(State.stopped,)) if rests else done


def _early(run: RunRow, state: State, kept: bool) -> Rest:
    match run.flow:
        case "machine.update" if kept:
            return replace(
                _EARLY, path=(State.started,), desired="started", event="update", status="failed", one_version=True
            )
        case "machine.resize":
            return replace(_EARLY, event="resize", status="failed")
        case "machine.suspend":
            return replace(_EARLY, path=(State.started,), desired="started", event="suspend", status="failed")
    path = (FAILED if run.ending == "failed" else CANCELLED).get(state, ())
    return replace(
        _EARLY, path=path, desired="stopped", event="start", program_gone=True, one_version=run.flow == "machine.update"
    )


# --- a program that ended by itself -----------------------------------------------------------------------------------

HAS_PROGRAM = frozenset({State.started, State.suspended})
"""Where a machine rests that has a program. Its end is news there; in other states the run in the way expects it."""

STOPPED = Plan("machine.exit", ("clear",), (State.stopped,), "stopped", "exit", "stopped")
RESTARTED = Plan("machine.exit", ("clear", "backoff", *LAUNCHING), (State.starting,), "started", "exit", "stopped")
DESTROYED = Plan("machine.exit", ("purge",), (State.destroying,), "destroyed", "exit", "stopped")


def ended(*, again: bool, auto_destroy: bool, of_host: bool) -> Plan:
    """What is begun when a program ended that nobody stopped. `again`: the restart policy says so (`core.restart`)."""
    found = RESTARTED if again else DESTROYED if auto_destroy else STOPPED
    return found.of_host() if of_host else found


# --- a worker that begins ---------------------------------------------------------------------------------------------


class Correction(StrEnum):
    """What is done about a machine that has a program by its row, when its worker begins."""

    nothing = "nothing"
    ended = "its program has ended"
    freeze = "freeze its program"
    thaw = "thaw its program"


FOUND: Mapping[State, tuple[Correction, Correction, Correction]] = {
    State.started: (Correction.ended, Correction.nothing, Correction.thaw),
    State.suspended: (Correction.ended, Correction.freeze, Correction.nothing),
    State.suspending: (Correction.ended, Correction.nothing, Correction.nothing),
}
"""What to do by the state of a machine whose row names a program, where that program is gone, runs, or is frozen. In
another state a run holds the machine, and finds out by itself."""


def found(state: State, *, there: bool, frozen: bool) -> Correction:
    """`there`: its driver has the program, which runs, `frozen` or not, or has ended (the driver tells that itself)."""
    gone, runs, is_frozen = FOUND.get(state, (Correction.nothing,) * 3)
    return gone if not there else is_frozen if frozen else runs

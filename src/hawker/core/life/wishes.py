"""What may be wished of a machine, and what that does: a table for the run in the way, one for the machine's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from hawker.core.life.phases import Phase
from hawker.errors import PreconditionFailed
from hawker.model.machine import State
from hawker.model.rows import Desired


class Wish(StrEnum):
    start = "start"
    wake = "wake"
    """`start` for a request that waits at a proxy."""
    stop = "stop"
    rest = "rest"
    """`stop` of an idle machine, for a proxy: it never disturbs a run."""
    restart = "restart"
    suspend = "suspend"
    rest_suspended = "rest_suspended"
    """`suspend` of an idle machine, for a proxy."""
    resize = "resize"
    update = "update"
    destroy = "destroy"
    force_destroy = "force_destroy"


class Way(Enum):
    """What a wish does about the run that holds its machine."""

    begin = "begin"
    """There is none: the machine's state decides."""
    join = "join"
    """The run does what is wished."""
    replace = "replace"
    """The run only waits: it ends, and the wish's run begins, in one commit. A wish that is refused leaves it."""
    cancel = "cancel"
    """The run is cancelled, and the wish looks again when it has ended."""
    wait = "wait"
    """The wish looks again when the run has gone on."""
    refuse = "refuse"
    """The answer is `busy`."""


_NEVER = dict.fromkeys(Phase, Way.refuse) | {Phase.free: Way.begin}
_PATIENT = dict.fromkeys(Phase, Way.wait) | {Phase.free: Way.begin, Phase.parked: Way.refuse}
_NO_FETCHING = dict.fromkeys((Phase.fetching, Phase.fetching_beside, Phase.fetching_to_rest), Way.refuse)
_ENDS_WAITING = dict.fromkeys(
    (Phase.fetching, Phase.fetching_beside, Phase.fetching_to_rest, Phase.backing_off), Way.cancel
)
_TAKES_OVER = dict.fromkeys(
    (Phase.fetching, Phase.fetching_beside, Phase.fetching_to_rest, Phase.backing_off), Way.replace
)

MEETS: Mapping[Wish, Mapping[Phase, Way]] = {
    Wish.start: _PATIENT
    | _NO_FETCHING
    | {Phase.fetching: Way.join, Phase.fetching_to_rest: Way.replace, Phase.backing_off: Way.replace},
    Wish.wake: _PATIENT | dict.fromkeys((Phase.starting, Phase.fetching, Phase.clearing, Phase.backing_off), Way.join),
    Wish.stop: _PATIENT | _ENDS_WAITING,
    Wish.rest: _NEVER,
    Wish.restart: _PATIENT | _NO_FETCHING | {Phase.fetching: Way.join, Phase.backing_off: Way.replace},
    Wish.suspend: _PATIENT | _NO_FETCHING,
    Wish.rest_suspended: _NEVER,
    Wish.resize: _PATIENT | _NO_FETCHING,
    Wish.update: _PATIENT | _TAKES_OVER,
    Wish.destroy: _PATIENT | _ENDS_WAITING,
    Wish.force_destroy: dict.fromkeys(Phase, Way.cancel) | {Phase.free: Way.begin},
}
"""What a wish does that meets a run in a phase. Mostly an image is here and a fetch is over at once: one that would be
refused, or cancels, for a fetch alone gives it half a second first."""


@dataclass(frozen=True)
class Plan:
    """A run to begin: its flow and steps; the states that the machine is taken through in the same commit; what it is
    meant to be from now on (None leaves that); and the event that says so, whose `status` is the state then unless it
    is given."""

    flow: str
    steps: tuple[str, ...]
    path: tuple[State, ...]
    desired: Desired | None
    event: str
    status: str = ""
    forgets_restarts: bool = False
    """The next failure of its program counts as the first."""

    @property
    def stops(self) -> bool:
        """Whether it ends the program that the machine has."""
        return "stop" in self.steps

    def of_host(self) -> Plan:
        """The same for a machine whose files are the host's: there is no image to prepare."""
        return replace(self, steps=tuple(step for step in self.steps if step != "prepare"))


LAUNCHING = ("prepare", "launch")

_START = Plan("machine.start", LAUNCHING, (State.starting,), "started", "start", "starting", forgets_restarts=True)
_RESUME = replace(_START, steps=("resume",))
_STOP = Plan("machine.stop", ("stop", "clear"), (State.stopping,), "stopped", "stop", "stopping")
_SUSPEND = Plan("machine.suspend", ("suspend",), (State.suspending,), "suspended", "suspend", "suspending")
_RESTART = Plan(
    "machine.restart",
    ("stop", "clear", *LAUNCHING),
    (State.restarting,),
    "started",
    "restart",
    forgets_restarts=True,
)
_RESIZE = Plan("machine.resize", ("resize",), (), None, "resize", "resizing")
_DESTROY = Plan("machine.destroy", ("stop", "purge"), (State.destroying,), "destroyed", "destroy", "destroying")

_AT_REST = (State.created, State.stopped, State.failed)

_STARTS: dict[State, Plan | None] = {
    **dict.fromkeys(_AT_REST, _START),
    State.starting: _START,  # it backed off, and no run holds it any more
    State.suspended: _RESUME,
    State.started: None,
}
_RESTS: dict[State, Plan | None] = {State.stopped: None, State.suspended: None, State.started: _STOP}
_DESTROYS: dict[State, Plan | None] = {
    **dict.fromkeys((*_AT_REST, State.suspended), _DESTROY),
    State.destroying: None,
    State.destroyed: None,
}

BEGINS: Mapping[Wish, Mapping[State, Plan | None]] = {
    Wish.start: _STARTS,
    Wish.wake: _STARTS,
    Wish.stop: {
        **dict.fromkeys((State.created, State.started, State.suspended, State.failed), _STOP),
        State.stopped: None,
    },
    Wish.rest: _RESTS,
    Wish.restart: {State.started: _RESTART, State.starting: replace(_RESTART, steps=LAUNCHING, path=())},
    Wish.suspend: {State.started: _SUSPEND, State.suspended: None},
    Wish.rest_suspended: {**_RESTS, State.started: _SUSPEND},
    Wish.resize: {State.started: _RESIZE, **dict.fromkeys(_AT_REST, replace(_RESIZE, steps=()))},
    Wish.destroy: _DESTROYS,
    Wish.force_destroy: dict.fromkeys(State, _DESTROY) | {State.destroying: None, State.destroyed: None},
}
"""What a wish begins of a machine that no run holds, by its state; None where the machine is so already. From a state
that is not here it is refused. An update depends on more: `update`."""

_HINTS = {Wish.destroy: "stop it first, or destroy it with force=true"}


def plan(wish: Wish, machine: str, state: State, *, of_host: bool) -> Plan | None:
    """What is begun of a machine that no run holds, None for nothing. Raises `PreconditionFailed` in a state from which
    the wish is refused."""
    allowed = BEGINS[wish]
    if state not in allowed:
        raise refusal(wish, machine, state)
    found = allowed[state]
    return found.of_host() if found and of_host else found


def refusal(wish: Wish, machine: str, state: State) -> PreconditionFailed:
    allowed = UPDATES_FROM if wish is Wish.update else BEGINS[wish]
    verb = {Wish.rest_suspended: "rest", Wish.force_destroy: "destroy", Wish.wake: "start"}.get(wish, wish.value)
    return PreconditionFailed(
        f"failed_precondition: unable to {verb} machine from current state: '{state}'",
        details={"machine": machine, "state": state, "allowed": [state for state in State if state in allowed]},
        hint=_HINTS.get(wish, ""),
    )


class Found(StrEnum):
    """How an update finds its machine."""

    running = "running"
    suspended = "suspended"
    at_rest = "at rest"
    waiting = "waiting to start"
    """It has no program, and the run that would start one gives way to the update."""
    updating = "updating"
    """The update before gives way to this one; the program of the version before that runs."""


UPDATES_FROM = frozenset({State.started, State.suspended, *_AT_REST})

_CHANGE = ("stop", "clear")
_UPDATE = Plan("machine.update", (), (State.updating,), "stopped", "update")
_AND_LAUNCH = replace(_UPDATE, desired="started", steps=("prepare", *_CHANGE, "launch"))

UPDATES: Mapping[Found, tuple[Plan, Plan]] = {
    Found.running: (_AND_LAUNCH, replace(_UPDATE, steps=_CHANGE)),
    Found.suspended: (replace(_UPDATE, steps=_CHANGE),) * 2,
    Found.at_rest: (replace(_UPDATE, path=(State.updating, State.stopped)),) * 2,
    Found.waiting: (
        replace(_AND_LAUNCH, steps=LAUNCHING, path=(), forgets_restarts=True),
        replace(_UPDATE, path=(), forgets_restarts=True),  # `TO_REST` is its path
    ),
    Found.updating: (replace(_AND_LAUNCH, path=()), replace(_UPDATE, steps=_CHANGE, path=())),
}
"""What an update begins, and what it begins with `skip_launch`. The new image is fetched while the old program runs."""

TO_REST: Mapping[State, tuple[State, ...]] = {
    State.created: (State.stopped,),
    State.starting: (State.stopping, State.stopped),
    State.restarting: (State.failed, State.updating),  # whose end is `stopped`
}
"""The states through which an update takes a machine that waits to start and that it shall not start."""


def found_by_update(machine: str, state: State, gives_way: Phase) -> Found:
    """`gives_way`: the phase of the run that the update replaces, or `free`. Raises `PreconditionFailed`."""
    if gives_way is Phase.fetching_beside:
        return Found.updating
    if gives_way in (Phase.fetching, Phase.backing_off):
        return Found.waiting
    if state is State.started:
        return Found.running
    if state is State.suspended:
        return Found.suspended
    if state not in _AT_REST:
        raise refusal(Wish.update, machine, state)
    return Found.at_rest


def update(found: Found, state: State, *, of_host: bool, skip_launch: bool, moves: bool = False) -> Plan:
    """`of_host`: the new version is. `moves`: another driver runs it, and the one before shall forget the machine."""
    begun = UPDATES[found][skip_launch]
    if found is Found.waiting and skip_launch:
        begun = replace(begun, path=TO_REST[state])
    if moves:
        begun = replace(begun, steps=(*begun.steps, "vacate"))
    return begun.of_host() if of_host else begun


def create(*, of_host: bool, skip_launch: bool) -> Plan:
    begun = Plan("machine.create", LAUNCHING, (), "started", "launch", "created")
    if skip_launch:
        begun = replace(begun, steps=LAUNCHING[:-1], desired="stopped")
    return begun.of_host() if of_host else begun

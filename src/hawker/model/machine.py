"""A machine's states and the table of legal moves between them.

The table is data: the code checks every move against it, the documentation's diagram is drawn from it, and the property
tests walk it. It follows the public API's state diagram; the edges that diagram leaves out are marked.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    created = "created"
    starting = "starting"
    started = "started"
    stopping = "stopping"
    stopped = "stopped"
    suspending = "suspending"
    suspended = "suspended"
    restarting = "restarting"
    updating = "updating"
    failed = "failed"
    destroying = "destroying"
    destroyed = "destroyed"


RESTING = frozenset({State.created, State.started, State.stopped, State.suspended, State.failed})
# Without created: such a machine is still being prepared, and starts or rests as stopped next.
SETTLED = (RESTING - {State.created}) | {State.destroyed}

MOVES: dict[State, frozenset[State]] = {
    State.created: frozenset(
        {State.starting, State.stopping, State.updating, State.destroying, State.stopped}  # stopped: skip_launch
    ),
    State.starting: frozenset(
        {
            State.started,
            State.failed,
            State.stopping,  # stopped or destroyed while it waits to be restarted
            State.destroying,
        }
    ),
    State.started: frozenset(
        {
            State.stopping,
            State.restarting,
            State.suspending,
            State.updating,
            State.destroying,
            State.stopped,  # the program ended and its restart policy says no
            State.failed,  # the program failed and its restarts are used up
            State.starting,  # the program ended and its restart policy says again
        }
    ),
    State.stopping: frozenset({State.stopped, State.failed, State.destroying}),
    State.stopped: frozenset({State.starting, State.updating, State.destroying}),
    State.suspending: frozenset({State.suspended, State.started, State.stopped, State.failed, State.destroying}),
    State.suspended: frozenset(
        {
            State.starting,
            State.stopping,
            State.updating,
            State.destroying,
            State.stopped,
            State.failed,
        }  # it died asleep
    ),
    State.restarting: frozenset({State.starting, State.failed, State.destroying}),
    State.updating: frozenset(
        {
            State.starting,
            State.started,  # as it was: the new image cannot be had
            State.stopped,
            State.created,
            State.failed,
            State.destroying,
        }
    ),
    State.failed: frozenset({State.starting, State.stopping, State.updating, State.destroying}),
    State.destroying: frozenset({State.destroyed}),
    State.destroyed: frozenset(),
}

HOLDS_ALL = frozenset(State) - {State.stopped, State.failed, State.destroyed}
"""States in which a machine holds its cpu and memory; in `stopped` and `failed` it holds disk and its place only, as it
does in `destroying` once its program is gone. While it is suspended it holds no cpu (`MachineRow.held`)."""

ENDS_ASLEEP = frozenset({State.suspended, State.stopping, State.destroying})
"""States in which a program that was suspended is still asleep: to end it takes no room."""


class IllegalMove(AssertionError):
    """A bug of ours: a flow asked for a move that is not in the table."""

    def __init__(self, machine: str, old: State, new: State) -> None:
        super().__init__(f"machine {machine}: {old} -> {new} is not a legal move")


def check_move(machine: str, old: State, new: State) -> State:
    """`new` when the table allows it. Staying where it is is always allowed (a step repeated after a crash)."""
    if new != old and new not in MOVES[old]:
        raise IllegalMove(machine, old, new)
    return new


def diagram() -> str:
    """The table as a Mermaid state diagram; `docs/machine-states.md` holds its output, and a test compares the two."""
    lines = ["stateDiagram-v2", "    [*] --> created"]
    lines += [f"    {old} --> {new}" for old in State for new in State if new in MOVES[old]]
    return "\n".join([*lines, "    destroyed --> [*]"])

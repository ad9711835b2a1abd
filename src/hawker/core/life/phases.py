"""The phase of the run that holds a machine: all that whoever wishes something of the machine has to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from hawker.model.rows import RunRow


class Phase(StrEnum):
    free = "free"
    """No run holds the machine."""
    starting = "starting"
    """Its program will be started, or resumed, and nothing keeps that from being soon."""
    fetching = "fetching"
    """It waits for the image of a program that is then started. No program runs."""
    fetching_beside = "fetching_beside"
    """An update waits for its image. The program of the version before runs."""
    fetching_to_rest = "fetching_to_rest"
    """It waits for an image, and rests when it is there."""
    clearing = "clearing"
    """It removes what a program left that ended. Then it backs off."""
    backing_off = "backing_off"
    """It waits to start the program again."""
    working = "working"
    """It does something else, which ends by itself."""
    parked = "parked"
    """A person has to look at it."""


FETCHES = frozenset({Phase.fetching, Phase.fetching_beside, Phase.fetching_to_rest})


def fetches_beside(steps: Sequence[str]) -> bool:
    """Whether a run with these steps fetches its image while the old program runs: then there is something to go back
    to."""
    return tuple(steps[:2]) == ("prepare", "stop")


def phase_of(run: RunRow | None) -> Phase:
    """The phase of the run that holds a machine; `free` for None."""
    if run is None:
        return Phase.free
    if run.status == "parked":
        return Phase.parked
    ahead = run.steps[run.next :]
    match ahead[0]:
        case "backoff":
            return Phase.backing_off
        case "prepare" if fetches_beside(run.steps):
            return Phase.fetching_beside
        case "prepare":
            return Phase.fetching if "launch" in ahead else Phase.fetching_to_rest
    if "backoff" in ahead:
        return Phase.clearing
    return Phase.starting if "launch" in ahead or "resume" in ahead else Phase.working


def keeps_program(run: RunRow) -> bool:
    """Whether the machine's program goes on as it is while the run is where it is."""
    return run.flow == "machine.resize" or phase_of(run) is Phase.fetching_beside

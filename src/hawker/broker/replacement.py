"""Replacement a machine whose worker does not answer: the same id, the next generation, on another worker.

Nothing does this by itself: a client asks for it with `replaces`. Every worker of the machine's region knows from the
catalog who has it; whoever has it must not answer. One order for each generation may be filled: it claims that
generation as a client's key is claimed (`broker.claims`). The first worker, once it is back, gives the machine up
(`worker.machine.generations`).
"""

from __future__ import annotations

from msgspec.structs import replace

from hawker.broker.fleet import Fleet, unreachable
from hawker.broker.orders import Wanted
from hawker.errors import Conflict, Invalid, NotFound, Unreachable
from hawker.model.market import LocateMachine, SeekMachine, Seen
from hawker.model.values import is_machine_id

LOOK_S = 2.0
"""A worker that is alive answers a look-up in a few milliseconds."""


class Replacement:
    """Turns an order that replaces a machine into one for that machine's next generation."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def resolve(self, wanted: Wanted, *, named: bool, placed: bool) -> Wanted:
        """`named` and `placed`: the client gave a name, a region; without, the machine keeps its own.

        Raises `NotFound` for a machine that nobody knows, `Conflict` for one whose worker answers, `Unreachable` when
        that cannot be found out.
        """
        machine = wanted.replaces
        if not is_machine_id(machine):
            raise Invalid("replaces", machine, "give a machine's id: 14 hexadecimal digits")
        seen = await self._seen(machine)
        if seen.app != wanted.order.app:
            raise NotFound(f"machine not found: {machine}")
        link = self._fleet.links.get(seen.worker)
        if link is None:  # the worker may be well: this broker has just started, or the catalog has just dropped it
            raise Unreachable(
                f"machine {machine} is on {seen.worker}, which this broker does not know", hint="try again in a while"
            )
        try:
            await link.send(LocateMachine(machine_id=machine), LOOK_S)
        except Unreachable:
            pass
        else:
            raise Conflict(
                f"machine {machine} is on {seen.worker}, which answers",
                hint=f"hawker machine destroy {machine}, then order another one",
                details={"worker": seen.worker, "generation": seen.generation},
            )
        generation = seen.generation + 1
        order = replace(
            wanted.order,
            machine=machine,
            generation=generation,
            name=wanted.order.name if named else seen.name,
            region=wanted.order.region if placed else seen.region,
        )
        key = f"generation {generation} of {machine}"
        return replace(wanted, order=order, key=key, claimant="", silent=seen.worker)

    async def _seen(self, machine: str) -> Seen:
        """The newest that any worker knows."""
        answers, errors = await self._fleet.ask_all(SeekMachine(machine_id=machine), LOOK_S)
        best = max(answers.values(), key=lambda seen: (seen.generation, seen.worker), default=Seen())
        if not best.worker:
            if silent := unreachable(errors):
                raise Unreachable(
                    f"no worker that answered knows machine {machine}, and {', '.join(silent)} did not answer",
                    hint="a machine is known to the workers of its region",
                )
            raise NotFound(f"machine not found: {machine}")
        return best

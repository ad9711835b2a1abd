"""What must hold of membership, checked while a world runs (S14) and after its faults have stopped (L5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hawker.core.swim import Settings, Status, Swim, View

if TYPE_CHECKING:
    from hawker.sim.membership import World

Rank = tuple[int, bool, int, Status]


class Broken(AssertionError):
    """An invariant does not hold."""


def rank(view: View) -> Rank:
    """What is believed of a name only ever rises in this order: a later life; `left` before all else of a life; a
    higher incarnation; at equal incarnations suspect beats alive, dead beats suspect."""
    return (view.member.born, view.status is Status.left, view.incarnation, view.status)


class Watch:
    """S14, after every event, at the member that it was for."""

    def __init__(self, nodes: Sequence[Swim]) -> None:
        self._nodes = nodes
        self._ranks: list[dict[str, Rank]] = [{} for _ in nodes]
        self._said: dict[tuple[str, int], int] = {}
        self._place = {node.me.name: n for n, node in enumerate(nodes)}

    def restarted(self, n: int) -> None:
        self._ranks[n] = {}

    def after(self, n: int) -> None:
        node = self._nodes[n]
        me = node.me
        self._said[me.name, me.born] = node.beliefs.incarnation
        own = node.members[me.name]
        expected = Status.left if node.beliefs.leaving else Status.alive
        if own.status is not expected or own.member != me:
            raise Broken(f"{me.name} believes itself {own.status.name}")

    def believed(self, n: int, name: str) -> None:
        """Member `n` changed what it believes of `name`."""
        view = self._nodes[n].members.get(name)
        if view is None:
            return
        here = rank(view)
        before = self._ranks[n].get(name)
        if before is not None and here < before:
            raise Broken(f"m{n} believed of {name} {before}, and now {here}")
        self._ranks[n][name] = here
        said = self._said.get((name, view.member.born), 0)
        if view.incarnation > said:
            raise Broken(f"m{n} believes {name} at incarnation {view.incarnation}; it never said more than {said}")


def check_settled(world: World) -> None:
    """L5: whoever runs is alive everywhere, in its present life; whoever does not is alive nowhere."""
    for n, node in enumerate(world.nodes):
        if not world.up[n]:
            continue
        for subject, other in enumerate(world.nodes):
            view = node.members.get(other.me.name)
            if world.up[subject] and not other.beliefs.leaving:
                if view is None or view.status is not Status.alive or view.member != other.me:
                    raise Broken(f"m{n} believes of m{subject}, which runs: {view}")
            elif view is not None and view.status.live:
                raise Broken(f"m{n} believes of m{subject}, which is gone: {view}")


def settles_in(settings: Settings, members: int) -> float:
    """Seconds after the last fault by which L5 must hold: a suspicion that nobody else confirms; before that a first
    miss, at worst with health at its lowest; after it gossip, or else two rounds of push-pull."""
    periods = settings.probe_interval * (1 + settings.health_max)
    gossip = settings.retransmits(members) * settings.gossip_interval
    return settings.suspicion_max(members) + 4 * periods + gossip + 4 * settings.push_pull_interval

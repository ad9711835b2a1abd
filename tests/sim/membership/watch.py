"""What must hold of membership at any moment: S14, checked after every event."""

from __future__ import annotations

from collections.abc import Sequence

from hawker.core.swim import Status, Swim, View

Rank = tuple[int, bool, int, Status]


class Broken(AssertionError):
    """An invariant does not hold."""


def rank(view: View) -> Rank:
    """What is believed of a name only ever rises in this order: a later life; `left` before all else of a life; a
    higher incarnation; at equal incarnations suspect beats alive, dead beats suspect."""
    return (view.member.born, view.status is Status.left, view.incarnation, view.status)


class Watch:
    """Looks after every event, at the member that it was for."""

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

"""Which workers requests are not sent to as long as others can take them, by what membership says. Pure."""

from __future__ import annotations

from collections.abc import Mapping

ALIVE = "alive"


def doubted(status: Mapping[str, str]) -> frozenset[str]:
    """Members that are suspected, dead, or have left, of all others' statuses by name. None of them where none is
    alive: then it is this node that hears nobody, and what it knows of them is worth nothing."""
    if ALIVE not in status.values():
        return frozenset()
    return frozenset(name for name, its in status.items() if its != ALIVE)

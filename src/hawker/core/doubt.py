"""Which workers get requests only if no other can take them, by what membership says."""

from __future__ import annotations

from collections.abc import Mapping

ALIVE = "alive"


def doubted(status: Mapping[str, str]) -> frozenset[str]:
    """The members that are suspected, dead, or have left; `status` has all other members by name. If none of them is
    alive, nobody is doubted: then this node itself hears nobody, and what it knows of them is worth nothing."""
    if ALIVE not in status.values():
        return frozenset()
    return frozenset(name for name, its in status.items() if its != ALIVE)

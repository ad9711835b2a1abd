"""Which workers are in doubt."""

from __future__ import annotations

from itertools import product

from hawker.core.doubt import doubted


def test_in_doubt_are_all_that_are_not_alive_unless_nobody_is() -> None:
    """A node that hears nobody knows nothing of them."""
    for each in product(["", "alive", "suspect", "dead", "left"], repeat=4):
        status = {name: its for name, its in zip("abcd", each, strict=True) if its}
        alive = {name for name, its in status.items() if its == "alive"}
        assert doubted(status) == (status.keys() - alive if alive else frozenset())

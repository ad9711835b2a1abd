"""Which workers are in doubt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.doubt import doubted


@given(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["alive", "suspect", "dead", "left"])))
def test_in_doubt_are_all_that_are_not_alive_unless_nobody_is(status: dict[str, str]) -> None:
    """A node that hears nobody knows nothing of them."""
    alive = {name for name, its in status.items() if its == "alive"}
    assert doubted(status) == (status.keys() - alive if alive else frozenset())

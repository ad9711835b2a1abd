"""How many connections are kept, of all and of one address."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.connection_limits import ConnectionLimits, shares


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "c"]))),
)
def test_never_more_than_the_limits_are_kept_and_none_is_refused_below_them(
    most: int, most_of_one: int, story: list[tuple[bool, str]]
) -> None:
    limits, kept = ConnectionLimits(most, most_of_one), Counter[str]()
    for comes, address in story:
        if comes:
            fits = kept.total() < most and kept[address] < most_of_one
            assert limits.enter(address) is fits
            kept[address] += fits
        elif kept[address]:
            limits.leave(address)
            kept[address] -= 1
        assert limits.kept == kept.total()


@given(st.integers(1024, 1 << 20))
def test_api_and_users_together_leave_descriptors_to_spare(descriptors: int) -> None:
    api, users = shares(descriptors)
    assert api >= 16
    assert users >= 16
    assert api + 2 * users <= descriptors - 256

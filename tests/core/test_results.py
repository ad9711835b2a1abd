"""Changes between two results of a query: who follows them holds the second result."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.results import Row, RowChange, apply, changes, numbered

cells = st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["a", "b"]))
results = st.lists(st.tuples(cells, cells, cells), max_size=8)


@given(st.lists(results, min_size=1, max_size=6))
def test_following_the_changes_gives_every_result_row_for_row(series: list[list[Row]]) -> None:
    held = numbered(series[0])
    unused = len(held) + 1
    for after in series[1:]:
        told = changes(held, after, unused)
        unused += sum(change.kind == "insert" for change in told)
        held = apply(held, told)
        assert Counter(held.values()) == Counter(after)
        assert len({change.row for change in told}) == len(told), "a row changes once"


@given(results)
def test_a_result_that_stays_the_same_has_no_changes_in_whatever_order_it_comes(rows: list[Row]) -> None:
    assert changes(numbered(rows), rows[::-1], len(rows) + 1) == []


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([("m1", "started")], [("m1", "stopped")], [RowChange("update", 1, ("m1", "stopped"))]),
        (
            [("w1", "m1", "started"), ("w1", "m2", "started")],
            [("w1", "m1", "started"), ("w1", "m3", "started")],
            [RowChange("delete", 2, ("w1", "m2", "started")), RowChange("insert", 3, ("w1", "m3", "started"))],
        ),
        (
            [("web", "m1", 1), ("web", "m2", 1)],
            [("web", "m1", 1), ("web", "m2", 2)],
            [RowChange("update", 2, ("web", "m2", 2))],
        ),
        ([(4,)], [(5,)], [RowChange("delete", 1, (4,)), RowChange("insert", 2, (5,))]),
        ([("a",), ("a",)], [("a",)], [RowChange("delete", 2, ("a",))]),
        ([], [("b",), ("a",), ("b",)], [RowChange("insert", n, (v,)) for n, v in ((1, "b"), (2, "a"), (3, "b"))]),
        (
            [("web", "m1", 1), ("web", "m2", 1)],
            [("web", "m1", 2)],
            [RowChange("delete", 2, ("web", "m2", 1)), RowChange("update", 1, ("web", "m1", 2))],
        ),
        (
            [("web", "m2", 1)],
            [("web", "m1", 2), ("web", "m2", 2)],
            [RowChange("insert", 2, ("web", "m1", 2)), RowChange("update", 1, ("web", "m2", 2))],
        ),
    ],
    ids=[
        "key first",
        "key of two columns",
        "key of two columns changed",
        "one column",
        "the same twice",
        "in their order",
        "told apart before",
        "told apart after",
    ],
)
def test_leading_columns_tell_which_row_it_is(before: list[Row], after: list[Row], told: list[RowChange]) -> None:
    assert changes(numbered(before), after, len(before) + 1) == told

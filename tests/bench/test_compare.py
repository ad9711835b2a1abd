"""The table of two commits: what is paired, what stands in it, and what is shown of rows that one side lacks."""

from __future__ import annotations

from typing import Any

from bench.compare import Rows, markdown, paired


def row(what: str, value: float, unit: str = "ms", **more: Any) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit, "aim": "", "note": "", **more}


def runs(what: str, *values: float) -> list[Rows]:
    return [[row(what, value)] for value in values]


def test_a_line_has_the_medians_of_both_and_the_ratios_of_the_turns() -> None:
    (line,) = paired(runs("restart", 100, 400, 200), runs("restart", 50, 100, 300))
    assert (line.before, line.today) == (200, 100)
    assert line.ratios == (0.5, 0.25, 1.5)
    assert "| restart | 200 ms | 100 ms | 0.50 (0.25-1.50) |  |" in markdown("abc", [line])


def test_rows_are_paired_by_their_names_whatever_their_order() -> None:
    before = [[row("a", 1), row("b", 2)]]
    today = [[row("b", 4), row("a", 3)]]
    assert [(line.what, line.before, line.today) for line in paired(before, today)] == [("b", 2, 4), ("a", 1, 3)]


def test_a_row_of_one_side_is_shown_as_not_there_on_the_other() -> None:
    lines = paired([[row("old", 1)]], [[row("new", 2)]])
    assert markdown("abc", lines).splitlines()[2:] == [
        "| new | not there | 2.00 ms |  |  |",
        "| old | 1.00 ms | not there |  |  |",
    ]


def test_a_side_that_cannot_be_measured_leaves_the_other_ones_figures() -> None:
    (line,) = paired([[], []], runs("restart", 5, 7))
    assert (line.before, line.today, line.ratios) == (None, 6, ())


def test_a_turn_without_the_row_gives_no_ratio_and_the_others_do() -> None:
    (line,) = paired([[row("a", 2)], [], [row("a", 4)]], runs("a", 1, 1, 1))
    assert line.ratios == (0.5, 0.25)


def test_a_value_of_zero_gives_no_ratio() -> None:
    (line,) = paired(runs("left behind", 0), runs("left behind", 3))
    assert line.ratios == ()


def test_the_floor_is_the_median_of_both_sides_where_the_benchmark_knows_it() -> None:
    before, today = [[row("order", 9, floor=1.0)]], [[row("order", 8, floor=3.0)]]
    (line,) = paired(before, today)
    assert markdown("abc", [line]).splitlines()[-1] == "| order | 9.00 ms | 8.00 ms | 0.89 | 2.00 ms |"

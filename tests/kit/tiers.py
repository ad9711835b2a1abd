"""Which tests a run has: those of each change, all that there are (`--full`), or a part of what that adds (`--slice`).

A test marked `full` is left out of the run of a change. A property (a test that Hypothesis draws cases for) is in both:
a change sees the same few cases each time, so that a run is red by nothing but the change; the full run draws more, and
new ones. A slice has the tests marked `full` and the properties that its number falls on: all slices together are what
`--full` adds. Hypothesis draws by the slice's number there, so the same slice finds the same again.
"""

from __future__ import annotations

import argparse
from typing import Any

import hypothesis
import pytest
from _pytest.mark import ParameterSet

FEW = 25
MANY = 300


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what is marked `full`, and more cases of each property")
    parser.addoption("--slice", type=_slice, metavar="K/N", help="the K-th of N parts of what --full adds, and no more")


def configure(config: pytest.Config) -> None:
    """Before any test is imported: a property takes what it does not say itself from the profile loaded then."""
    part: tuple[int, int] | None = config.getoption("--slice")
    full = has_more(config)
    # No deadline per example: a busy machine is not a failure. `print_blob`: a failure prints how to run it again.
    hypothesis.settings.register_profile(
        "hawker", deadline=None, print_blob=True, max_examples=MANY if full else FEW, derandomize=not full
    )
    hypothesis.settings.load_profile("hawker")
    if part is not None:
        config.option.hypothesis_seed = str(part[0])


def has_more(config: pytest.Config) -> bool:
    """Whether the run has what a change does not."""
    return bool(config.getoption("--full") or config.getoption("--slice"))


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out of `items` what the run does not have."""
    if part := config.getoption("--slice"):
        kept = [item for item in items if _is_full(item) or _is_property(item)][part[0] - 1 :: part[1]]
    elif config.getoption("--full"):
        return
    else:
        kept = [item for item in items if not _is_full(item)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _is_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def _is_property(item: pytest.Item) -> bool:
    return hypothesis.is_hypothesis_test(getattr(item, "obj", None))


def _slice(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"a slice is K/N with K from 1 to N, not {text!r}")
    return int(number), int(count)


def full(*values: Any) -> list[ParameterSet]:
    """Parameters that are not for each change: `@pytest.mark.parametrize("seed", [1, 2, *full(3, 4)])`. A tuple stands
    for several of them."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full) for value in values
    ]


def costly(few: int) -> int:
    """`max_examples` of a property whose cases take long: `few` for each change, and more of them in the full run."""
    return 8 * few if hypothesis.settings().max_examples > FEW else few

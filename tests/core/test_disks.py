"""How fast a machine may read and write, by its size."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.disks import MIB, DiskSpeed, disk_speed
from hawker.model.guest import Guest, preset

SIZES = [f"shared-cpu-{n}x" for n in (1, 2, 4, 6, 8)] + [
    f"performance-{n}x" for n in (1, 2, 4, 6, 8, 10, 12, 14, 16, 32, 64, 128)
]


@pytest.mark.parametrize(
    ("size", "operations", "mib"),
    [
        ("shared-cpu-1x", 4_000, 16),
        ("shared-cpu-2x", 4_000, 16),
        ("shared-cpu-4x", 8_000, 32),
        ("shared-cpu-8x", 8_000, 32),
        ("performance-1x", 12_000, 48),
        ("performance-2x", 16_000, 64),
        ("performance-4x", 16_000, 64),
        ("performance-8x", 32_000, 128),
        ("performance-16x", 32_000, 128),
    ],
)
def test_the_sizes_that_upstream_documents_have_what_it_says(size: str, operations: int, mib: int) -> None:
    assert disk_speed(preset(size)) == DiskSpeed(operations=operations, bytes=mib * MIB)


def test_a_size_between_two_documented_ones_has_what_the_smaller_one_has() -> None:
    assert disk_speed(preset("shared-cpu-6x")) == disk_speed(preset("shared-cpu-4x"))
    assert disk_speed(preset("performance-6x")) == disk_speed(preset("performance-4x"))
    assert disk_speed(preset("performance-128x")) == disk_speed(preset("performance-16x"))


@given(st.sampled_from(SIZES), st.floats(min_value=0, max_value=1e3))
def test_only_a_scale_of_nothing_takes_the_bound_away(size: str, scale: float) -> None:
    found = disk_speed(preset(size), scale)
    assert (found == DiskSpeed()) == (scale == 0)
    assert scale == 0 or (found.operations >= 1 and found.bytes >= 4096)


@pytest.mark.parametrize("kind", ["shared", "performance"])
def test_a_larger_machine_is_never_slower(kind: Literal["shared", "performance"]) -> None:
    for small, large in pairwise(disk_speed(Guest(cpu_kind=kind, cpus=cpus)) for cpus in range(1, 129)):
        assert small.operations <= large.operations
        assert small.bytes <= large.bytes

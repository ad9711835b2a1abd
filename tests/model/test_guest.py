"""The size of a machine: the limits the public API documents, and what a guest costs a worker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.errors import Invalid, NotBuilt
from hawker.model.guest import ROOT_DISK_MIB, Guest, Resources, check_guest, preset

# From the documentation: kind, counts of cpus, MiB per cpu at least, at most, step.
DOCUMENTED = [
    ("shared", (1, 2, 4, 6, 8), 256, 2048, 256),
    ("performance", (1, 2, 4, 6, 8, 10, 12, 14, 16, 32, 64, 128), 2048, 8192, 1024),
]


@pytest.mark.parametrize(("kind", "counts", "least", "most", "step"), DOCUMENTED)
def test_the_documented_sizes_are_accepted_and_no_others(
    kind: Any, counts: tuple[int, ...], least: int, most: int, step: int
) -> None:
    for cpus in range(-1, 200):
        raw = {"cpu_kind": kind, "cpus": cpus}
        if cpus not in counts:
            with pytest.raises(Invalid, match=f"{kind} machines have 1, 2, 4"):
                check_guest(raw)
            continue
        for memory in range(0, most * cpus + 2 * step, step):
            if least * cpus <= memory <= most * cpus:
                sized = check_guest({**raw, "memory_mb": memory})
                assert sized == Guest(cpu_kind=kind, cpus=cpus, memory_mb=memory)
            else:
                with pytest.raises(Invalid, match=rf"config\.guest\.memory_mb: {memory} is not valid"):
                    check_guest({**raw, "memory_mb": memory})


@pytest.mark.parametrize(("kind", "counts", "least", "most", "step"), DOCUMENTED)
def test_memory_comes_in_steps(kind: str, counts: tuple[int, ...], least: int, most: int, step: int) -> None:
    for off in (1, step // 2, step - 1):
        with pytest.raises(Invalid, match=f"in steps of {step}"):
            check_guest({"cpu_kind": kind, "cpus": 2, "memory_mb": 2 * least + off})


@pytest.mark.parametrize(
    ("raw", "guest"),
    [
        ({}, Guest(cpu_kind="shared", cpus=1, memory_mb=256)),
        ({"cpus": 2}, Guest(cpus=2, memory_mb=512)),
        ({"cpu_kind": None, "cpus": None, "memory_mb": None}, Guest()),
        ({"cpu_kind": "performance"}, Guest(cpu_kind="performance", cpus=1, memory_mb=2048)),
        ({"memory_mb": 1024, "gpus": 0, "gpu_kind": ""}, Guest(memory_mb=1024)),
    ],
)
def test_absent_fields_get_the_smallest_that_fits(raw: dict[str, Any], guest: Guest) -> None:
    assert check_guest(raw) == guest


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"cpu_kind": "dedicated"}, "config.guest.cpu_kind"),
        ({"cpu_kind": 1}, "config.guest.cpu_kind"),
        ({"cpus": True}, "config.guest.cpus"),
        ({"cpus": 2.0, "memory_mb": 512}, "config.guest.cpus"),
        ({"cpus": "2"}, "config.guest.cpus"),
        ({"cpus": [1]}, "config.guest.cpus"),
        ({"memory_mb": "256"}, "config.guest.memory_mb"),
        ({"memory_mb": 256.0}, "config.guest.memory_mb"),
        ({"memory_mb": False}, "config.guest.memory_mb"),
        ({"memory_mb": 0}, "config.guest.memory_mb"),
        ([], "config.guest"),
    ],
)
def test_a_wrong_value_is_refused_by_name(raw: Any, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_guest(raw)
    assert caught.value.field == field


@pytest.mark.parametrize("raw", [{"gpus": 1}, {"gpu_kind": "a10"}])
def test_gpus_are_not_built(raw: dict[str, Any]) -> None:
    with pytest.raises(NotBuilt, match="GPUs are not built yet"):
        check_guest(raw)


def test_the_presets_are_the_documented_ones() -> None:
    for prefix, kind, counts, per_cpu in (
        ("shared-cpu", "shared", DOCUMENTED[0][1], 256),
        ("performance", "performance", DOCUMENTED[1][1], 2048),
    ):
        for cpus in counts:
            sized = preset(f"{prefix}-{cpus}x")
            assert (sized.cpu_kind, sized.cpus, sized.memory_mb) == (kind, cpus, cpus * per_cpu)
            assert check_guest({"cpu_kind": kind, "cpus": cpus, "memory_mb": sized.memory_mb}) == sized


@pytest.mark.parametrize("size", ["shared-cpu-3x", "shared-cpu-1", "performance-0x", "", "tiny", "shared-cpu-01x"])
def test_an_unknown_preset_is_refused_with_the_known_ones(size: str) -> None:
    with pytest.raises(Invalid, match="use shared-cpu-"):
        preset(size)


@pytest.mark.parametrize("size", ["a10", "l40s", "a100-40gb", "a100-80gb"])
def test_presets_with_gpus_are_not_built(size: str) -> None:
    with pytest.raises(NotBuilt, match="GPUs"):
        preset(size)


@given(st.sampled_from(DOCUMENTED[0][1]), st.integers(0, 10_000))
def test_a_guest_costs_its_cpus_by_kind_its_memory_its_disk_and_one_place(cpus: int, disk: int) -> None:
    shared = Guest(cpus=cpus, memory_mb=cpus * 256).resources(disk)
    assert shared == Resources(cpus_shared=cpus, memory_mib=cpus * 256, disk_mib=disk, machines=1)
    dedicated = Guest(cpu_kind="performance", cpus=cpus, memory_mb=cpus * 2048).resources()
    assert dedicated == Resources(cpus_dedicated=cpus, memory_mib=cpus * 2048, disk_mib=ROOT_DISK_MIB, machines=1)
    assert dedicated.at_rest() == Resources(disk_mib=ROOT_DISK_MIB, machines=1)

"""Control groups of version 2 on a tree of plain files: what is written where. Version 1 is exercised for real by
the process driver's tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups import V2, find
from hawker.supervisor.wire import built

LIMITS = Limits(cpu_millis=2000, memory_mib=256, dedicated=True, pids=100)
FILES = """
    cgroup.procs cgroup.kill cgroup.freeze cgroup.subtree_control
    memory.max memory.swap.max memory.events memory.current cpu.weight cpu.max cpu.stat pids.max io.max io.weight
"""


def group(path: Path) -> Path:
    """The kernel makes these files with the directory."""
    path.mkdir()
    for name in FILES.split():
        (path / name).touch()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = group(tmp_path / "cgroup")
    (made / "cgroup.controllers").write_text("cpu io memory pids\n")
    group(made / "hawker-1")
    return made


def test_its_parent_hands_the_controllers_down(root: Path) -> None:
    assert find("hawker-1", root) is not None
    assert (root / "hawker-1" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids +io"


def test_a_host_without_the_controller_of_disks_limits_the_rest(root: Path) -> None:
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    made = group(root / "hawker-1" / "m")
    groups = V2(root, "hawker-1")
    assert (root / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    groups.create("m", replace(LIMITS, disk_bytes=1 << 20, disk_operations=500), ["254:0"])
    assert ((made / "io.max").read_text(), (made / "pids.max").read_text()) == ("", "100")


def test_without_a_controller_there_are_no_groups(root: Path) -> None:
    (root / "cgroup.controllers").write_text("cpu pids\n")
    assert find("hawker-1", root) is None


def test_limits_are_written_in_the_units_of_each_file(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    V2(root, "hawker-1").create("m", LIMITS)
    written = {name: (made / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max")}
    assert written == {
        "memory.max": str(256 << 20),
        "memory.swap.max": "0",
        "cpu.max": "200000 100000",  # microseconds of each 100 ms
        "pids.max": "100",
    }
    assert (made / "cpu.weight").read_text() == "200"


def test_a_shared_cpu_has_a_weight_and_no_quota(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    V2(root, "hawker-1").create("m", Limits(cpu_millis=62, memory_mib=256, dedicated=False, pids=100))
    assert (made / "cpu.weight").read_text() == "6"
    assert (made / "cpu.max").read_text() == ""


def test_a_disk_is_limited_both_ways_and_by_weight(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    V2(root, "hawker-1").create("m", replace(LIMITS, disk_bytes=1 << 20, disk_operations=8000), ["254:0"])
    assert (made / "io.max").read_text() == "254:0 rbps=1048576 wbps=1048576 riops=8000 wiops=8000"
    assert (made / "io.weight").read_text() == "200"


def test_limits_of_a_disk_are_renewed_by_a_resize_and_taken_away_where_there_are_none_now(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    groups = V2(root, "hawker-1")
    groups.create("m", replace(LIMITS, disk_bytes=1 << 20, disk_operations=500), ["254:0"])
    groups.resize("m", replace(LIMITS, disk_bytes=2 << 20, disk_operations=1000))
    assert (made / "io.max").read_text() == "254:0 rbps=2097152 wbps=2097152 riops=1000 wiops=1000"
    groups.resize("m", LIMITS)
    assert (made / "io.max").read_text().startswith("254:0 rbps=max wbps=max riops=max wiops=max")


def test_a_group_that_is_killed_does_not_wait_for_its_disks(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    groups = V2(root, "hawker-1")
    groups.create("m", replace(LIMITS, disk_bytes=1 << 20, disk_operations=500), ["254:0"])
    (made / "cgroup.procs").write_text("41\n")
    assert not groups.kill("m")
    assert (made / "io.max").read_text().startswith("254:0 rbps=max wbps=max riops=max wiops=max")


def test_without_disks_no_file_of_them_is_touched(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    V2(root, "hawker-1").create("m", LIMITS)
    assert [(made / name).read_text() for name in ("io.max", "io.weight")] == ["", ""]


def test_a_daemon_of_another_version_may_know_other_limits() -> None:
    asked = {"cpu_millis": 2000, "memory_mib": 256, "dedicated": True, "pids": 100}
    assert built(Limits, asked) == LIMITS
    assert built(Limits, {**asked, "disk_bytes": 1, "from_tomorrow": 2}) == replace(LIMITS, disk_bytes=1)


@given(st.integers(0, 1 << 40))
def test_a_weight_is_one_that_every_kernel_takes(operations: int) -> None:
    assert 1 <= replace(LIMITS, disk_operations=operations).disk_weight <= 1000


def test_killing_is_left_to_the_kernel_and_done_once_the_group_is_empty(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    groups = V2(root, "hawker-1")
    (made / "cgroup.procs").write_text("41\n42\n")
    assert not groups.kill("m")
    assert (made / "cgroup.kill").read_text() == "1"
    (made / "cgroup.procs").write_text("")
    assert groups.kill("m")


def test_what_it_counts(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    (made / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (made / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (made / "memory.current").write_text("4096\n")
    groups = V2(root, "hawker-1")
    assert (groups.oom_kills("m"), groups.usage("m"), groups.names()) == (2, (1.5, 4096), ["m"])


def test_freezing(root: Path) -> None:
    made = group(root / "hawker-1" / "m")
    groups = V2(root, "hawker-1")
    groups.freeze("m", True)
    assert (made / "cgroup.freeze").read_text() == "1"
    groups.freeze("m", False)
    assert (made / "cgroup.freeze").read_text() == "0"


def test_a_group_that_is_gone_has_no_processes(root: Path) -> None:
    groups = V2(root, "hawker-1")
    assert groups.pids("gone") == []
    assert groups.kill("gone")
    groups.remove("gone")

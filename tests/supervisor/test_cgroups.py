"""Control groups of version 2 on a tree of plain files: what is written where. Version 1 is exercised for real by
the process driver's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawker.supervisor.cgroups import V2, Limits, find

LIMITS = Limits(cpu_millis=2000, memory_mib=256, dedicated=True, pids=100)
FILES = """
    cgroup.procs cgroup.kill cgroup.freeze cgroup.subtree_control
    memory.max memory.swap.max memory.events memory.current cpu.weight cpu.max cpu.stat pids.max
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
    assert (root / "hawker-1" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


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

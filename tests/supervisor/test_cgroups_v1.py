"""Control groups of version 1, whose groups are directories in many hierarchies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups import ROOT, V1, usable

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(usable() != "v1", reason="needs control groups of version 1"),
]


def test_a_removal_that_was_cut_off_anywhere_is_ended_by_the_next_supervisor(tmp_path: Path) -> None:
    prefix = f"hawker-{tmp_path.name[-8:]}-{os.getpid()}"
    groups = V1(ROOT, prefix)
    steps = [Path(entrance).parent for entrance in groups.entrances("m")]
    ours = {step.relative_to(ROOT).parts[0] for step in steps}
    others = [path for path in ROOT.iterdir() if path.name not in ours and (path / "cgroup.procs").exists()]
    assert others, "hierarchies in which only container runtimes make groups"
    last = others[-1] / prefix / "m"
    try:
        groups.create("m", Limits(cpu_millis=1000, memory_mib=64, dedicated=False, pids=100))
        last.mkdir(parents=True)
        for step in steps:
            step.rmdir()
            assert V1(ROOT, prefix).names() == ["m"], f"cut off after {step}"
        V1(ROOT, prefix).remove("m")
        assert not last.exists()
        assert V1(ROOT, prefix).names() == []
    finally:
        groups.remove("m")
        groups.close()

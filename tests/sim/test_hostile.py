"""Hostile packets and bodies, some thousands of the million that `python -m bench.packets` throws."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sim.hostile import throw

from hawker.sim.platform.loop import run


@pytest.mark.parametrize("seed", [1, 2])
def test_no_packet_or_body_breaks_a_member_or_shows_what_is_not_valid(tmp_path: Path, seed: int) -> None:
    report = run(lambda loop: throw(loop, 4000, seed, tmp_path))
    assert report.wrong == []
    assert {"cluster", "forged", "short", "unknown key", "unreadable", "version"} <= report.refused.keys()
    assert report.sent["versions of the poisoner applied"] > 100  # its later rows are not stopped by those put aside
    assert report.sent["rows put aside"] > 0

"""Real machines that stop when they idle, under a load that comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.autostop import Saw, sawn
from tests.kit.edges import region

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

SAW = Saw(machines=3, low=2, high=70, period_s=4.0, teeth=2, idle_s=0.5)


async def test_no_request_meets_a_machine_that_is_stopped(tmp_path: Path) -> None:
    """All are POST: none is sent twice, so one that met a stop would fail."""
    async with region(tmp_path, routing=dict(SAW.routing())) as it:
        used = await sawn(it, SAW)
    assert used.report.fine == used.report.sent > 100, str(used)
    assert used.stops >= 2, str(used)
    assert used.seconds < SAW.machines * SAW.teeth * SAW.period_s, str(used)

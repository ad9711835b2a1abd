"""Machines that come and go while processes of their worker are killed at random moments: nothing of them is left.

`python -m bench.churn` does it with a thousand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kit import belongings
from tests.kit.churning import ALWAYS, KINDS, Churn
from tests.kit.markets import running_market
from tests.kit.vms import missing

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.root, pytest.mark.timeout(420)]

OPTIONS = ("--region", "ord", "--workers", "1", "--cpus", "1000", "--memory", "400000")
SEED = 20261121
CYCLES, MICROVMS = 60, 3
RUNTIMES = ("process", "container", "microvm")


@pytest.mark.full
async def test_nothing_is_left_of_machines_that_came_and_went_under_kills(tmp_path: Path) -> None:
    if why := missing() or ("" if shutil.which("busybox") else "needs busybox (Debian: busybox-static)"):
        pytest.skip(why)
    with running_market(tmp_path / "market", OPTIONS) as market:
        churn = Churn(market, "ord-1", seed=SEED, runtimes=RUNTIMES)
        report = await churn.run(CYCLES, microvms_most=MICROVMS, kills_most={"hypervisor": 1}, kill_within_s=0.5)
    print(report)
    assert report.cycles == CYCLES
    assert set(+report.started) == set(RUNTIMES), "machines of every runtime have run, at the latest afterwards"
    assert set(ALWAYS) <= set(report.kills)
    assert set(report.kills) <= {kind for kinds in KINDS.values() for kind in kinds}
    assert report.wrong == []
    assert belongings.ended(tmp_path / "market" / "ord-1") == []


async def test_a_worker_that_stops_its_machines_leaves_nothing_of_them_on_the_host(tmp_path: Path) -> None:
    worker = tmp_path / "market" / "ord-1"
    with running_market(tmp_path / "market", OPTIONS) as market:
        churn = Churn(market, "ord-1", seed=SEED, runtimes=("container",))
        await churn.one_runs()
        assert {what.partition(":")[0] for what in belongings.left(worker)} >= {"process", "interface", "filter"}
    assert belongings.ended(worker) == []

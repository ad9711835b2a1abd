"""`hawker dev`: what it takes, what it says, and what it leaves for a shell to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.markets import running_market

ONE_WORKER = ("--region", "mad", "--workers", "1", "--no-cgroups")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_pid_files_together_are_what_kill_takes(tmp_path: Path) -> None:
    with running_market(tmp_path, ONE_WORKER) as market:
        told = "".join(path.read_text() for path in tmp_path.glob("*.pid"))
        assert sorted(told.splitlines()) == sorted(str(market.pid(agent)) for agent in ("broker", "mad-1"))

"""`hawker dev`: what it takes, what it says, and what it leaves for a shell to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.programs import hawker
from tests.kit.markets import running_market

ONE_WORKER = ("--region", "mad", "--workers", "1", "--no-cgroups")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_pid_files_together_are_what_kill_takes(tmp_path: Path) -> None:
    with running_market(tmp_path, ONE_WORKER) as market:
        told = "".join(path.read_text() for path in tmp_path.glob("*.pid"))
        assert sorted(told.splitlines()) == sorted(str(market.pid(agent)) for agent in ("broker", "mad-1"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_greeting_says_how_the_command_finds_a_market_and_names_one_of_its_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "my market"
    with running_market(elsewhere, ONE_WORKER):
        told = (elsewhere / "dev.out").read_text()
        assert f"export HAWKER_HOME='{elsewhere}'\n" in told
        assert "--region mad host" in told
        assert hawker("workers", env={"HAWKER_HOME": str(elsewhere)}).status == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    default = tmp_path / "hawker" / "dev"
    with running_market(default, ONE_WORKER):
        assert "HAWKER_HOME" not in (default / "dev.out").read_text()
        assert hawker("workers").status == 0

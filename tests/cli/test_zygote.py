"""The agents of `hawker dev` are forked from one process: what they share, and what becomes of them without it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cli.programs import PROGRAM, environment
from tests.cli.test_dev import ONE_WORKER
from tests.kit.belongings import argv
from tests.kit.markets import running_market
from tests.kit.waiting import wait_until

AGENTS = ("broker", "mad-1")


def shared_mib(pid: int) -> float:
    """What it has written to, or its parent before it, and has in common with others."""
    rows = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Shared_Dirty"].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_agents_share_what_they_import_until_one_is_begun_anew_by_itself(tmp_path: Path) -> None:
    with running_market(tmp_path, ONE_WORKER) as market:
        broker, worker = map(market.pid, AGENTS)
        assert min(shared_mib(broker), shared_mib(worker)) > 8
        assert [Path(f"/proc/{pid}/comm").read_text() for pid in (broker, worker)] == ["broker\n", "mad-1\n"]
        os.kill(worker, signal.SIGHUP)
        log = tmp_path / "mad-1.log"
        wait_until(lambda: "restart.done" in log.read_text(), "it is begun anew")
        assert argv(worker)[1:] == ["-m", "hawker", "agent", "--config", str(tmp_path / "mad-1.toml")]
        assert shared_mib(worker) < 1
        assert market.pid("mad-1") == worker


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_market_ends_in_order_when_it_can_start_no_agent_any_more(tmp_path: Path) -> None:
    command = [*PROGRAM, "dev", "--dir", str(tmp_path), "--port", "0", "--http", "0", *ONE_WORKER]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "client.json").exists() or process.poll() is not None, "the market is up", 60)
        broker, worker = (int((tmp_path / f"{name}.pid").read_text()) for name in AGENTS)
        zygote = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(zygote, signal.SIGKILL)
        assert process.poll() is None, "its agents serve"
        os.kill(worker, signal.SIGKILL)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the process that agents are forked from was killed\n  try: start hawker dev again" in told
    assert not Path(f"/proc/{broker}").exists()

"""One agent at a time over a worker's directory, however the one before it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, environment, hawker
from tests.kit.markets import UP_S
from tests.kit.processes import alive
from tests.kit.waiting import wait_until

from hawker.errors import Conflict
from hawker.worker.lock import LOCK, sole_holder

CONFIG = """
name = "{name}"
region = "ord"
directory = "{directory}"
stop_machines_on_exit = true
[tokens]
cluster = "c"
[worker]
listen = "127.0.0.1:0"
cgroups = false
"""


def configured(directory: Path, name: str) -> Path:
    path = directory.with_name(f"{name}.toml")
    path.write_text(CONFIG.format(name=name, directory=directory))
    return path


@contextmanager
def agent(directory: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that serves: it holds the directory and its database is open."""
    argv = [*PROGRAM, "agent", "--config", str(configured(directory, name))]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            lock, later = directory / LOCK, directory / "catalog.db"  # which is opened after the worker's own
            held = f"{process.pid}\n"
            wait_until(lambda: lock.exists() and lock.read_text() == held and later.exists(), "the agent is up", UP_S)
            yield process
        finally:
            process.terminate()
            process.wait(ENDS_S)


def test_a_directory_has_one_holder_and_is_free_again_after_it(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    with sole_holder(directory):
        for _ in range(2):  # a refusal frees nothing
            with pytest.raises(Conflict, match=f"in use by another agent, process {os.getpid()}"):
                sole_holder(directory).__enter__()
    with sole_holder(directory):
        pass


@pytest.mark.slow
def test_a_second_agent_is_refused_before_it_touches_the_database_and_taken_after_kill_9(tmp_path: Path) -> None:
    directory = tmp_path / "w"
    with agent(directory, "ord-1") as first:
        told = hawker("agent", "--config", configured(directory, "ord-2"))
        assert told.status == 4
        sentence, hint = told.err.splitlines()[-2:]
        assert sentence == f"error: {directory} is in use by another agent, process {first.pid}"
        assert hint == "  try: stop that one first, or give each worker a directory of its own"
        rebuild = hawker("worker", "verify", directory, "--rebuild")
        assert f"in use by another agent, process {first.pid}" in rebuild.err
        assert hawker("worker", "verify", directory).status == 0
        first.send_signal(signal.SIGKILL)
        first.wait(ENDS_S)
        with agent(directory, "ord-1"):
            pass


@pytest.mark.slow
def test_a_market_whose_hawker_dev_was_killed_keeps_the_next_one_out_until_its_agents_have_ended(
    tmp_path: Path,
) -> None:
    argv = ("dev", "--dir", str(tmp_path), "--port", "0", "--region", "ord", "--workers", "1", "--no-cgroups")
    with subprocess.Popen([*PROGRAM, *argv], env=environment(), stdout=subprocess.DEVNULL) as market:
        wait_until((tmp_path / "client.json").exists, "the market is up", UP_S)
        agents = [int((tmp_path / f"{name}.pid").read_text()) for name in ("ord-1", "broker")]
        assert f"a market runs in {tmp_path} already" in hawker(*argv).err
        market.kill()
    again = hawker(*argv)
    assert again.status == 1
    sentence, hint = again.err.splitlines()[-2:]
    assert sentence.startswith("error: a worker of an earlier market still runs: ")
    assert sentence.endswith(f"is in use by another agent, process {agents[0]}")
    assert f"kill $(cat {tmp_path}/*.pid)" in hint
    for pid in agents:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not any(map(alive, agents)), "the agents have ended", ENDS_S)
    with sole_holder(tmp_path / "ord-1"):
        pass

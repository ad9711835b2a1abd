"""Replication, simulated: a few dozen seeds, each checked after every delivery and once all is calm."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.sim.replication.calm import ROUNDS_MOST
from tests.sim.replication.runs import Table, campaign, run

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_replicas_show_what_their_owners_had_and_end_equal(seed: int) -> None:
    assert campaign([seed]).wrong == []


@pytest.fixture(scope="module")
def table() -> Table:
    return campaign(SEEDS)


@pytest.mark.full
def test_all_replicas_show_what_their_owners_had_and_end_equal(table: Table) -> None:
    assert table.wrong == []
    assert table.rounds_most <= ROUNDS_MOST
    assert table.checks > 500 * len(SEEDS)


@pytest.mark.full
def test_every_fault_fires_and_every_rare_path_is_taken(table: Table) -> None:
    assert table.never == []
    assert table.ok


def test_a_campaign_in_which_something_never_happened_is_not_ok() -> None:
    one = campaign(range(1))
    assert one.wrong == []
    assert one.never
    assert not one.ok


def test_a_seed_is_one_run_whatever_the_hash_seed() -> None:
    code = "from tests.sim.replication.runs import run; print(run(5).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert digests == {run(5).digest}

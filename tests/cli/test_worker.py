"""`hawker worker verify` on real databases."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from hawker.cli.main import run
from hawker.host import live
from hawker.model.rows import LeaseRow
from hawker.store.db import Store
from hawker.store.tx import Tx


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A worker's directory whose log has one record with one row."""

    def change(tx: Tx) -> None:
        tx.record("lease.taken", "m1", cause="a test")
        tx.put(LeaseRow(machine="m1", nonce="n", owner="o", description="", expires_at_ms=0))

    async def make() -> None:
        store = Store.open(tmp_path / "worker.db", live())
        await store.submit(change)
        await store.close()

    asyncio.run(make())
    return tmp_path


def damage(directory: Path, sql: str) -> None:
    with closing(apsw.Connection(str(directory / "worker.db"))) as db:
        db.execute(sql)
        assert db.changes() == 1


def test_a_sound_database_is_told_with_its_counts(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (directory, directory / "worker.db"):
        assert run(["worker", "verify", str(path)]) == 0
        assert capsys.readouterr().out == f"{directory / 'worker.db'}: 1 records, 1 rows, no faults\n"


def test_faults_are_listed_and_end_with_status_1_until_the_tables_are_rebuilt(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(directory, "delete from lease")
    assert run(["worker", "verify", str(directory)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == "table lease: row m1 of the log is missing"
    assert last.endswith("1 records, 0 rows, 1 faults")
    assert run(["worker", "verify", str(directory), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == [first]
    assert run(["worker", "verify", str(directory), "--rebuild"]) == 0
    assert capsys.readouterr().out.endswith("the tables were rebuilt from the log\n")
    assert run(["worker", "verify", str(directory)]) == 0


def test_a_damaged_log_is_not_rebuilt_from(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(directory, "update log set cause = 'another' where seq = 1")
    assert run(["worker", "verify", str(directory), "--rebuild"]) == 1
    assert "record 1: its checksum does not match" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nowhere", "nowhere/worker.db", "."])
def test_where_there_is_no_database_that_is_told(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["worker", "verify", str(tmp_path / path)]) == 3
    assert "there is no worker's database at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "and none was made"

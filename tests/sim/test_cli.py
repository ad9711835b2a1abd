"""`hawker sim` as people use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hawker.cli.main import run

SHORT = ("--seed", "1", "--seconds", "1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # records are written where the command runs


def test_a_run_that_holds_tells_its_digest_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["sim", "run", *SHORT]) == 0
    told = capsys.readouterr().out
    assert "every promise held" in told
    assert run(["sim", "run", *SHORT]) == 0
    assert capsys.readouterr().out == told
    assert list(tmp_path.iterdir()) == []


def test_a_run_as_json_is_its_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "run", *SHORT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["seed"] == 1
    assert report["violations"] == []
    assert report["events"] > 100


def test_a_trace_shows_every_event_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "run", *SHORT, "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 0.000000 ord-1 agent start")
    assert len(lines) > 100


@pytest.mark.slow
def test_a_failed_run_leaves_a_record_that_replays_and_shrinks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["sim", "run", "--seed", "4", "--seconds", "2", "--mutant", "directory left"]) == 1
    told = capsys.readouterr()
    assert "left its directory" in told.out
    assert "hawker sim replay hawker-sim-4.json" in told.err
    assert run(["sim", "replay", "hawker-sim-4.json"]) == 0
    assert "the same digest and violations as recorded" in capsys.readouterr().out
    assert run(["sim", "replay", "hawker-sim-4.json", "--shrink"]) == 0
    assert "0 faults are enough" in capsys.readouterr().err
    assert json.loads((tmp_path / "hawker-sim-4.json").read_bytes())["plan"]["faults"] == []


def test_a_record_of_another_run_is_told_from_this_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["sim", "run", *SHORT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    record = tmp_path / "other.json"
    record.write_text(json.dumps(report | {"digest": "0" * 32}))
    assert run(["sim", "replay", str(record)]) == 1
    assert "the run differs from the record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["campaign", "--seeds", "7"], "write the first and the last seed"),
        (["campaign", "--seeds", "9..1"], "write the first and the last seed"),
        (["replay"], "Give either the record of a run or --seed"),
        (["replay", "nothing.json"], "No such file"),
        (["run", "--seed", "1", "--mutant", "x"], "name one of"),
        (["run", "--seed", "1", "--users", "--mutant", "claim not taken"], "POST sent again"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sim", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_no_record_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    assert run(["sim", "replay", "no.json"]) == 2
    assert "not the record of a simulation" in capsys.readouterr().err

"""`hawker doctor` as a person and as a program sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.programs import hawker

from hawker.cli.main import run

CONFIG = """
name = "ord-1"
region = "ord"
directory = "{directory}"
[tokens]
cluster = "secret"
[worker]
listen = "{listen}"
"""


def config(tmp_path: Path, listen: str = "127.0.0.1:0") -> str:
    path = tmp_path / "agent.toml"
    path.write_text(CONFIG.format(directory=tmp_path / "data", listen=listen))
    return str(path)


def test_it_says_what_this_host_has_and_each_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--config", config(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "kernel" in told
    assert str(tmp_path) in told
    assert re.search(r"(?m)^driver process +ok +off$", told)


def test_as_json_it_is_a_list_of_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--config", config(tmp_path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"what", "state", "found", "remedy", "needed"} == set(findings[0])


def test_what_is_missing_is_found_and_not_logged(tmp_path: Path) -> None:
    ended = hawker("doctor", "--json", env={"PATH": str(tmp_path)})
    states = {finding["what"]: finding["state"] for finding in ended.json()}
    assert (states["driver container"], states["driver microvm"]) == ("missing", "missing")
    assert ended.err == ""


def test_an_agent_that_could_not_listen_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--config", config(tmp_path, "192.0.2.1:4281")]) == 1
    assert "port 192.0.2.1:4281" in capsys.readouterr().out

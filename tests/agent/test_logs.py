"""An agent's log: one JSON object a line, from the configured level on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.agent.test_settings import written

from hawker.agent.settings import read_settings
from hawker.errors import Invalid
from hawker.telemetry import get_logger, logs_into, set_up_logs, without_logs

logger = get_logger()


def test_a_line_is_a_json_object_with_its_event_level_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("step.completed", flow="machine.start", path=Path("/x"), text="a\nb\ud800")
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "flow": "machine.start",
        "path": "PosixPath('/x')",
        "text": "a\nb\ud800",
        "event": "step.completed",
        "level": "info",
    }


def test_an_error_shows_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("no such flow")
    except ValueError:
        logger.exception("run.failed")
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: no such flow")


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        set_up_logs(level="WARNING")
        logger.info("dropped")
        logger.warning("kept")
    finally:
        set_up_logs()
    logger.debug("dropped")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["kept"]


def test_lines_go_elsewhere_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    heard = []
    with logs_into(lambda level, event, fields: heard.append((level, event, fields))):
        logger.debug("heard", n=1)
        with without_logs():
            logger.error("silent")
    assert heard == [("debug", "heard", {"n": 1})]
    assert capsys.readouterr().err == ""


def test_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(f'log_level = "loud"\n{file.read_text()}')
    with pytest.raises(Invalid, match=r"log_level: .*write one of debug, info"):
        read_settings(file)

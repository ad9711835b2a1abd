"""Logs of workers in this process are dropped, and the report ends with what the flow engine's test kit has run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.kit import flowkit

from hawker.telemetry import without_logs


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    with without_logs():
        yield


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files need no disk, where there is one: for thousands of commits that no power cut meets. They
    are at the mercy of everybody else on a disk."""
    try:
        made = TemporaryDirectory(dir="/dev/shm", prefix="flows-")
    except OSError:
        yield tmp_path
        return
    with made as directory:
        yield Path(directory)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not flowkit.COUNTS:
        return
    terminalreporter.section("flows cut off at every point")
    for line in flowkit.summary():
        terminalreporter.write_line(line)

"""The report ends with the times that tests over real sockets have measured."""

from __future__ import annotations

import pytest
from bench.regions import Times

MEASURED = Times()


@pytest.fixture
def measured() -> Times:
    return MEASURED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED.lines:
        terminalreporter.section("twelve agents in three regions")
    for line in MEASURED.lines:
        terminalreporter.write_line(line)

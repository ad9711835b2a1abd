"""Logs of workers in this process are dropped, and the report ends with what the flow engine's test kit has run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from tests.kit import flowkit


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not flowkit.COUNTS:
        return
    terminalreporter.section("flows cut off at every point")
    for line in flowkit.summary():
        terminalreporter.write_line(line)

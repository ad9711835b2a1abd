"""One stock of what microVMs are made of, and a report that ends with the times that tests over real sockets have
measured."""

from __future__ import annotations

import pytest
from bench.regions import Times
from tests.kit.vms import guests

__all__ = ["guests"]  # a fixture: one that a file of tests imports by itself is made once for each of them

MEASURED = Times()


@pytest.fixture
def measured() -> Times:
    return MEASURED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED.lines:
        terminalreporter.section("twelve agents in three regions")
    for line in MEASURED.lines:
        terminalreporter.write_line(line)

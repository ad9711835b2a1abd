"""How long the tests of each directory take, against the budget that `tests/budgets` gives them.

Counted is processor time, of the tests and of the processes that they start: the time on the clock also tells what else
the machine had to do, and a budget on that would have to be so large that it holds nothing. Both are printed.

A run with an account writes its times beside it; `python -m tests.kit.budgets FILE...` adds up those of several runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "budgets"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Budget:
    cpu_s: float
    again: bool
    """Whether a test of the directory may get a second run."""


@dataclass
class Taken:
    cpu_s: float = 0.0
    clock_s: float = 0.0


def read(text: str) -> dict[str, Budget]:
    """By directory."""
    rows = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {directory: Budget(float(cpu_s), again == ["again"]) for directory, cpu_s, *again in rows}


def directory_of(nodeid: str) -> str:
    """That below tests/ which a test is in, or "tests"."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:2])


def report(taken: Mapping[str, Taken], budgets: Mapping[str, Budget]) -> tuple[list[str], bool]:
    """A table, and whether every directory kept to its budget. One without a budget has none to keep to."""
    lines, kept = [f"{'':24}{'cpu s':>8}{'of':>6}{'clock s':>10}"], True
    for directory, its in sorted(taken.items()):
        budget = budgets.get(directory)
        over = budget is not None and its.cpu_s > budget.cpu_s
        kept &= not over
        most = f"{budget.cpu_s:.0f}" if budget else "-"
        lines.append(f"{directory:24}{its.cpu_s:8.1f}{most:>6}{its.clock_s:10.1f}{'  OVER ITS BUDGET' * over}")
    total = sum(its.cpu_s for its in taken.values())
    lines.append(f"{'all':24}{total:8.1f}{'':6}{sum(its.clock_s for its in taken.values()):10.1f}")
    return lines, kept


class Times:
    """Counts what a run takes. `held`: a directory over its budget makes the run fail."""

    def __init__(self, held: bool) -> None:
        self.taken: dict[str, Taken] = {}
        self._budgets = read(FILE.read_text())
        self._held = held

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu_s, clock_s = _cpu_s(), time.monotonic()
        try:
            return (yield)
        finally:
            taken = self.taken.setdefault(directory_of(item.nodeid), Taken())
            taken.cpu_s += _cpu_s() - cpu_s
            taken.clock_s += time.monotonic() - clock_s

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        _, kept = report(self.taken, self._budgets)
        if self._held and not kept and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.taken:
            terminalreporter.section("time")
            for line in report(self.taken, self._budgets if self._held else {})[0]:
                terminalreporter.write_line(line)

    def write(self, path: Path) -> None:
        rows = (f"{directory} {its.cpu_s:.2f} {its.clock_s:.2f}\n" for directory, its in self.taken.items())
        path.write_text("".join(rows))


def _cpu_s() -> float:
    """Of this process, and of all below it that have ended and were waited for. In a process namespace of its own that
    is every process that has ended: its first one waits for those that others leave."""
    times = os.times()
    found = times.user + times.system + times.children_user + times.children_system
    if os.getppid() == 1:
        fields = Path("/proc/1/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[13]) + int(fields[14])) / TICKS
    return found


def added(files: Iterable[Path]) -> dict[str, Taken]:
    taken: dict[str, Taken] = {}
    for line in (line for file in files if file.exists() for line in file.read_text().splitlines()):
        directory, cpu_s, clock_s = line.split()
        its = taken.setdefault(directory, Taken())
        its.cpu_s += float(cpu_s)
        its.clock_s += float(clock_s)
    return taken


def main(files: list[str]) -> int:
    lines, kept = report(added(map(Path, files)), read(FILE.read_text()))
    print("\n".join(lines))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

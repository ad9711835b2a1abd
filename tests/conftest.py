"""What holds for every test: what a marker asks of the machine, the order, and the account given at the end.

A test that cannot run here is skipped, and the end of the report lists it with its reason, in a section of its own.
With `--forbid-skips` such a test makes the run fail: that is how `.ci/run` knows that everything ran. Quick tests come
first. A process that outlives its tests makes the run fail too; `tests/kit/leftovers.py` says how it is found.

`--secluded` says that the run is one of `scripts/lib/secluded`. `--account` writes down how the run went in few lines:
how many tests passed and failed, then each that failed, with its reason. Of the files beside it, `.failed` names what
`scripts/test` may run once more, and `.times` has what each directory took (`tests/kit/budgets.py`).
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.kit", "tests.live.conformance")

from tests.kit import budgets, leaks, tiers  # noqa: E402  # after the rewrite of its assertions is asked for
from tests.kit.leftovers import Leftovers  # noqa: E402

CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "pids")
REASON_MOST = 400
"""Of a failure in the account: characters."""

LEFT_BY_ALL = pytest.StashKey[bool]()
"""Whether something outlived the whole run though no test failed: none can be named for it. One that fails leaves what
it had yet to end."""


def missing_for_root(euid: int, cgroups: Path = CGROUPS) -> str:
    """Why a test marked `root` cannot run, or "" when it can: it needs root and cgroups it may make groups in."""
    if euid != 0:
        return "needs root"
    if (listing := cgroups / "cgroup.controllers").exists():  # version 2: one tree
        absent = [name for name in CONTROLLERS if name not in listing.read_text().split()]
        writable = os.access(cgroups / "cgroup.subtree_control", os.W_OK)
    else:  # version 1: a tree per controller
        absent = [name for name in CONTROLLERS if not (cgroups / name).is_dir()]
        writable = all(os.access(cgroups / name, os.W_OK) for name in CONTROLLERS)
    if absent:
        return f"needs the cgroup controllers {', '.join(absent)}"
    return "" if writable else f"needs {cgroups} to be writable"


def missing_for_node() -> str:
    """Why a test marked `node` cannot run, or "" when it can."""
    absent = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)}" if absent else ""


@functools.cache
def _missing(marker: str, secluded: bool) -> str:
    if marker == "node":
        return missing_for_node()
    if secluded:  # what needs control groups fails there
        return "" if os.geteuid() == 0 else "needs root"
    return missing_for_root(os.geteuid())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test makes the run fail")
    parser.addoption("--secluded", action="store_true", help="in namespaces of its own, without control groups")
    parser.addoption("--account", type=Path, help="a file to write the counts and the failures to, a line each")
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)
    skips = SkipAccount(config.getoption("--forbid-skips"))
    config.pluginmanager.register(skips, "hawker-skips")
    path, times = config.getoption("--account"), budgets.Times(held=not tiers.has_more(config))
    config.pluginmanager.register(times, "hawker-times")
    if path:
        config.pluginmanager.register(Account(path, skips, times), "hawker-account")


@pytest.hookimpl(trylast=True)  # markers are given in directories, too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.choose(config, items)
    for item in items:
        for marker in ("root", "node"):
            if item.get_closest_marker(marker) and (reason := _missing(marker, config.getoption("--secluded"))):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable: otherwise the order of the files


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays to the end: no collection of garbage in a test looks at it again."""
    gc.collect()
    gc.freeze()


class SkipAccount:
    """Remembers what was skipped, lists it at the end, and fails the run when skips are forbidden."""

    def __init__(self, forbidden: bool) -> None:
        self.forbidden = forbidden
        self.skips: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):  # an expected failure counts as skipped, and did run
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.skips and self.forbidden and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.skips:
            return
        terminalreporter.section(f"{len(self.skips)} not run" + (", which is forbidden here" * self.forbidden))
        for nodeid, reason in self.skips:
            terminalreporter.write_line(f"{nodeid}: {reason}")


class Account:
    """Writes the counts of a run into a file, and below them each failure with its reason."""

    def __init__(self, path: Path, skips: SkipAccount, times: budgets.Times) -> None:
        self.path = path
        self.skips = skips
        self.times = times
        self.once: set[str] = set()
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []
        self.failed: list[str] = []
        self.of_tests: list[str] = []
        self.began = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is the same whatever the machine does gets no second run: rules, simulations, and what is cut off or
        killed at each point."""
        again = {directory for directory, budget in budgets.read(budgets.FILE.read_text()).items() if budget.again}
        for item in session.items:
            a_rule = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
            marked = any(item.get_closest_marker(name) for name in ("crash", "virtual_time"))
            if a_rule or marked or budgets.directory_of(item.nodeid) not in again:
                self.once.add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._count("errors", report)
            self.once.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._count("failed" if report.when == "call" else "errors", report)
        elif report.passed and report.when == "call":
            self.counts["passed"] = self.counts.get("passed", 0) + 1

    def _count(self, kind: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else report.longreprtext
        self.of_tests.append(report.nodeid)
        self.failures.append(f"{report.nodeid}: {' '.join(reason.split())[:REASON_MOST]}")
        # What is left behind is found at a test's end, and may be another's of its file.
        again = report.nodeid.partition("::")[0] if report.when == "teardown" else report.nodeid
        if again not in self.failed:
            self.failed.append(again)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skips.forbidden:
            self.failures += [f"{nodeid}: not run: {reason}" for nodeid, reason in self.skips.skips]
        counts = [f"{self.counts.get('passed', 0)} passed"]
        counts += [f"{self.counts[kind]} {kind}" for kind in ("failed", "errors") if kind in self.counts]
        counts += [f"{len(self.skips.skips)} not run"] if self.skips.skips else []
        first = f"{', '.join(counts)} in {time.monotonic() - self.began:.0f} s"
        self.path.write_text("\n".join((first, *self.failures, "")))
        no_more = session.config.stash.get(LEFT_BY_ALL, False) or not self.once.isdisjoint(self.of_tests)
        failed = [] if no_more else self.failed
        self.times.write(self.path.with_name(self.path.name + ".times"))
        self.path.with_name(self.path.name + ".failed").write_text("".join(f"{nodeid}\n" for nodeid in failed))


@pytest.fixture(scope="session")
def leftovers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leftovers]:
    found = Leftovers(tmp_path_factory.getbasetemp())
    before = leaks.snapshot()
    yield found
    unexplained = request.session.testsfailed == 0
    if _looks_for_leaks(request) and (left := leaks.leaked(before)):
        request.config.stash[LEFT_BY_ALL] = unexplained
        pytest.fail("the tests left on the host:\n  " + "\n  ".join(left))
    if alive := found.end():
        request.config.stash[LEFT_BY_ALL] = unexplained
        pytest.fail("processes outlived their tests (now killed):\n" + "\n".join(alive))


@pytest.fixture(scope="module", autouse=True)
def _note_leftovers(leftovers: Leftovers, request: pytest.FixtureRequest) -> Iterator[None]:
    before = leaks.snapshot()
    yield
    if programs := sys.modules.get("tests.cli.programs"):
        programs.close_forks()  # commands of a file of tests are forks of one process
    leftovers.note(request.node.nodeid)
    if not _looks_for_leaks(request) or _outlives(request):
        return
    if left := leaks.leaked(before):
        pytest.fail("the module's tests left on the host:\n  " + "\n  ".join(left))


@pytest.fixture(autouse=True)
def _leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before a test's own fixtures and torn down after them, but inside those of wider scope."""
    if not _looks_for_leaks(request) or _shares(request.node):
        yield
        return
    before = leaks.snapshot()
    yield
    if left := leaks.leaked(before):
        pytest.fail("the test left on the host:\n  " + "\n  ".join(left))


def _looks_for_leaks(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--forbid-skips"))


def _outlives(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this module work on something that the whole run holds: then the run answers for it."""
    tests = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    return any("session" in _scopes(test) for test in tests if isinstance(test, pytest.Function))


def _shares(test: pytest.Function) -> bool:
    """Whether a test works on something that a wider scope holds: then its module answers for what is left."""
    return bool(_scopes(test) - {"function"})


def _scopes(test: pytest.Function) -> set[str]:
    """Of its fixtures, but for pytest's own and ours above."""
    found = (definitions[-1] for definitions in test._fixtureinfo.name2fixturedefs.values())
    return {fixture.scope for fixture in found if fixture.baseid not in ("", "tests")}

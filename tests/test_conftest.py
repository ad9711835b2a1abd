"""What `tests/conftest.py` promises: nothing is skipped in silence, quick tests run first, nothing is left running."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.conftest import CONTROLLERS, missing_for_root
from tests.kit.budgets import FILE, Budget, added, read, report
from tests.kit.tiers import FEW

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONS = PROJECT["tool"]["pytest"]["ini_options"]["addopts"].replace("-p schemathesis.pytest.plugin", "")
"""Of a run: the project's, but for what takes longest to load and has no part in it."""
OF_PROCESSES = "tests/live/test_it.py"
"""In a directory whose tests may get a second run."""

SKIPPED = """
import pytest

def test_runs(): pass

@pytest.mark.skip(reason="no kvm here")
def test_cannot_run(): pass
"""


def run_pytest(
    directory: Path, source: str, *options: str, at: str = "test_it.py", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run one file of tests under this project's configuration and conftest, in a pytest of its own. `settings` go into
    its environment."""
    (directory / at).parent.mkdir(parents=True, exist_ok=True)
    (directory / at).write_text(source)
    argv = [sys.executable, "-m", "pytest", "-o", f"addopts={OPTIONS}", "-p", "tests.conftest", "-v", *options]
    argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(directory), "--basetemp", str(directory / "tmp")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    return subprocess.run(
        [*argv, str(directory)], env=environment, cwd=directory, capture_output=True, text=True, timeout=50
    )


def test_a_skipped_test_is_listed_with_its_reason(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, SKIPPED)
    assert run.returncode == 0, run.stdout
    section = run.stdout.partition("= 1 not run =")[2]
    assert "test_it.py::test_cannot_run: no kvm here" in section


def test_a_skipped_test_fails_the_run_where_skips_are_forbidden(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, SKIPPED, "--forbid-skips")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "= 1 not run, which is forbidden here =" in run.stdout
    assert "1 passed, 1 skipped" in run.stdout


def test_a_file_that_is_skipped_whole_counts(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path, "import pytest\npytest.skip('no such kernel', allow_module_level=True)\n", "--forbid-skips"
    )
    assert run.returncode != 0
    assert "test_it.py: no such kernel" in run.stdout


def test_forbidden_skips_leave_a_run_without_skips_alone(tmp_path: Path) -> None:
    expected_to_fail = "import pytest\n@pytest.mark.xfail(reason='not yet')\ndef test_fails(): assert False\n"
    run = run_pytest(tmp_path, expected_to_fail + "def test_runs(): pass\n", "--forbid-skips")
    assert run.returncode == 0, run.stdout
    assert "not run" not in run.stdout


GOES_WRONG = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("the disk\\nis gone")

def test_runs(): pass
def test_fails(): assert 1 == 2
def test_breaks_later(broken): pass
@pytest.mark.skip(reason="no kvm here")
def test_cannot_run(): pass
"""


def test_an_account_has_the_counts_and_a_line_for_each_failure(tmp_path: Path) -> None:
    account = tmp_path / "account"
    run = run_pytest(tmp_path, GOES_WRONG, "--forbid-skips", f"--account={account}")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    counts, *failures = account.read_text().splitlines()
    assert re.fullmatch(r"2 passed, 1 failed, 1 errors, 1 not run in \d+ s", counts)
    assert failures == [
        "test_it.py::test_fails: assert 1 == 2",
        "test_it.py::test_breaks_later: OSError: the disk is gone",
        "test_it.py::test_cannot_run: not run: no kvm here",
    ]


def test_what_failed_is_named_for_a_second_run_and_what_left_something_with_its_whole_file(tmp_path: Path) -> None:
    run_pytest(tmp_path, GOES_WRONG, f"--account={tmp_path / 'account'}", at=OF_PROCESSES)
    failed = (tmp_path / "account.failed").read_text().splitlines()
    assert failed == [f"{OF_PROCESSES}::test_fails", OF_PROCESSES]
    mended = GOES_WRONG.replace("1 == 2", "1 == 1")
    again = run_pytest(tmp_path, mended, f"@{tmp_path / 'account.failed'}", at=OF_PROCESSES)
    assert f"{OF_PROCESSES}::test_fails PASSED" in again.stdout


@pytest.mark.parametrize(
    ("at", "failing"),
    [
        ("tests/core/test_it.py", "def test_that(): assert False"),
        (OF_PROCESSES, "@pytest.mark.crash\ndef test_that(): assert False"),
        (OF_PROCESSES, "@hypothesis.given(hypothesis.strategies.none())\ndef test_that(none): assert False"),
    ],
    ids=["a rule", "a crash", "a property"],
)
def test_where_more_failed_than_waiting_for_processes_nothing_gets_a_second_run(
    tmp_path: Path, at: str, failing: str
) -> None:
    (tmp_path / "tests" / "live").mkdir(parents=True)
    (tmp_path / "tests" / "live" / "test_beside.py").write_text("def test_fails(): assert False\n")
    run = run_pytest(tmp_path, f"import hypothesis, pytest\n{failing}\n", f"--account={tmp_path / 'account'}", at=at)
    assert run.returncode != 0
    assert (tmp_path / "account.failed").read_text() == ""


TIERS = """
import pytest
from hypothesis import given, settings, strategies as st

@given(st.integers())
def test_a_property(number): print("drawn")
@pytest.mark.full
@pytest.mark.parametrize("n", range(4))
def test_more(n): pass
def test_plain(): pass
"""


def test_a_change_leaves_out_what_is_marked_full_and_draws_few_cases_the_same_each_time(tmp_path: Path) -> None:
    ran = [run_pytest(tmp_path, TIERS + "\n# " * n, "-s").stdout for n in range(2)]
    assert all("2 passed, 4 deselected" in each for each in ran)
    assert all(each.count("drawn") == FEW for each in ran)
    full = run_pytest(tmp_path, TIERS, "--full", "-s").stdout
    assert "6 passed in" in full
    assert full.count("drawn") > FEW


def test_all_slices_together_are_what_the_full_run_adds(tmp_path: Path) -> None:
    ran: list[str] = []
    for number in (1, 2):
        run = run_pytest(tmp_path, TIERS, f"--slice={number}/2")
        ran += [line.split("::")[1].split()[0] for line in run.stdout.splitlines() if " PASSED " in line]
    assert sorted(ran) == ["test_a_property", *(f"test_more[{n}]" for n in range(4))]


BUSY = "import time\ndef test_busy():\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"


def test_a_directory_over_its_budget_fails_the_run_and_is_named(tmp_path: Path) -> None:
    account = tmp_path / "account"
    run_pytest(tmp_path, BUSY, f"--account={account}", at=OF_PROCESSES)
    taken = added([tmp_path / "account.times"])
    assert 0.3 <= taken["tests/live"].cpu_s <= taken["tests/live"].clock_s + 0.1
    lines, kept = report(taken, {"tests/live": Budget(0.2, again=True)})
    assert not kept
    assert lines[1].endswith("OVER ITS BUDGET")
    assert report(taken, {"tests/live": Budget(5.0, again=True)})[1]


def test_every_directory_of_tests_has_a_budget() -> None:
    directories = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"/".join(path.parts[:2]) for path in directories} == read(FILE.read_text()).keys()


def test_slow_tests_run_last_and_the_others_in_the_order_of_the_file(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.slow\ndef test_c(): pass\ndef test_b(): pass\ndef test_a(): pass\n"
    run = run_pytest(tmp_path, source)
    order = [line.split("::")[1].split()[0] for line in run.stdout.splitlines() if " PASSED " in line]
    assert order == ["test_b", "test_a", "test_c"], run.stdout


FORGETFUL = """
import subprocess

def forget(**where):
    subprocess.run(["/bin/sh", "-c", "setsid sleep 61 & setsid sleep 62 & exit"], check=True, **where)

def test_a_daemon(): forget(cwd="/")

def test_a_machine(tmp_path): forget(cwd=tmp_path, env={})
"""


@pytest.mark.slow
def test_processes_that_outlive_their_tests_fail_the_run_and_are_killed(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, FORGETFUL, f"--account={tmp_path / 'account'}", HAWKER_TEST_SETTLE_S="1")
    assert run.returncode != 0, run.stdout
    # Which test it was seen after is a race: a program may come up after the file it belongs to has ended.
    found = re.findall(r"^E +(\d+) (sleep 6[12]) \(first seen after ", run.stdout, re.MULTILINE)
    assert sorted(command for _, command in found) == ["sleep 61"] * 2 + ["sleep 62"] * 2, run.stdout
    for pid, _ in found:
        wait_until_ended(int(pid))
    assert (tmp_path / "account.failed").read_text() == "", "it is not one test's, so none runs once more for it"


@pytest.mark.slow
def test_what_a_failed_test_had_yet_to_end_keeps_it_from_no_second_run(tmp_path: Path) -> None:
    fails = "\ndef test_fails():\n    forget()\n    assert 1 == 2\n"
    source = FORGETFUL.partition("def test_a_daemon")[0] + fails
    run = run_pytest(tmp_path, source, f"--account={tmp_path / 'account'}", at=OF_PROCESSES, HAWKER_TEST_SETTLE_S="1")
    assert "processes outlived their tests" in run.stdout
    assert f"{OF_PROCESSES}::test_fails" in (tmp_path / "account.failed").read_text().splitlines()


def wait_until_ended(pid: int) -> None:
    """A pidfd is readable once its process has ended, also while nobody has asked for its status yet."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], 5)[0], f"process {pid} was not killed"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("controllers", "reason"), [("cpu memory pids io", ""), ("cpu pids", "needs the cgroup controllers memory")]
)
def test_the_root_marker_asks_for_the_controllers_of_cgroup_version_2(
    tmp_path: Path, controllers: str, reason: str
) -> None:
    (tmp_path / "cgroup.controllers").write_text(controllers + "\n")
    (tmp_path / "cgroup.subtree_control").touch()
    assert missing_for_root(0, tmp_path) == reason


def test_the_root_marker_asks_for_the_controllers_of_cgroup_version_1(tmp_path: Path) -> None:
    assert missing_for_root(0, tmp_path) == "needs the cgroup controllers cpu, memory, pids"
    for name in CONTROLLERS:
        (tmp_path / name).mkdir()
    assert missing_for_root(0, tmp_path) == ""


def test_the_root_marker_asks_for_root(tmp_path: Path) -> None:
    assert missing_for_root(1000, tmp_path) == "needs root"


LEAVES = """
import os
import pytest

@pytest.fixture
def place():
    path = "/dev/shm/hawker-left-{pid}"
    os.mkdir(path)
    yield path
    if {removes}:
        os.rmdir(path)

def test_uses_it(place): pass
"""


@pytest.mark.parametrize("removes", [True, False])
def test_what_a_test_leaves_on_the_host_fails_it_where_nobody_else_uses_the_host(tmp_path: Path, removes: bool) -> None:
    path = Path(f"/dev/shm/hawker-left-{os.getpid()}")
    settings = {} if removes else {"HAWKER_TEST_SETTLE_S": "1"}  # what is left is waited for in vain
    try:
        run = run_pytest(tmp_path, LEAVES.format(pid=os.getpid(), removes=removes), "--forbid-skips", **settings)
    finally:
        path.rmdir() if path.exists() else None
    assert (run.returncode == 0) == removes, run.stdout
    assert (f"file in memory: {path}" in run.stdout) != removes

"""When a benchmark has failed: by its exit status, by its time, and by what it leaves behind."""

from __future__ import annotations

from pathlib import Path

from bench.all import run
from bench.command import PARTLY, Table


def checkout(path: Path, code: str) -> Path:
    """Files with one benchmark, `it`."""
    (path / "bench").mkdir()
    (path / "bench" / "__init__.py").touch()
    (path / "bench" / "it.py").write_text(code)
    return path


def test_a_benchmark_that_ends_well_and_leaves_nothing_is_fine(tmp_path: Path) -> None:
    outcome = run("it", [], 30, code=checkout(tmp_path, "print('a row')"))
    assert (outcome.failed, outcome.partly, outcome.said) == ("", False, "a row\n")


def test_a_benchmark_fails_by_its_exit_status_and_what_it_said_is_kept(tmp_path: Path) -> None:
    outcome = run("it", [], 30, code=checkout(tmp_path, "raise SystemExit('no such machine')"))
    assert outcome.failed == "status 1"
    assert "no such machine" in outcome.said


def test_a_benchmark_that_takes_too_long_is_ended_and_has_failed(tmp_path: Path) -> None:
    outcome = run("it", [], 0.5, code=checkout(tmp_path, "import time; time.sleep(600)"))
    assert outcome.failed == "took more than 0.5 s"


def test_a_benchmark_that_leaves_a_file_has_failed(tmp_path: Path) -> None:
    outcome = run("it", [], 30, code=checkout(tmp_path, "import tempfile; tempfile.mkdtemp(prefix='left-')"))
    assert outcome.failed == "it left something behind"
    assert "left-" in outcome.said


def test_a_benchmark_that_lacks_a_program_says_so_and_has_not_failed(tmp_path: Path) -> None:
    outcome = run("it", [], 30, code=checkout(tmp_path, f"print('not run: wrk'); raise SystemExit({PARTLY})"))
    assert (outcome.failed, outcome.partly) == ("", True)
    assert str(outcome).endswith("ok, not run: wrk")


def test_the_table_for_a_page_has_what_the_terminal_shows() -> None:
    table = Table()
    table.latency("order", [3.0, 1.0, 2.0], "1")
    table.add("  of which waiting", 1234.5, "us", note="busy")
    assert table.markdown().splitlines() == [
        "| what | value | aim | note |",
        "|---|---|---|---|",
        "| order | 2.00 ms | 1 | p99 3.00 |",
        "| of which waiting | 1,234 us |  | busy |",
    ]

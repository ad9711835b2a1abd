"""What is a benchmark is run by `bench.all`, and what it starts is looked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench.all import BENCHMARKS, MARK, ROOT, ended
from tests.kit.waiting import wait_until

BENCH = ROOT / "bench"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def benchmarks() -> set[str]:
    """Modules that take the options of a benchmark."""
    return {path.stem for path in BENCH.glob("*.py") if "options(__doc__)" in path.read_text()}


def named() -> set[str]:
    """Modules that the documentation says can be run, or names as what holds a figure."""
    text = "".join(page.read_text() for page in PAGES)
    return set(re.findall(r"\bbench[./]([a-z0-9_]+)\b", text)) - {"py"}


def test_every_benchmark_is_run_by_bench_all() -> None:
    assert len(set(BENCHMARKS)) == len(BENCHMARKS)
    assert set(BENCHMARKS) == benchmarks()


def test_every_benchmark_that_the_documentation_names_is_there() -> None:
    assert {name for name in named() if not (BENCH / f"{name}.py").exists()} == set()


def test_the_documentation_names_every_benchmark() -> None:
    assert benchmarks() - named() == set()


def test_a_process_that_a_benchmark_leaves_is_found_and_ended(tmp_path: Path) -> None:
    mark = str(tmp_path)
    child = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", child], env={**os.environ, MARK: mark}, check=True)
    ((pid, command),) = ended(mark, 0.0)
    assert command == "sleep 600"
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")

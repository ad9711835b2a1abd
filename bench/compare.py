"""Two commits in turns in one run: `python -m bench.compare COMMIT [--only run,catalog] [--rounds N] [-- OPTION...]`.

What else runs on a machine, its clock and its disk change from hour to hour, so figures of two runs are not compared.
Here COMMIT and today's checkout are measured by turns, N times each, and the table has the medians, and as the ratio
the median of the turns' ratios (today / COMMIT) with the smallest and the largest. `floor` is what the machine itself
takes for the same, where the benchmark knows it. Options after `--` go to the benchmarks, as in `-- --only latencies`.

Both sides run today's benchmarks, so that only the package differs: those of this checkout, by the Python of an
environment that has the other commit's package. Where an older package cannot run one (it imports something that was
not there, or fails), that commit's own benchmark of the same name takes its place, and the table has the rows that both
know. What is on one side only is shown as such.

A commit's files and its environment, made by its own `scripts/lib/environment.sh` from its own constraints, are kept in
`$XDG_CACHE_HOME/hawker-bench/` (`~/.cache/hawker-bench/`) and used again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.all import BENCHMARKS, ROOT, Outcome, run
from bench.command import shown

Rows = Sequence[Mapping[str, Any]]
"""Of one run of one benchmark, as `--json` writes them."""


class Line(msgspec.Struct, frozen=True):
    """A row of the table. `before` and `today`: medians, None: that side has no such row. `ratios`: of each turn."""

    what: str
    unit: str
    before: float | None
    today: float | None
    ratios: tuple[float, ...] = ()
    floor: float | None = None


def paired(before: Sequence[Rows], today: Sequence[Rows]) -> list[Line]:
    """Lines in today's order, then those that only the other commit has. The runs of both sides are those of the same
    turns, in order; a turn in which a side has no such row, or a value of 0, gives no ratio."""
    names = dict.fromkeys(row["what"] for side in (today, before) for rows in side for row in rows)
    return [_line(what, [_of(what, rows) for rows in before], [_of(what, rows) for rows in today]) for what in names]


def _of(what: str, rows: Rows) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["what"] == what), None)


def _line(what: str, before: Sequence[Mapping[str, Any] | None], today: Sequence[Mapping[str, Any] | None]) -> Line:
    def median(rows: Sequence[Mapping[str, Any] | None], name: str) -> float | None:
        values = [row[name] for row in rows if row and row.get(name) is not None]
        return statistics.median(values) if values else None

    turns = [(b["value"], t["value"]) for b, t in zip(before, today, strict=False) if b and t]
    return Line(
        what=what.strip(),
        unit=next(row["unit"] for row in (*today, *before) if row),
        before=median(before, "value"),
        today=median(today, "value"),
        ratios=tuple(t / b for b, t in turns if b),
        floor=median([*before, *today], "floor"),
    )


def markdown(commit: str, lines: Sequence[Line]) -> str:
    """The table, for a page or a note."""
    table = [f"| what | {commit} | today | ratio | floor |", "|---|---|---|---|---|"]
    for line in lines:
        cells = [_cell(value, line.unit) for value in (line.before, line.today)]
        ratio = f"{statistics.median(line.ratios):.2f}" if line.ratios else ""
        if len(line.ratios) > 1:
            ratio += f" ({min(line.ratios):.2f}-{max(line.ratios):.2f})"
        floor = _cell(line.floor, line.unit) if line.floor is not None else ""
        table.append(f"| {line.what} | {' | '.join(cells)} | {ratio} | {floor} |")
    return "\n".join(table) + "\n"


def _cell(value: float | None, unit: str) -> str:
    return "not there" if value is None else f"{shown(value)} {unit}".strip()


class Side:
    """One of the two: `tree` has its files, `python` its package. `own`: benchmarks for which its own code is used."""

    def __init__(self, name: str, tree: Path, python: Path) -> None:
        self.name = name
        self.tree = tree
        self.python = python
        self.own: set[str] = set()
        self.cannot: dict[str, Outcome] = {}
        """Benchmarks that neither today's code nor its own measures here, with what was said."""

    def measure(self, benchmark: str, options: Sequence[str]) -> Rows:
        """Its rows; none if it cannot be run, which is tried once."""
        if benchmark in self.cannot:
            return []
        if benchmark not in self.own:
            outcome, rows = self._measure(benchmark, options, ROOT)
            if not outcome.failed:
                return rows
            if self.tree == ROOT or not (self.tree / "bench" / f"{benchmark}.py").exists():
                self.cannot[benchmark] = outcome
                return []
            print(f"{self.name}: {benchmark} by its own code, as today's fails: {_last(outcome.said)}", flush=True)
            self.own.add(benchmark)
        outcome, rows = self._measure(benchmark, [each for each in options if each == "--quick"], self.tree)
        if outcome.failed:
            self.cannot[benchmark] = outcome
        return rows

    def _measure(self, benchmark: str, options: Sequence[str], code: Path) -> tuple[Outcome, Rows]:
        with tempfile.TemporaryDirectory(prefix="hawker-compare-") as place:
            rows = Path(place, "rows.json")
            outcome = run(benchmark, [*options, f"--json={rows}"], None, python=self.python, code=code)
            return outcome, json.loads(rows.read_text()) if rows.exists() and not outcome.failed else []


def _last(said: str) -> str:
    return said.rstrip().rpartition("\n")[2]


def other(commit: str) -> Side:
    """Have the files and the environment of a commit. Raises CalledProcessError."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hawker-bench")
    tree = cache / full[:12]
    if not tree.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            made = Path(place, "tree")
            made.mkdir()
            subprocess.run(["tar", "-x", "-C", made], input=_git("archive", full), check=True)
            made.rename(tree)
    script = 'root=$1; . "$root/scripts/lib/environment.sh"; make_venv dev'
    environment = {name: value for name, value in os.environ.items() if name != "HAWKER_VENV"}
    subprocess.run(["sh", "-euc", script, "bench.compare", tree], env=environment, check=True)
    return Side(commit, tree, tree / ".venv/bin/python")


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *words], stdout=subprocess.PIPE, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT", help="what git calls a commit: a tag, a branch, a hash")
    parser.add_argument("--only", default="run", help="benchmarks, with commas between them; default: run")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each commit; default: 3")
    parser.add_argument("--quick", action="store_true", help="the smallest size, to see that it runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    chosen = given.only.split(",")
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(sorted(BENCHMARKS))}")
    if not shutil.which("git"):
        parser.error("bench.compare takes the other commit's files from git, which is not installed")
    options = [*(("--quick",) if given.quick else ()), *words[end + 1 :]]
    try:
        before = other(given.commit)
    except subprocess.CalledProcessError as error:
        parser.error(f"{given.commit} cannot be had: {error}")
    today = Side("today", ROOT, Path(sys.executable))
    table = ""
    for benchmark in chosen:
        found: dict[str, list[Rows]] = {before.name: [], today.name: []}
        for turn in range(given.rounds):
            for side in (before, today):
                found[side.name].append(side.measure(benchmark, options))
                print(f"turn {turn + 1} of {given.rounds}, {benchmark}: {side.name}", file=sys.stderr, flush=True)
        table += f"\n`bench.{benchmark}`:\n\n{markdown(given.commit, paired(found[before.name], found[today.name]))}"
    print(table)
    if given.markdown:
        given.markdown.write_text(table.lstrip())
    for side in (before, today):
        for benchmark, outcome in side.cannot.items():
            print(f"--- {side.name}: {benchmark}: {outcome.failed} ---\n{outcome.said}", file=sys.stderr)
    return 1 if today.cannot else 0


if __name__ == "__main__":
    sys.exit(main())

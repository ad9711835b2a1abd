"""What all benchmarks have in common: options, the table of their rows, and how they end.

Each is a module with `main(arguments) -> int`, run as `python -m bench.NAME`. All take `--quick`, their smallest size,
which ends in a few seconds and shows that everything still runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTLY = 3
"""The exit status of a quick run that left something out because a program is not installed."""


class Table:
    """Rows as they come: what, value, unit, aim, note; and `floor`, what the machine itself takes for the same, in the
    same unit, where that is known."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def latency(
        self, what: str, times_ms: Sequence[float], aim: str = "", note: str = "", floor: float | None = None
    ) -> None:
        ordered = sorted(times_ms)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        self.add(what, statistics.median(ordered), "ms", aim, f"p99 {p99:.2f}{', ' + note if note else ''}", floor)

    def add(
        self, what: str, value: float, unit: str, aim: str = "", note: str = "", floor: float | None = None
    ) -> None:
        self.rows.append({"what": what, "value": round(value, 3), "unit": unit, "aim": aim, "note": note})
        if floor is not None:
            self.rows[-1]["floor"] = round(floor, 3)
        print(self.lines[-1], flush=True)

    @property
    def lines(self) -> list[str]:
        """The rows for a terminal."""
        return ["{what:<58} {value:>10,.2f} {unit:<5} {aim:<12} {note}".format(**row) for row in self.rows]

    def markdown(self) -> str:
        """The rows as a table of a page in docs/."""
        lines = ["| what | value | aim | note |", "|---|---|---|---|"]
        for row in self.rows:
            what, value = row["what"].strip(), f"{shown(row['value'])} {row['unit']}".strip()
            lines.append(f"| {what} | {value} | {row['aim']} | {row['note']} |")
        return "\n".join(lines) + "\n"


def shown(value: float) -> str:
    """Three digits that say something, and no more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def options(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, with what all of them take; `doc` is the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table that docs/ has")
    return parser


def told(table: Table, given: argparse.Namespace) -> None:
    """Write the rows where the options ask for them."""
    if given.json:
        given.json.write_text(json.dumps(table.rows, indent=1))
    if given.markdown:
        given.markdown.write_text(table.markdown())


def say_machine() -> None:
    """What else runs makes the figures worse, so it stands above them."""
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n", flush=True)


def lacking(*programs: str) -> list[str]:
    """Those of these programs that are not on PATH."""
    return [program for program in programs if shutil.which(program) is None]


def left_out(*programs: str) -> int:
    """Say that a quick run did without these programs, and return its exit status."""
    print(f"not run: what needs {', '.join(programs)}, which is not installed")
    return PARTLY

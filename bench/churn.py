"""Machines that come and go while processes of their worker are killed, and what is left of them afterwards.

    python -m bench.churn [--quick] [--cycles 1000] [--seed 1] [--runtimes process,container,microvm] [--at-once 8]

As root. A market of one worker and an image made on the spot; a cycle is an order, a few things done to the machine,
and its end. Meanwhile daemon, supervisors, runtimes, programs, hypervisors and helpers get SIGKILL, each kind by turns.
Ends with status 1 when anything of the worker is left. With `--alone` nothing else works on the host, and everything
counts that it has then and had not before.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from tests.kit import belongings, leaks
from tests.kit.churning import KINDS, Churn, Report
from tests.kit.markets import running_market

from bench.command import Table, options, told

OPTIONS = ("--region", "ord", "--workers", "1", "--cpus", "1000", "--memory", "400000")
WORKER = "ord-1"
EVERY_KIND = {kind for kinds in KINDS.values() for kind in kinds}


QUICK = ("process", "container")
"""A microVM takes longer than the rest; tests/live/test_churn.py has some."""


def churn(
    cycles: int, seed: int, runtimes: Sequence[str], at_once: int, *, alone: bool = False, kills: int = sys.maxsize
) -> Report:
    """`kills`: so many at most of each kind of process."""
    before = leaks.snapshot()
    home = Path(tempfile.mkdtemp(prefix="hawker-churn-")).resolve()

    with running_market(home, OPTIONS) as market:

        async def run() -> Report:
            its = Churn(market, WORKER, seed=seed, runtimes=runtimes, at_once=at_once)
            return await its.run(cycles, kills_most=dict.fromkeys(EVERY_KIND, kills))

        report = asyncio.run(run())
    report.wrong += [f"after the worker's end: {what}" for what in belongings.ended(home / WORKER)]
    report.wrong += [f"new on the host: {what}" for what in leaks.leaked(before)] if alone else []
    if not report.wrong:
        shutil.rmtree(home)
    else:
        print(f"kept for a look: {home}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runtimes", default="process,container,microvm")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--alone", action="store_true", help="nothing else works on the host: look at all of it")
    given = parser.parse_args(arguments)
    began = perf_counter()
    if given.quick:
        report = churn(4, given.seed, QUICK, 4, kills=1)
    else:
        report = churn(given.cycles, given.seed, given.runtimes.split(","), given.at_once, alone=given.alone)
    table = Table()
    table.add(f"{report.cycles} machines made and destroyed, seed {given.seed}", perf_counter() - began, "s")
    for name in ("kills", "started", "done", "refused", "lost"):
        of: Counter[str] = getattr(report, name)
        table.add(name, of.total(), "", "", ", ".join(f"{what} {n}" for what, n in sorted(of.items())))
    table.add("what was left until the daemon's next start", len(report.late), "", "", "; ".join(report.late))
    table.add("what was left in the end", len(report.wrong), "", "0", "; ".join(report.wrong))
    told(table, given)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Machines that come and go while processes of their worker are killed, and what is left of them afterwards.

    python -m bench.churn [--cycles 1000] [--seed 1] [--runtimes process,container,microvm] [--at-once 8] [--alone]

As root. A market of one worker and an image made on the spot; a cycle is an order, a few things done to the machine,
and its end. Meanwhile daemon, supervisors, runtimes, programs, hypervisors and helpers get SIGKILL, each kind by turns.
Ends with status 1 when anything of the worker is left. With `--alone` nothing else works on the host, and everything
counts that it has then and had not before.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from tests.kit import belongings, leaks
from tests.kit.churning import Churn, Report
from tests.kit.markets import running_market

OPTIONS = ("--region", "ord", "--workers", "1", "--cpus", "1000", "--memory", "400000")
WORKER = "ord-1"


def churn(cycles: int, seed: int, runtimes: Sequence[str], at_once: int, *, alone: bool = False) -> Report:
    before = leaks.snapshot()
    home = Path(tempfile.mkdtemp(prefix="hawker-churn-")).resolve()

    with running_market(home, OPTIONS) as market:

        async def run() -> Report:
            return await Churn(market, WORKER, seed=seed, runtimes=runtimes, at_once=at_once).run(cycles)

        report = asyncio.run(run())
    report.wrong += [f"after the worker's end: {what}" for what in belongings.ended(home / WORKER)]
    report.wrong += [f"new on the host: {what}" for what in leaks.leaked(before)] if alone else []
    if not report.wrong:
        shutil.rmtree(home)
    else:
        print(f"kept for a look: {home}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runtimes", default="process,container,microvm")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--alone", action="store_true")
    chosen = parser.parse_args()
    began = perf_counter()
    report = churn(chosen.cycles, chosen.seed, chosen.runtimes.split(","), chosen.at_once, alone=chosen.alone)
    print(f"{report.cycles} cycles in {perf_counter() - began:.0f} s, {report.kills.total()} kills, seed {chosen.seed}")
    for name in ("kills", "started", "done", "refused", "lost"):
        print(f"  {name:8} {', '.join(f'{what} {n}' for what, n in sorted(getattr(report, name).items()))}")
    print(f"  late     {len(report.late)}" + "".join(f"\n    {what}" for what in report.late))
    print(f"  left     {len(report.wrong)}" + "".join(f"\n    {what}" for what in report.wrong))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

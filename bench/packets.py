"""A member of the catalog under hostile packets: `python -m bench.packets [--quick] [--count N]`.

Prints what was sent and refused, packets per second, and every broken promise; status 1 if there is one. The generator
is `tests.sim.hostile`; a small run of it is a test.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from tests.sim.hostile import throw

from bench.command import Table, options, told
from hawker.sim.platform.loop import run
from hawker.telemetry import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    packets = 2_000 if given.quick else given.count
    set_up_logs(level="critical")
    table = Table()
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="hawker-packets-") as directory:
        report = run(lambda loop: throw(loop, packets, given.seed, Path(directory)))
    took = perf_counter() - began
    for name, count in sorted(report.sent.items()):
        table.add(name, count, "")
    for why, count in sorted(report.refused.items()):
        table.add(f"refused: {why}", count, "")
    table.add("packets a second", packets / took, "1/s")
    table.add("broken promises", len(report.wrong), "", "0")
    for wrong in report.wrong:
        print(f"WRONG: {wrong}")
    told(table, given)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

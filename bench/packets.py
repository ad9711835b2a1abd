"""A member of the catalog under hostile packets: `python -m bench.packets [--count N] [--seed S]`.

Prints what was sent and refused, packets per second, and every broken promise; status 1 if there is one. The generator
is `hawker.sim.hostile`; a small run of it is a test.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from hawker.sim.hostile import throw
from hawker.sim.platform.loop import run
from hawker.telemetry import set_up_logs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.packets", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    set_up_logs(level="critical")
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="hawker-packets-") as directory:
        report = run(lambda loop: throw(loop, given.count, given.seed, Path(directory)))
    for name, count in sorted(report.sent.items()):
        print(f"{name:44} {count:>9,}")
    for why, count in sorted(report.refused.items()):
        print(f"refused: {why:35} {count:>9,}")
    print(f"{'a second':44} {given.count / (perf_counter() - began):>9,.0f}")
    for wrong in report.wrong:
        print(f"WRONG: {wrong}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

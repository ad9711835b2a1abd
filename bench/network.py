"""What a machine's network costs: attaching and detaching one, with few and with many others on the host.

    python -m bench.network

In network namespaces of its own, as root. The requests are the product's; `ip` and `nft` have no part in what is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter, process_time

from tests.kit.site import Site

from hawker.network.base import Wanted
from hawker.network.manager import Manager

MANY = 200
ROUNDS = 60


def wanted(number: int) -> Wanted:
    address = f"fdaa:0:{number % 50 + 1:x}:0:1:0:{number:x}:2"
    publish = (("tcp", 8080, 20_000 + number),)
    return Wanted(machine=f"{number:014x}", number=number % 50 + 1, address=address, publish=publish)


async def rounds(manager: Manager, pid: int, count: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {"attach": [], "attach_cpu": [], "detach": []}
    for number in range(10_000, 10_000 + count):
        began, began_cpu = perf_counter(), process_time()
        await manager.attach_namespace(wanted(number), pid)
        taken["attach"].append((perf_counter() - began) * 1000)
        taken["attach_cpu"].append((process_time() - began_cpu) * 1000)
        began = perf_counter()
        await manager.detach(f"{number:014x}")
        taken["detach"].append((perf_counter() - began) * 1000)
    return taken


def measure(many: int = MANY, count: int = ROUNDS) -> dict[str, float]:
    """Milliseconds, medians."""
    found: dict[str, float] = {}
    with Site() as site:
        manager, pid = site.worker("first"), site.process("m")
        site.run(manager.attach_namespace(wanted(0), site.process("first")))
        for others in (1, many):
            for number in range(1, others):
                site.run(manager.attach_namespace(wanted(number), site.process(f"m{number}")))
            for name, each in site.run(rounds(manager, pid, count)).items():
                found[f"{name}_ms_beside_{others}"] = round(statistics.median(each), 2)
        began = perf_counter()
        site.run(manager.reconcile({str(number): wanted(number) for number in range(many)}))
        found[f"reconcile_{many}_ms"] = round((perf_counter() - began) * 1000, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=MANY, help="machines on the host in the second part")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    for name, value in measure(chosen.machines, chosen.rounds).items():
        sys.stdout.write(f"{name:28} {value:8}\n")


if __name__ == "__main__":
    main()

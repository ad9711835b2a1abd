"""What a machine's network costs: attaching and detaching one, with few and with many others on the host.

    python -m bench.network [--quick]

In network namespaces of its own, as root. The requests are the product's; `ip` and `nft` have no part in what is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from time import perf_counter, process_time

from tests.kit.site import Site

from bench.command import Table, options, told
from hawker.network.base import Wanted
from hawker.network.manager import Manager

MANY = 200
ROUNDS = 60


def wanted(number: int) -> Wanted:
    address = f"fdaa:0:{number % 50 + 1:x}:0:1:0:{number:x}:2"
    publish = (("tcp", 8080, 20_000 + number),)
    return Wanted(machine=f"{number:014x}", number=number % 50 + 1, address=address, publish=publish)


async def rounds(manager: Manager, pid: int, count: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {"attach": [], "attach, time on a core": [], "detach": []}
    for number in range(10_000, 10_000 + count):
        began, began_cpu = perf_counter(), process_time()
        await manager.attach_namespace(wanted(number), pid)
        taken["attach"].append((perf_counter() - began) * 1000)
        taken["attach, time on a core"].append((process_time() - began_cpu) * 1000)
        began = perf_counter()
        await manager.detach(f"{number:014x}")
        taken["detach"].append((perf_counter() - began) * 1000)
    return taken


def measure(table: Table, many: int, count: int) -> None:
    with Site() as site:
        manager, pid = site.worker("first"), site.process("m")
        site.run(manager.attach_namespace(wanted(0), site.process("first")))
        for others in (1, many):
            for number in range(1, others):
                site.run(manager.attach_namespace(wanted(number), site.process(f"m{number}")))
            for name, each in site.run(rounds(manager, pid, count)).items():
                table.add(f"{name}, beside {others} on the host", statistics.median(each), "ms")
        began = perf_counter()
        site.run(manager.reconcile({str(number): wanted(number) for number in range(many)}))
        table.add(f"{many} compared with what is there", (perf_counter() - began) * 1000, "ms")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--machines", type=int, default=MANY, help="machines on the host in the second part")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(arguments)
    table = Table()
    measure(table, *((3, 2) if given.quick else (given.machines, given.rounds)))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What WebSocket's cases find through each data plane: `python -m bench.websocket [--quick]`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from tests.kit.planes import PLANES
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter
from tests.kit.websocket import Case, cases, echoing
from tests.kit.websocket import told as told_by

from bench.command import Table, options, told


async def measure(chosen: Sequence[Case], table: Table) -> None:
    async with echoing() as address:
        planes = {}
        for name in sorted(PLANES):
            router = FakeRouter(FakeRoute("web", [FakeMachine("m1", address)]))
            planes[name] = PLANES[name]()
            await planes[name].open(router, {"region": "ams", "token": "secret"})
        good: Counter[tuple[str, str]] = Counter()
        for case in chosen:
            direct = await told_by(address, "web.example", case)
            good[case.category, "the server alone"] += direct.code == case.code
            for name, plane in planes.items():
                with suppress(ConnectionError):  # the connection's end came before what was said
                    good[case.category, name] += await told_by(plane.http, "web.example", case) == direct
        for plane in planes.values():
            await plane.close()
    total = Counter(case.category for case in chosen)
    for name in ("the server alone", *sorted(PLANES)):
        for category, count in total.items():
            table.add(f"{category}: {name}", good[category, name], "", "", f"of {count}")
        passed = sum(good[category, name] for category in total)
        table.add(f"all: {name}", passed, "", "", f"of {total.total()}")


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    chosen = list(cases())
    if given.quick:
        chosen = list({case.category: case for case in chosen}.values())
    table = Table()
    asyncio.run(measure(chosen, table))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

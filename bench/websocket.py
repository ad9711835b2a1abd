"""What WebSocket's cases find through each data plane: `python -m bench.websocket` from the checkout."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from tests.kit.planes import PLANES
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter
from tests.kit.websocket import cases, echoing, told


async def main() -> None:
    total = Counter(case.category for case in cases())
    print(f"{'cases':<20} {'':>6} {'server':>12} " + " ".join(f"{name:>12}" for name in sorted(PLANES)))
    async with echoing() as address:
        planes = {}
        for name in sorted(PLANES):
            router = FakeRouter(FakeRoute("web", [FakeMachine("m1", address)]))
            planes[name] = PLANES[name]()
            await planes[name].open(router, {"region": "ams", "token": "secret"})
        good: Counter[tuple[str, str]] = Counter()
        for case in cases():
            direct = await told(address, "web.example", case)
            good[case.category, "server"] += direct.code == case.code
            for name, plane in planes.items():
                with suppress(ConnectionError):  # the connection's end came before what was said
                    good[case.category, name] += await told(plane.http, "web.example", case) == direct
        for plane in planes.values():
            await plane.close()
    for category, count in total.items():
        found = " ".join(f"{good[category, name]:>12}" for name in ("server", *sorted(PLANES)))
        print(f"{category:<20} {count:>6} {found}")
    print(f"{'all':<20} {total.total():>6}")


if __name__ == "__main__":
    asyncio.run(main())

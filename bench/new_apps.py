"""How long a proxy does not know of an app that was made a moment ago: many are made at a rate that waits for nobody.

    python -m bench.new_apps [--quick] [--rate 200] [--count 200]

A worker with its proxy, an edge with a broker, and another edge, each an agent of its own. An app and its machine,
which does not run, are made over the API of the first edge. From the answer on it is looked when the catalog of each
agent has the rows by which its proxy finds the app. 0: it had them before the answer came.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import apsw
from tests.kit.edges import Region, region

from bench.command import Table, options, told

LOOK_S = 0.004
GIVE_UP_S = 60.0
AGAIN_S = 0.1
PROGRAM = "/bin/true"
SERVED = "select s.app from services s join apps a on a.id = s.app where s.ports <> '[]'"
"""The apps that a proxy with this catalog finds; what state the machine is in tells it whether to start it."""


class ListenProbe:
    """When each app was known to each agent, as its file says."""

    def __init__(self, it: Region) -> None:
        self._files = {
            name: apsw.Connection(str(agent.directory / "catalog.db"), flags=apsw.SQLITE_OPEN_READONLY)
            for name, agent in it.agents.items()
        }
        self.known: dict[str, dict[str, float]] = {name: {} for name in self._files}
        self._versions: dict[str, object] = dict.fromkeys(self._files)

    def look(self) -> None:
        for name, db in self._files.items():
            version = db.execute("pragma data_version").fetchall()[0][0]
            if version != self._versions[name]:
                self._versions[name] = version
                now = monotonic()
                for (app,) in db.execute(SERVED):
                    self.known[name].setdefault(app, now)

    async def until_all(self, count: int) -> None:
        gives_up = monotonic() + GIVE_UP_S
        while any(len(each) < count for each in self.known.values()) and monotonic() < gives_up:
            self.look()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        for db in self._files.values():
            db.close()


async def made(it: Region, number: int) -> float:
    """When the answer that it is there had come."""
    name = f"new-{number}"
    service = {"protocol": "tcp", "internal_port": 8080, "ports": [{"port": 80, "handlers": ["http"]}]}
    config = {"image": "host", "init": {"exec": [PROGRAM]}, "services": [service], "restart": {"policy": "no"}}
    await it.client.ok("POST", "/apps", {"app_name": name, "org_slug": "personal"})
    body = {"region": "ord", "config": config, "skip_launch": True}
    while True:
        answer = await it.client.call("POST", f"/apps/{name}/machines", body)
        if answer.status != 409:  # the worker was too busy to answer in time
            assert answer.status == 200, answer
            return monotonic()
        await asyncio.sleep(AGAIN_S)


def at(share: float, times: Sequence[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def measure(table: Table, rate: float, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as home:
        async with region(Path(home), workers=1, edges=2) as it:
            listen_probe = ListenProbe(it)
            loop = asyncio.get_running_loop()
            began = loop.time()
            answered: dict[str, float] = {}

            async def one(number: int) -> None:
                await asyncio.sleep(began + number / rate - loop.time())
                answered[f"new-{number}"] = await made(it, number)

            work = asyncio.gather(listen_probe.until_all(count), *(one(number) for number in range(count)))
            await work
            took = max(answered.values()) - min(answered.values())
            for name, known in listen_probe.known.items():
                late = [max(0.0, known.get(app, float("inf")) - at_) * 1000 for app, at_ in answered.items()]
                what = "its worker's proxy" if name.startswith("worker") else name
                note = f"p99 {at(0.99, late):.0f}, most {max(late):.0f}; made in {took:.2f} s"
                table.add(f"{count} apps, {rate:g}/s: known to {what}", at(0.5, late), "ms", "p99 100", note)
            listen_probe.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args(arguments)
    table = Table()
    asyncio.run(measure(table, given.rate, 5 if given.quick else given.count))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

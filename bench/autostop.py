"""A load like a saw's teeth and machines that stop when they idle: `python -m bench.autostop` from the checkout.

How many machine-seconds are used, beside those of somebody who knows the load beforehand and starts and stops at once;
and whether any request met a machine that was being stopped. All requests are POST, which nobody sends twice: one that
met a stop would fail. Times are scaled down: a minute of idleness is a second or two here.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tests.kit.edges import Region, region
from tests.kit.load import Report, steady

from bench.command import Table, options, told

APP = "saw"
SOFT = 2


class Saw(msgspec.Struct, frozen=True):
    """`machines` there are; the rate rises from `low` to `high` requests a second within half of `period_s`, falls to
    `low` at once, stays there for the other half, and so on, `teeth` times. Each request takes `answer_s`. `idle_s` is
    the proxies' setting."""

    machines: int = 4
    low: float = 5.0
    high: float = 120.0
    period_s: float = 20.0
    teeth: int = 6
    answer_s: float = 0.05
    idle_s: float = 2.0

    def rate(self, at: float) -> float:
        part = 2 * (at % self.period_s) / self.period_s
        return self.low + (self.high - self.low) * part if part < 1 else self.low

    def wanted(self, at: float) -> int:
        """Machines, by Little's law."""
        return max(1, math.ceil(self.rate(at) * self.answer_s / SOFT))

    @property
    def ideal(self) -> float:
        """Machine-seconds."""
        steps = 1000
        return self.teeth * self.period_s / steps * sum(self.wanted(n * self.period_s / steps) for n in range(steps))

    def routing(self) -> Mapping[str, Any]:
        return {"idle_s": self.idle_s, "idle_look_s": self.idle_s / 5, "drain_s": self.idle_s}


FULL = Saw()
QUICK = Saw(machines=2, high=40.0, period_s=2.0, teeth=1, idle_s=0.5)


class Used(msgspec.Struct, frozen=True):
    """`seconds` that machines ran, from the begin of each start to the end of its stop; `starts` and `stops` of all."""

    report: Report
    seconds: float
    ideal: float
    starts: int
    stops: int

    def tell(self, table: Table) -> None:
        table.add("machine-seconds used", self.seconds, "s", "", f"{self.starts} starts, {self.stops} stops by proxies")
        table.add("machine-seconds of who knows the load beforehand", self.ideal, "s")
        table.add("used / ideal", self.seconds / self.ideal, "times")
        table.add("requests not answered well", self.report.sent - self.report.fine, "", "0", str(self.report))


async def sawn(it: Region, saw: Saw) -> Used:
    service = {"autostop": "stop", "concurrency": {"type": "requests", "soft_limit": SOFT, "hard_limit": 50}}
    env = {"ANSWER_S": str(saw.answer_s)}
    machines = [await it.machine(APP, env=env, service=service) for _ in range(saw.machines)]
    await it.known(machines, "stopped")
    edge = it.agents["edge-1"].http
    async with steady(edge, f"{APP}.localhost", rate=saw.rate, methods=("POST",)) as load:
        await asyncio.sleep(saw.teeth * saw.period_s)
        ended = {machine: it.events(machine) for machine in machines}
    lives = {machine: list(_lives(events)) for machine, events in ended.items()}
    began = min(begin for each in lives.values() for begin, _ in each)
    end = began + saw.teeth * saw.period_s
    seconds = sum(min(stop, end) - begin for each in lives.values() for begin, stop in each)
    return Used(
        report=load.since(),
        seconds=seconds,
        ideal=saw.ideal,
        starts=sum(len(each) for each in lives.values()),
        stops=sum(stop < math.inf for each in lives.values() for _, stop in each),
    )


def _lives(events: list[tuple[int, str, str]]) -> list[tuple[float, float]]:
    """When a machine ran, from and to, in seconds of the wall clock; inf: still."""
    found: list[tuple[float, float]] = []
    for at_ms, type, status in events:
        if (type, status) == ("start", "starting"):
            found.append((at_ms / 1000, math.inf))
        elif (type, status) == ("stop", "stopped") and found:
            found[-1] = found[-1][0], at_ms / 1000
    return found


async def measure(saw: Saw, table: Table) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with region(Path(home), routing=dict(saw.routing())) as it:
            (await sawn(it, saw)).tell(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--teeth", type=int, default=FULL.teeth)
    given = parser.parse_args(arguments)
    table = Table()
    asyncio.run(measure(QUICK if given.quick else replace(FULL, teeth=given.teeth), table))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

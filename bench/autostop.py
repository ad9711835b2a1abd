"""A load like a saw's teeth and machines that stop when they idle: `python -m bench.autostop` from the checkout.

How many machine-seconds are used, beside those of somebody who knows the load beforehand and starts and stops at once;
and whether any request met a machine that was being stopped. All requests are POST, which nobody sends twice: one that
met a stop would fail. Times are scaled down: a minute of idleness is a second or two here.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tests.kit.edges import Region, region
from tests.kit.load import Report, steady

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


class Used(msgspec.Struct, frozen=True):
    """`seconds` that machines ran, from the begin of each start to the end of its stop; `starts` and `stops` of all."""

    report: Report
    seconds: float
    ideal: float
    starts: int
    stops: int

    def __str__(self) -> str:
        return (
            f"{self.report}\n{self.seconds:.0f} machine-seconds beside {self.ideal:.0f} ideal "
            f"({self.seconds / self.ideal:.2f}), {self.starts} starts, {self.stops} stops by the proxies"
        )


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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teeth", type=int, default=6)
    saw = Saw(teeth=parser.parse_args().teeth)
    with tempfile.TemporaryDirectory() as home:
        async with region(Path(home), routing=dict(saw.routing())) as it:
            print(await sawn(it, saw))


if __name__ == "__main__":
    asyncio.run(main())

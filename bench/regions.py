"""How long twelve agents in three regions need to agree again: `python -m bench.regions`, as root.

Real agents as processes in network namespaces, real sockets; the network between them adds no delay and loses nothing
but what is cut. `tests/live/test_three_regions.py` goes through the same steps. Each prints its times and fails when
what it waits for does not come.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic

from tests.kit.markets import Answer
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.regions import FAR_ROOM, REGIONS, Fleet, three_regions

from bench.command import Table, options, told

ORDERS = 6
APPS = 8
ANSWER_S = 30.0


class Times(Table):
    """What, how long, a note."""

    def took(self, what: str, seconds: float, note: str = "") -> None:
        self.add(what, seconds, "s", "", note)

    def spread(self, what: str, seconds: Sequence[float], note: str = "") -> None:
        most = f"most {max(seconds) * 1000:.0f} ms, of {len(seconds)}"
        self.add(what, statistics.median(seconds) * 1000, "ms", "", f"{most}, {note}" if note else most)


async def start(fleet: Fleet, times: Times) -> None:
    """All agents at once, with empty disks."""
    began = monotonic()
    fleet.start(fleet.agents)
    times.took("12 agents started -> the last one is up", await fleet.up())
    await fleet.agreed()
    times.took("12 agents started -> all agree", monotonic() - began)


async def place(fleet: Fleet, times: Times) -> None:
    """Machines through every broker, into its own region and into another; and apps in all regions."""
    apps = ["web", *(f"app-{n}" for n in range(APPS))]
    for app in apps:
        await fleet.make_app(app)
    began = monotonic()
    took = []
    for region in REGIONS:  # which may not have heard of the app
        _, seconds = await _filled(fleet, REGIONS[0], "web", region)
        took.append(seconds)
    times.spread("an order into any region, just after its app was made", took)
    moments = await fleet.seen("select id from apps", fleet.agents, len(apps))
    times.spread("apps made -> known to a node, in any region", [moment - began for moment in moments])
    for into in (0, 1):
        took, known = [], []
        for n, through in enumerate(REGIONS):
            region = REGIONS[(n + into) % len(REGIONS)]
            for _ in range(ORDERS):
                answer, seconds = await _filled(fleet, through, "web", region)
                filled = monotonic()
                shown = f"select id from machines where id = '{answer.body['id']}'"
                moments = await fleet.seen(shown, [agent.name for agent in fleet.in_region(region)])
                took.append(seconds)
                known.append(max(moments) - filled)
        where = ("the broker's region", "another region")[into]
        times.spread(f"an order into {where}", took)
        times.spread(f"filled in {where} -> known to all nodes there", known)
    await asyncio.gather(*(_first_machine(fleet, app, region) for app in apps[1:] for region in REGIONS))
    began = monotonic()
    moments = await fleet.seen("select app from app_regions where app <> 'web'", fleet.agents, APPS * len(REGIONS))
    times.spread("first machines of apps -> known to a node, in any region", [moment - began for moment in moments])
    times.took("then all agree", await fleet.agreed())


async def _first_machine(fleet: Fleet, app: str, region: str) -> None:
    await _filled(fleet, region, app, region)


async def _filled(fleet: Fleet, through: str, app: str, region: str) -> tuple[Answer, float]:
    """An order, placed again while workers are too slow to offer anything: twelve agents may have one core between
    them. Returns the answer and the seconds that the last one took."""
    began = monotonic()
    answer, seconds = await fleet.order(through, app, region)
    while "no_answer" in str(answer.body) and monotonic() - began < ANSWER_S:
        answer, seconds = await fleet.order(through, app, region)
    assert answer.status == 200, answer
    return answer, seconds


async def partition(fleet: Fleet, times: Times) -> None:
    """Cut `ord` from the others, and `syd` in two, until membership has declared the deaths. Every broker places on
    what it reaches, from the first moment."""
    near = ["syd-1", "syd-broker"]
    remote_proxy = ["syd-2", "syd-3"]
    fleet.network.cut("ord")
    fleet.network.cut(FAR_ROOM)
    began = monotonic()
    await _place_apart(fleet, times, "at once")
    for here, there in ((near, remote_proxy), (remote_proxy, near)):
        dead = f"select name from members where status = 'dead' and name in {tuple(there)}"
        await fleet.seen(dead, here, len(there))
    times.took("two regions cut -> a halved one takes the other half for dead", monotonic() - began)
    await _place_apart(fleet, times, "later")
    cut_s = monotonic() - began
    fleet.network.mend("ord")
    fleet.network.mend(FAR_ROOM)
    times.took("healed -> all agree", await fleet.agreed(), f"after {cut_s:.0f} s")


async def _place_apart(fleet: Fleet, times: Times, when: str) -> None:
    reached = [(region, region) for region in REGIONS] + [("mad", "syd")]  # that is, syd's other half
    took = []
    for through, region in reached:
        for _ in range(ORDERS // 2):
            answer, seconds = await fleet.order(through, "web", region)
            assert answer.status == 200, (through, region, answer)
            took.append(seconds)
    times.spread(f"an order while regions are cut, {when}", took)
    for through, region in (("ord", "mad"), ("mad", "ord"), ("syd", "mad")):
        answer, seconds = await fleet.order(through, "web", region)
        assert (answer.status, "no_answer" in str(answer.body)) == (409, True), answer
        times.took(f"refused: {through} -> {region}, {when}", seconds)


async def lose_disk(fleet: Fleet, times: Times) -> None:
    """A worker comes back with nothing, under its old name: what the others know of its machines goes."""
    name = "mad-2"
    others = [agent.name for agent in fleet.in_region("mad") if agent.name != name]
    shown = f"select id from machines where worker = '{name}'"
    count = len(fleet.ask(others[0], shown))
    assert count, f"{name} had machines"
    fleet.destroy(name)
    began = monotonic()
    fleet.start([name])
    await fleet.seen(shown, others, 0)
    times.took("worker back without its disk -> its old machines are gone", monotonic() - began, f"{count} machines")
    await fleet.agreed()
    times.took("worker back without its disk -> all agree", monotonic() - began)


async def kill_half(fleet: Fleet, times: Times) -> None:
    """kill -9 of two workers in each region, those that everybody was told to join among them."""
    killed = [f"{region}-{n}" for region in REGIONS for n in (1, 2)]
    programs = {name: sorted(fleet.programs(name)) for name in killed}
    assert any(programs.values()), "machines run on them"
    fleet.kill(killed)
    took, refused = [], []
    for region in REGIONS:
        for _ in range(ORDERS):
            answer, seconds = await fleet.order(region, "web", region)
            refused += [answer] if answer.status != 200 else []
            took.append(seconds)
    times.spread("an order just after half of the agents were killed", took, f"{len(refused)} refused")
    assert refused == []
    began = monotonic()
    fleet.start(killed)
    await fleet.agreed()
    times.took("the killed half started again -> all agree", monotonic() - began)
    assert {name: sorted(fleet.programs(name)) for name in killed} == programs, "no program was touched"


STEPS = (start, place, partition, lose_disk, kill_half)
QUICK = (start, place, lose_disk)
"""Without those that wait until membership has given up somebody."""


async def measure(steps: Sequence[Callable[[Fleet, Times], Awaitable[None]]], times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="hawker-regions-") as home:
        async with three_regions(Path(home)) as fleet:
            for step in steps:
                await step(fleet, times)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    if reason := missing_for_namespaces():
        raise SystemExit(reason)
    times = Times()
    asyncio.run(measure(QUICK if given.quick else STEPS, times))
    told(times, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

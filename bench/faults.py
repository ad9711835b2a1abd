"""What users notice of faults: `python -m bench.faults [NAME ...]`; as root also networks' faults.

A region of real agents, each a process of its own: workers with their proxies, an edge before them, an app with a
machine on each of two workers, a steady load at the edge on a schedule that waits for nobody. Then something breaks.
`tests/live/test_faults.py` holds short forms of the same steps to what is promised.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from tests.kit.doors import ANSWERS
from tests.kit.edges import USER, Region, region, region_of_hosts
from tests.kit.load import Load, Report, at_once, steady
from tests.kit.markets import Client
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.regions import read
from tests.kit.stallable import STALLS
from tests.kit.waiting import eventually, until

from bench.command import Table, options, told

APP = "web"
METHODS = ("GET",) * 9 + ("POST",)
RUNNING = "select id from machines where id = '{}' and state = 'started'"


class Sizes(msgspec.Struct, frozen=True):
    """Requests a second; how long a fault lasts, in seconds; how long all must be well afterwards."""

    rate: float
    hold_s: float
    calm_s: float


SHORT = Sizes(rate=60, hold_s=1.0, calm_s=0.4)
LONG = Sizes(rate=200, hold_s=20.0, calm_s=2.0)


@asynccontextmanager
async def served(
    it: Region, sizes: Sizes, *, service: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Load]:
    """The app with a machine on each of two workers that run, and users who are there from now on."""
    machines = [
        await it.machine(APP, worker=f"worker-{n}", started=True, service=service, restart={"policy": "always"}, **more)
        for n in (1, 2)
    ]
    await it.known(machines, "started")
    edge = it.agents["edge-1"].http
    async with steady(edge, f"{APP}.localhost", rate=sizes.rate, methods=METHODS) as load:
        await load.count(30)
        await load.flows(sizes.calm_s)
        await until(lambda: {each.split()[0] for each in load.by()} == set(machines), 30.0)
        yield load
    for machine in machines:
        await it.client.ok("DELETE", f"/apps/{APP}/machines/{machine}?force=true")


def of_worker(it: Region, load: Load, worker: str) -> tuple[str, int]:
    """The machine of a worker, and the process of its program."""
    for said in load.by():
        machine, pid = said.split()
        if it.worker_of(machine) == worker:
            return machine, int(pid)
    raise AssertionError(f"no machine of {worker} has answered")


async def machine_killed(it: Region, load: Load, sizes: Sizes) -> Report:
    """kill -9 of a program; its worker starts it again."""
    machine, pid = of_worker(it, load, "worker-1")
    mark = load.now()
    os.kill(pid, signal.SIGKILL)

    async def back() -> bool:
        return any(said.startswith(machine) and not said.endswith(f" {pid}") for said in load.by(mark))

    await eventually(back, "the machine answers again", 30.0)
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def machine_hung(it: Region, load: Load, sizes: Sizes) -> Report:
    """SIGSTOP of a program, and after a while SIGCONT. The kernel takes connections for it all the time."""
    _, pid = of_worker(it, load, "worker-1")
    mark = load.now()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(sizes.hold_s)
    os.kill(pid, signal.SIGCONT)
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def agent_killed(it: Region, load: Load, sizes: Sizes, name: str = "worker-1") -> Report:
    """kill -9 of an agent; it is started again after a while. A worker's machines run on."""
    mark = load.now()
    await it.kill(name)
    await asyncio.sleep(sizes.hold_s)
    it.start(name)
    await it.up(name)
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def agent_hung(it: Region, load: Load, sizes: Sizes, name: str = "worker-1") -> Report:
    mark = load.now()
    it.signal(name, signal.SIGSTOP)
    await asyncio.sleep(sizes.hold_s)
    it.signal(name, signal.SIGCONT)
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def agent_restarted(it: Region, load: Load, sizes: Sizes, name: str) -> Report:
    """SIGTERM, and started again at once."""
    mark = load.now()
    it.signal(name, signal.SIGTERM)
    status = await it.ended(name)
    it.start(name)
    await it.up(name)
    await load.flows(sizes.calm_s)
    assert status == 0, status
    return load.since(mark)


async def begun_anew(it: Region, load: Load, sizes: Sizes, name: str, *, by: signal.Signals = signal.SIGHUP) -> Report:
    """An agent is told to begin anew in place, or is made to: by a signal after which its event loop stands still."""
    mark = load.now()
    before = it.times(name, "restart.done")
    it.signal(name, by)

    async def done() -> bool:
        return it.times(name, "restart.done") > before

    await eventually(done, f"{name} has begun anew", 60.0)
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def worker_cut_off(it: Region, load: Load, sizes: Sizes) -> Report:
    """The worker's host loses its network without a word; its rows stay."""
    assert it.network is not None
    mark = load.now()
    it.network.cut("of-worker-1")
    await asyncio.sleep(sizes.hold_s)
    it.network.mend("of-worker-1")
    await load.flows(sizes.calm_s)
    return load.since(mark)


async def catalog_stopped(it: Region, load: Load, sizes: Sizes, name: str = "edge-1") -> Report:
    """An agent hears nothing of the catalog, and tells nothing: all that goes to and from the port of its node, and of
    the others', is lost. Meanwhile a machine that it takes for running is stopped, and another one is asleep."""
    assert it.network is not None
    ports = ", ".join(str(agent.port) for agent in it.agents.values())
    machine = await it.machine("apart")
    await it.known([machine], "stopped")
    assert (await it.get("apart"))[0] == 200
    await it.known([machine], "started")
    rules = ["add table inet catalog"]
    for chain in ("input", "output"):
        rules += [
            f"add chain inet catalog {chain} {{ type filter hook {chain} priority 0; }}",
            *(
                f"add rule inet catalog {chain} {kind} {at} {{ {ports} }} drop"
                for kind in ("tcp", "udp")
                for at in ("dport", "sport")
            ),
        ]
    mark = load.now()
    _nft(it, name, rules)
    other = it.agents["edge-2"]
    client = Client(f"http://{other.address}:{other.port}", USER)
    try:
        await client.ok("POST", f"/apps/apart/machines/{machine}/stop")
        await it.known([machine], "stopped", ["edge-2"])
    finally:
        await client.close()
    assert read(it.agents[name].directory / "catalog.db", RUNNING.format(machine)) == [(machine,)]
    assert (await it.get("apart"))[0] == 200
    await asyncio.sleep(sizes.hold_s)
    _nft(it, name, ["delete table inet catalog"])
    await load.flows(sizes.calm_s)
    return load.since(mark)


def _nft(it: Region, name: str, rules: list[str]) -> None:
    assert it.network is not None
    with it.network.inside(name):
        subprocess.run(["nft", "-f", "-"], input="\n".join(rules) + "\n", text=True, check=True)


async def standby_started(it: Region, gone: Callable[[], Awaitable[None]]) -> float:
    """A machine on `worker-2`, and one on `worker-1` that stands by for it, when the worker is `gone`. Returns the
    seconds until the standby answers; it was started once."""
    primary = await it.machine("spare", worker="worker-2", started=True)
    standby = await it.machine("spare", worker="worker-1", standbys=[primary], services=[])
    await it.known([primary], "started")
    await it.known([standby], "stopped")
    began = monotonic()
    await gone()

    async def started() -> bool:
        return it.state(standby) == "started"

    await eventually(started, "the machine that stands by has started", 60.0)
    took = monotonic() - began
    assert it.starts(standby, "proxy standby: worker worker-2 is gone") == 1
    assert it.starts(standby, "") == 1
    return took


async def both_at_once(it: Region, rounds: int) -> None:
    """A sleeping machine is asked for at both edges in the same moment, again and again. In every other round they know
    already that it sleeps; in the others they may still take it for running."""
    machine = await it.machine("both", program=ANSWERS)
    addresses = [it.agents[name].http for name in ("edge-1", "edge-2")]

    async def stopped() -> bool:
        return it.state(machine) == "stopped"

    for number in range(rounds):
        await eventually(stopped, "the machine has stopped")
        if not number % 2:
            await it.known([machine], "stopped")
        answers = await at_once(addresses, "both.localhost", 2)
        assert answers == {200: 2}, (number, answers)
        assert it.starts(machine) == number + 1
        await it.client.ok("POST", f"/apps/both/machines/{machine}/stop")


Fault = Callable[[Region, Load, Sizes], Awaitable[Report]]
FAULTS: dict[str, Fault] = {
    "machine killed": machine_killed,
    "machine hung": machine_hung,
    "worker and its proxy killed": agent_killed,
    "worker and its proxy hung": agent_hung,
    "edge restarted": partial(agent_restarted, name="edge-1"),
    "edge begun anew": partial(begun_anew, name="edge-1"),
    "edge's loop stands still": partial(begun_anew, name="edge-1", by=STALLS["busy"]),
    "worker begun anew": partial(begun_anew, name="worker-1"),
    "edge killed": partial(agent_killed, name="edge-1"),
}
APART: dict[str, Fault] = {
    "worker killed, its proxy apart": partial(agent_killed, name="worker-1"),
    "worker's proxy killed": partial(agent_killed, name="door-1"),
}
NETWORK: dict[str, Fault] = {"worker cut off": worker_cut_off, "catalog stopped": catalog_stopped}
BUSY = {"ANSWER_S": "0.05"}


async def measure(table: Table, names: Sequence[str], sizes: Sizes, rounds: int) -> None:
    """Every fault with a region of its own, so that none is the heir of another."""
    kinds: list[tuple[Mapping[str, Fault], Callable[..., AbstractAsyncContextManager[Region]], dict[str, Any]]]
    kinds = [(FAULTS, region, {"edges": 2}), (APART, region, {"doors": True})]
    if not missing_for_namespaces():
        kinds.append((NETWORK, region_of_hosts, {"edges": 2}))
    for faults, made, its in kinds:
        for name, fault in faults.items():
            if names and name not in names:
                continue
            with tempfile.TemporaryDirectory() as home:
                async with made(Path(home), **its) as it, served(it, sizes, env=BUSY) as load:
                    report = await fault(it, load, sizes)
                    table.add(f"{name}: well after", report.recovered_s, "s", "", str(report))
    if not names or "standby" in names:
        for gone_s in (15.0, 3.0):
            with tempfile.TemporaryDirectory() as home:
                async with region(Path(home), edges=2, routing={"gone_s": gone_s}) as it:
                    took = await standby_started(it, partial(it.kill, "worker-2"))
                    table.add(f"standby, gone_s {gone_s:g}: answers after its worker's kill -9", took, "s")
    if not names or "two edges" in names:
        with tempfile.TemporaryDirectory() as home:
            async with region(Path(home), workers=1, edges=2) as it:
                await both_at_once(it, rounds)
                table.add(f"two edges asked at once, {rounds} times: starts", rounds, "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join([*FAULTS, *APART, *NETWORK, 'standby', 'two edges'])}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=500, help="of two edges asked at once")
    parser.add_argument("--hold", type=float, default=LONG.hold_s, help="seconds that a fault lasts")
    given = parser.parse_args(arguments)
    table = Table()
    if given.quick:  # tests/live/test_faults.py goes through all of them in this size
        asyncio.run(measure(table, ["machine killed"], SHORT, 2))
    else:
        sizes = msgspec.structs.replace(LONG, hold_s=given.hold)
        asyncio.run(measure(table, given.names, sizes, given.rounds))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""kill -9 of a real worker daemon, again and again, while fifty machines are created, started and stopped.

Afterwards every acknowledged operation is there, every machine's process is as its record says, nothing is left over,
and no program that nobody touched was restarted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.kit.cgroups import machine_groups
from tests.kit.markets import SLEEPER, Client, Market, running_market
from tests.kit.tiers import full
from tests.kit.waiting import eventually

from hawker.client.wire import PeerUnreachable
from hawker.store.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(150)]

BYSTANDERS, ROUNDS_MAX = 10, 400
TARGETS = {"create": "started", "start": "started", "stop": "stopped", "destroy": "destroyed"}


@pytest.fixture
def market(tmp_path: Path) -> Iterator[Market]:
    options = ("--region", "ord", "--workers", "1", "--cpus", "1000", "--memory", "400000")
    with running_market(tmp_path / "market", options) as market:
        yield market


class Life:
    """One machine's history as its client saw it."""

    def __init__(self) -> None:
        self.id = ""
        self.acknowledged = ""  # the last operation that was answered with success
        self.doubtful: set[str] = set()  # those sent after it whose answer never came

    def ends_in(self) -> set[str]:
        return {TARGETS[op] for op in (self.acknowledged, *self.doubtful) if op}


async def operate(client: Client, life: Life, op: str) -> None:
    """Do one operation; note whether it was acknowledged. Connections break when the daemon dies: that is the point."""
    try:
        if op == "create":
            answer = await client.call("POST", "/apps/k/machines", {"region": "ord", "config": SLEEPER})
            if answer.status == 200:
                life.id = answer.body["id"]
        elif op == "destroy":
            answer = await client.call("DELETE", f"/apps/k/machines/{life.id}?force=true")
        else:
            answer = await client.call("POST", f"/apps/k/machines/{life.id}/{op}")
    except PeerUnreachable:
        life.doubtful.add(op)
        return
    if answer.status == 200:
        life.acknowledged, life.doubtful = op, set()
    elif answer.status >= 500:
        life.doubtful.add(op)


async def live_through(client: Client, rng: Random, enough: asyncio.Event) -> Life:
    life = Life()
    await operate(client, life, "create")
    while not life.id:  # while the daemon is away, and it is killed soon after it is back; in the end it is left alone
        life.doubtful.clear()
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        await operate(client, life, "create")
    for _ in range(ROUNDS_MAX):
        await operate(client, life, rng.choice(("start", "stop")))
        await asyncio.sleep(rng.uniform(0.0, 0.2))
        if enough.is_set():
            break
    if rng.random() < 0.3:
        await operate(client, life, "destroy")
    return life


async def kill_now_and_then(market: Market, rng: Random, kills: int, enough: asyncio.Event) -> None:
    """Kill the daemon at random moments, each time soon after it serves again."""
    for _ in range(kills):
        await asyncio.sleep(rng.uniform(0.1, 0.5))
        pid = market.pid("ord-1")
        market.kill("ord-1")

        async def is_back(pid: int = pid) -> bool:
            async with market.client() as client:
                workers = await client.ok("GET", "/hawker/workers")
            return all(w["reachable"] for w in workers) and market.pid("ord-1") != pid

        await eventually(is_back, "the daemon is back", 30)
    enough.set()


@pytest.mark.parametrize(("machines_made", "kills"), [(20, 3), *full((50, 8))])
async def test_nothing_acknowledged_is_lost_and_nothing_is_left_over(
    market: Market, machines_made: int, kills: int
) -> None:
    rng = Random(20261121)
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "k"})
        await client.ok("POST", "/apps", {"app_name": "calm"})
        order = {"region": "ord", "config": SLEEPER}
        calm = [await client.ok("POST", "/apps/calm/machines?wait=true", order) for _ in range(BYSTANDERS)]
        before = programs()

        enough = asyncio.Event()
        killer = asyncio.create_task(kill_now_and_then(market, rng, kills, enough))
        lives = await asyncio.gather(
            *(live_through(client, Random(rng.random()), enough) for _ in range(machines_made))
        )
        await killer
        await eventually(lambda: settled(client), "every run has ended", 60)

        machines = {m["id"]: m for m in await client.ok("GET", "/apps/k/machines?include_deleted=true")}
        running = programs()
        for life in lives:
            assert life.id in machines, "an acknowledged machine is there"
            assert machines[life.id]["state"] in life.ends_in(), (life.__dict__, machines[life.id])
        for machine in machines.values():
            alive = len(running.get(machine["id"], ()))
            assert alive == (1 if machine["state"] == "started" else 0), machine
        for machine in calm:
            assert running[machine["id"]] == before[machine["id"]], "a program nobody touched is the same process"
        ours = set(machines) | {m["id"] for m in calm}
        assert not [m for m in running if m not in ours and belongs_to(market, running[m])]

        kept = {p.name for p in (market.home / "ord-1" / "process" / "work").iterdir()}
        gone = {i for i, m in machines.items() if m["state"] == "destroyed"}
        assert not kept & gone, "no file of a destroyed machine is left"
        started = {i for i, m in machines.items() if m["state"] == "started"} | {m["id"] for m in calm}
        assert {group.partition(".")[0] for group in machine_groups(market.home / "ord-1" / "process")} <= started

        resumed = (market.home / "ord-1.log").read_text().count('"event": "run.resumed"')
        print(f"{kills} kills, {resumed} runs resumed, {len(machines)} machines, {len(gone)} destroyed")
    report = verify(market.database("ord-1"))
    assert report.ok, report.faults


async def settled(client: Client) -> bool:
    """No run is active. False while the worker is away."""
    try:
        query = {"query": "select count(*) from run where status in ('active', 'parked')", "on": "workers"}
        answer = await client.call("POST", "/hawker/sql", query)
    except PeerUnreachable:
        return False
    return answer.status == 200 and [row[1] for row in answer.body["rows"]] == [0]


def programs() -> dict[str, list[tuple[int, str]]]:
    """Live processes by the machine they say they belong to: pid and start time."""
    found: dict[str, list[tuple[int, str]]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        entry: Any = next((e for e in environ.split(b"\0") if e.startswith(b"FLY_MACHINE_ID=")), None)
        if entry and fields[0] not in "ZX":
            found.setdefault(entry.partition(b"=")[2].decode(), []).append((int(pid), fields[19]))
    return found


def belongs_to(market: Market, processes: list[tuple[int, str]]) -> bool:
    """Whether a process works in this market's directory."""
    try:
        return os.readlink(f"/proc/{processes[0][0]}/cwd").startswith(str(market.home))
    except OSError:
        return False

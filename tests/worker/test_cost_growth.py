"""What a worker does for one machine costs as much with 10,000 other rows of every kind as with ten.

SQLite itself counts: its statements, and the steps it takes in them. A row that is read in vain is seen here, whatever
else the machine that runs the tests is doing.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request as HttpRequest
from tests.kit.counting import MARK, Count, Counts, counting, fill
from tests.kit.sim_worker import APP, SimWorker, a_worker, machine_config, order
from tests.kit.virtual_time import run_in_virtual_time

from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.http.call import Call
from hawker.model.fleet_calls import ListRuns
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.machine_calls import ListMachines
from hawker.model.market import Ask, Reservation
from hawker.model.rows import (
    AppRow,
    CheckRow,
    ClaimRow,
    DecisionRow,
    EventRow,
    FillRow,
    LeaseRow,
    MachineRow,
    PortRow,
    PublishedRow,
    ReservationRow,
    Row,
    RunRow,
    TallyRow,
    VersionRow,
)
from hawker.sim.hosts.world import Program
from hawker.worker.api.runs import RunsApi
from hawker.worker.machine.projections import projections
from hawker.worker.publishing import Publishing

FEW, MANY = 10, 10_000
FIRST = 10_000
PORTS = range(20_000, 60_000)
"""Every second one of the first half is given out when there are many rows."""
HOUR_MS = 3600_000
RUNS_S = 60.0
AT_REST_S = 5.0
GROWTH_MOST = 1.1
"""A deeper index takes a step more; a look at every other row would take a thousand times as many."""


def others(now_ms: int) -> list[Row]:
    """A row of each kind that has nothing to do with the machine in question. `MARK` is where each has its number."""
    it, number = f"other-{MARK}", int(MARK)
    one = Resources(cpus_shared=1, memory_mib=256, machines=1)
    config = machine_config(image="app:1", services=[{"internal_port": 80, "protocol": "tcp"}])
    times = {"created_at_ms": now_ms, "updated_at_ms": now_ms}
    machine: dict[str, Any] = {"name": it, "region": "ord", "version": it, "config": config, "resources": one, **times}
    run: dict[str, Any] = {"flow_version": 1, "args": {}, "steps": ["launch"], "cause": "a test", "source": "user"}
    run |= {"trace": "", "started_at_ms": now_ms, "updated_at_ms": now_ms}
    published: dict[str, Any] = {"tier": "region", "of": "machines", "number": number, "at_ms": now_ms}
    machine |= {"cause": "a test", "private_ip": "fdaa::1"}
    return [
        MachineRow(id=it, app="other", state=State.stopped, desired="stopped", **machine),
        MachineRow(id=f"{it}-gone", app="other", state=State.destroyed, desired="destroyed", **machine),
        VersionRow(id=it, machine=it, config=config, created_at_ms=now_ms),
        EventRow(id=it, machine=it, version=it, type="start", status="started", source="user", at_ms=1, cause="a test"),
        DecisionRow(machine=it, decision={}),
        ReservationRow(
            id=it, machine=it, order={}, resources=one, created_at_ms=now_ms, expires_at_ms=now_ms + HOUR_MS
        ),
        FillRow(id=it, machine=it, at_ms=now_ms),
        ClaimRow(id=it, worker="ord-1", order=it, at_ms=now_ms),
        PortRow(number=number, machine=it),
        CheckRow(
            machine=it, app="other", name="up", kind="service", service="", instance=it, status="passing", output="",
            updated_at_ms=now_ms,
        ),
        TallyRow(app=it, machines=1),
        LeaseRow(machine=it, nonce=it, owner="tester", description="", expires_at_ms=now_ms + HOUR_MS),
        AppRow(name=it, id=it, org="personal", network="default", number=1, created_at_ms=0, stamp_ms=1),
        RunRow(id=it, resource=it, exclusive=True, flow="machine.create", status="done", **run),
        PublishedRow(id=it, values={"app": "other"}, **published),
        PublishedRow(id=f"{it}-gone", values=None, **published),
    ]  # fmt: skip


def add_others(worker: SimWorker, numbers: range) -> None:
    doubled = range(2 * numbers.start, 2 * numbers.stop, 2)
    for row in others(worker.host.now_ms()):
        fill(str(worker.path), row.table, row.key, msgspec.json.encode(row), doubled)


class Actions:
    """One after the other; each leaves what the next one needs. `turn` tells those of one turn from the next ones'."""

    def __init__(self, worker: SimWorker, outbox: Outbox, turn: str) -> None:
        self._worker = worker
        self._outbox = outbox
        self._turn = turn
        self._machine = ""

    async def offer(self) -> None:
        self._worker.market.offer(Ask(app=APP.name, region="ord", image="host", resources=order("x").resources))

    async def reserve(self, name: str, hold_s: float = 3600.0) -> None:
        config: dict[str, Any] = {"image": "app:1", "services": [{"internal_port": 80, "protocol": "tcp"}]}
        answer = await self._worker.market.reserve(order(f"{self._turn}-{name}", "long", hold_s=hold_s, **config))
        assert isinstance(answer, Reservation), answer

    async def confirm(self) -> None:
        row, _, _ = await self._worker.market.confirm(f"{self._turn}-it", APP, None)
        self._machine = row.id

    async def list_machines(self) -> None:
        worker = self._worker
        api = worker.api
        shown = await api.machines(a_call(), ListMachines(APP.name))
        assert [machine.id for machine in shown] == [self._machine]

    async def list_runs(self) -> None:
        assert await RunsApi(self._worker.store, self._worker.runner, "ord-1").runs(a_call(), ListRuns()) == []

    async def stop(self) -> None:
        await self._worker.machines.stop(APP.name, self._machine, self._worker.request())

    async def start(self) -> None:
        await self._worker.machines.start(APP.name, self._machine, self._worker.request())

    async def exit(self) -> None:
        await asyncio.sleep(RUNS_S)
        assert self._worker.machine(self._machine).state is State.stopped

    async def recover(self) -> None:
        await self._worker.exits.recover()
        assert self._worker.runner.resume() == 0

    async def destroy(self) -> None:
        await self._worker.machines.destroy(APP.name, self._machine, self._worker.request())

    async def release(self) -> None:
        await self._worker.market.release(f"{self._turn}-released", "a test")

    async def lapse(self) -> None:
        assert await self._worker.market.sweep() == 1

    async def publish(self) -> None:
        await self._worker.store.submit(self._outbox.flush)


def a_call() -> Call:
    request = HttpRequest({"type": "http", "headers": []})
    return Call(request, b"", id="r", owner="tester", agent=True)


ACTIONS: dict[str, Callable[[Actions], Awaitable[None]]] = {
    "offer": Actions.offer,
    "reserve": lambda at: at.reserve("it"),
    "reserve again": lambda at: at.reserve("it"),
    "confirm and start": Actions.confirm,
    "confirm again": Actions.confirm,
    "list the machines of an app": Actions.list_machines,
    "list the runs that have not ended": Actions.list_runs,
    "stop": Actions.stop,
    "start": Actions.start,
    "exit": Actions.exit,
    "recover": Actions.recover,
    "destroy": Actions.destroy,
    "reserve what is released": lambda at: at.reserve("released"),
    "release": Actions.release,
    "reserve what lapses": lambda at: at.reserve("lapsing", hold_s=AT_REST_S),
    "lapse": Actions.lapse,
    "publish what waited": Actions.publish,
}


async def measured(counts: Counts, worker: SimWorker, outbox: Outbox, turn: str) -> dict[str, Count]:
    actions = Actions(worker, outbox, turn)

    async def until_at_rest(act: Callable[[Actions], Awaitable[None]]) -> None:
        await act(actions)
        await asyncio.sleep(AT_REST_S)

    return {name: await counts.of(until_at_rest(act)) for name, act in ACTIONS.items()}


async def both(directory: Path) -> tuple[dict[str, Count], dict[str, Count]]:
    programs = {"long": Program(runs_s=RUNS_S)}
    with counting() as counts:
        async with a_worker(directory, programs, sweeping=False) as worker:
            worker.log.ports = PORTS
            shown = projections(worker.store.read)
            publishing = Publishing("ord-1", "ord", "127.0.0.1", 1, Resources(), "fake", of_kinds=shown)
            outbox = Outbox(worker.host, OwnerLog(worker.host, "ord-1"), publishing.projections())
            await worker.store.submit(outbox.open)
            worker.store.on_change[:] = [outbox.on_change]
            await measured(counts, worker, outbox, "warm")  # what is done once, such as the app's first row
            add_others(worker, range(FIRST, FIRST + FEW))
            few = await measured(counts, worker, outbox, "few")
            add_others(worker, range(FIRST + FEW, FIRST + MANY))
            return few, await measured(counts, worker, outbox, "many")


@functools.cache
def found() -> tuple[dict[str, Count], dict[str, Count]]:
    with tempfile.TemporaryDirectory() as directory:
        return run_in_virtual_time(both(Path(directory)))


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_costs_the_same_however_many_rows_others_have(action: str) -> None:
    few, many = (turn[action] for turn in found())
    assert many.steps <= few.steps * GROWTH_MOST, (few, many)
    assert many.statements <= few.statements * GROWTH_MOST, (few, many)
    assert many.scanned <= few.scanned
    assert many.commits == few.commits


STATEMENTS = {
    "offer": 1,
    "reserve": 12,
    "reserve again": 5,
    "confirm and start": 56,
    "confirm again": 5,
    "list the machines of an app": 2,
    "list the runs that have not ended": 1,
    "stop": 48,
    "start": 38,
    "exit": 29,
    "recover": 4,
    "destroy": 50,
    "reserve what is released": 12,
    "release": 10,
    "reserve what lapses": 12,
    "lapse": 9,
    "publish what waited": 2,
}
"""Of SQLite for each, its begin and commit among them. Whoever makes one of these larger says why."""


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_takes_so_many_statements(action: str) -> None:
    assert found()[0][action].statements == STATEMENTS[action]

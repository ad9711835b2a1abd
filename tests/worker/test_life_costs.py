"""What a machine's life costs its worker: commits, syncs of the disk, records and rows, one by one.

Each number here is one that somebody decided on. Whoever makes it larger says why.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from tests.kit.sim_worker import APP, SimWorker, a_world, order
from tests.kit.virtual_time import run_in_virtual_time

from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.model import door
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.sim.hosts.world import Program
from hawker.sim.platform.disk import CrashDisk
from hawker.store.db import Store
from hawker.telemetry import without_logs
from hawker.worker.machine.projections import projections
from hawker.worker.publishing import Publishing

RUNS_S = 60.0
AT_REST_S = 5.0


class Cost(msgspec.Struct, frozen=True):
    """`rows` are written, `known` are those of them that the catalog is told of and that tell how far it was told.
    `pages` go to the write-ahead log; `elsewhere` is what is written or synced outside of it, as into a file that
    undoes a change."""

    commits: int = 0
    syncs: int = 0
    records: int = 0
    rows: int = 0
    known: int = 0
    pages: int = 0
    elsewhere: int = 0


class Meter:
    def __init__(self, worker: SimWorker, disk: CrashDisk) -> None:
        self._worker = worker
        self._calls: Counter[str] = Counter()
        disk.on_call = self._called

    def _called(self, what: str) -> None:
        self._calls[what] += 1

    async def of(self, action: Awaitable[object]) -> Cost:
        store = self._worker.store
        before, at = store.commits, store.read.query("select max(seq) from log")[0][0]
        self._calls.clear()
        await action
        await asyncio.sleep(AT_REST_S)
        calls = dict(self._calls)
        written = store.read.query(
            "select value ->> '$[0]' from log, json_each(cast(writes as text)) where seq > ?", (at,)
        )
        tables = Counter(table for (table,) in written)
        return Cost(
            commits=store.commits - before,
            syncs=calls.pop("sync of wal", 0),
            records=store.read.query("select count(*) from log where seq > ?", (at,))[0][0],
            rows=tables.total(),
            known=tables["published"] + tables["log_head"],
            pages=calls.pop("write of wal", 0) // 2,  # each after its header
            elsewhere=sum(calls.values()),
        )


class Life:
    """Actions one after the other, on a machine that runs until it is stopped and on one that ends and goes."""

    def __init__(self, worker: SimWorker, turn: str) -> None:
        self._worker = worker
        self._turn = turn
        self._machine = ""

    async def reserve(self) -> None:
        await self._worker.market.reserve(order(self._turn))

    async def confirm(self) -> None:
        row, _, _ = await self._worker.market.confirm(self._turn, APP, None)
        self._machine = row.id

    async def stop(self) -> None:
        await self._worker.machines.stop(APP.name, self._machine, self._worker.request())

    async def wake(self) -> None:
        await self._worker.waking.wake(door.Wake(app=APP.name, machine=self._machine))

    async def destroy(self) -> None:
        await self._worker.machines.destroy(APP.name, self._machine, self._worker.request(), force=True)

    async def whole(self) -> None:
        machine = await self._worker.create(f"{self._turn}-short", "short", auto_destroy=True)
        await asyncio.sleep(RUNS_S)
        assert self._worker.machine(machine).state is State.destroyed


ACTIONS: dict[str, Callable[[Life], Awaitable[None]]] = {
    "reserve": Life.reserve,
    "confirm and start": Life.confirm,
    "stop": Life.stop,
    "wake": Life.wake,
    "destroy": Life.destroy,
    "a whole life": Life.whole,
}


async def measured() -> dict[str, Cost]:
    with CrashDisk("costs") as disk, TemporaryDirectory() as directory:
        worker = SimWorker(Path(directory), a_world({"short": Program(runs_s=RUNS_S / 2)}))
        worker.store = Store.open("worker.db", worker.host, vfs=disk.name)
        await worker.start(sweeping=False)
        shown = projections(worker.store.read)
        publishing = Publishing("ord-1", "ord", "::1", 1, Resources(), "fake", of_kinds=shown)
        outbox = Outbox(worker.host, OwnerLog(worker.host, "ord-1"), publishing.projections())
        await worker.store.submit(outbox.open)
        worker.store.on_change[:] = [outbox.on_change]
        meter = Meter(worker, disk)
        costs: dict[str, Cost] = {}
        for turn in ("first", "then"):  # what is done once, such as the app's row, is not counted
            life = Life(worker, turn)
            costs = {name: await meter.of(act(life)) for name, act in ACTIONS.items()}
        await worker.close()
    return costs


@functools.cache
def found() -> dict[str, Cost]:
    with without_logs():
        return run_in_virtual_time(measured())


COSTS = {
    "reserve": Cost(commits=1, syncs=1, records=1, rows=2, pages=4),
    "confirm and start": Cost(commits=2, syncs=2, records=5, rows=18, known=5, pages=40),
    "stop": Cost(commits=3, syncs=3, records=5, rows=13, known=2, pages=32),
    "wake": Cost(commits=2, syncs=2, records=4, rows=10, known=2, pages=32),
    "destroy": Cost(commits=3, syncs=3, records=5, rows=18, known=4, pages=40),
    "a whole life": Cost(commits=5, syncs=5, records=10, rows=35, known=9, pages=76),
}
"""Pages at most: how rows lie in them is SQLite's business."""


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_for_a_machine_costs_what_it_is_to_cost(action: str) -> None:
    cost, most = found()[action], COSTS[action]
    assert msgspec.structs.replace(cost, pages=most.pages) == most
    assert cost.pages <= most.pages

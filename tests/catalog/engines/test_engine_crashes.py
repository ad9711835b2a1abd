"""The power goes at every write of a worker's host while it publishes: nothing that was published is lost, and no
reader ever sees an older state after a newer one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.engines.fleet import CHECKS, Fleet, catalog, in_fleet, rows, seen_check, worker
from tests.kit.tiers import full
from tests.kit.waiting import until

from hawker.model.rows import CheckRow
from hawker.sim.hosts.node import Node

COMMITS = 2


class Publishing:
    """A worker that commits states one after another, and what a reader sees of them meanwhile."""

    def __init__(self, fleet: Fleet, owner: Node, reader: Node) -> None:
        self._fleet = fleet
        self._owner = owner
        self._reader = reader
        self.acknowledged = 0
        self.seen: list[list[tuple[Any, ...]]] = []
        view = catalog(reader).view
        view.on_applied.append(lambda tables: self.seen.append(view.rows(CHECKS)))

    async def run(self) -> None:
        """Until all is committed or the host has lost power."""
        for n in range(1, COMMITS + 1):
            process = self._owner.process
            if process is None:
                return
            gone = (f"n{n - 1}",) if n > 1 else ()
            states = ("m1", n), ("m2", n), (f"n{n}", n)
            commit = asyncio.ensure_future(self._fleet.check(self._owner, *states, gone=gone))
            while not commit.done() and self._owner.process is process:
                await asyncio.wait([commit], timeout=0.001)
            if not commit.done():
                commit.cancel()
                return
            self.acknowledged = n
            await asyncio.sleep(0.07)

    async def until_equal(self) -> None:
        """The reader shows what the owner's database has, which is all that was acknowledged."""
        reads = worker(self._owner).store.read
        kept = [seen_check(row.machine, row.updated_at_ms) for row in reads.select(CheckRow, "true order by id")]
        assert self.acknowledged <= max((row[2] for row in kept), default=0)
        await self._fleet.until_seen(self._reader, CHECKS, kept)
        await asyncio.sleep(3)
        assert rows(self._reader, CHECKS) == kept
        states = [{key: at_ms for key, _, at_ms in state} for state in self.seen if state]
        assert all(state["m1/up"] == state["m2/up"] for state in states), "half a commit was seen"
        numbers = [state["m1/up"] for state in states]
        assert numbers == sorted(numbers), "a reader went back"


def cut_at(engine: str, directory: Path, at: int | None) -> int:
    """A run in which the power goes at this change of the owner's disk. Returns how many changes there were."""
    changes = []

    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.until_seen(reader, "select name from workers order by name", [("a",), ("b",)])
        await asyncio.sleep(1)
        publishing = Publishing(fleet, owner, reader)
        before = owner.disk.calls
        if at is not None:
            owner.disk.cut_at = before + at
        await publishing.run()
        changes.append(owner.disk.calls - before)
        if at is not None:
            await until(lambda: owner.process is None)
            await fleet.start(owner)
        await publishing.until_equal()

    directory.mkdir()
    in_fleet(engine, directory, test)
    return changes[0]


@pytest.mark.crash
@pytest.mark.parametrize("every", [5, *full(1)])
def test_wherever_the_power_goes_while_a_worker_publishes_nothing_is_lost_or_goes_back(
    engine: str, every: int, tmp_path: Path
) -> None:
    changes = cut_at(engine, tmp_path / "whole", None)
    assert changes > 2 * COMMITS, "each commit writes and syncs"
    for at in range(1, changes + 1, every):
        cut_at(engine, tmp_path / str(at), at)

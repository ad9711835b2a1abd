"""A worker whose database has lost something ends nothing by itself: it says what it found, and waits for a person."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kit.sim_worker import APP, REGION, ROOMY, SimWorker, a_world
from tests.kit.virtual_time import virtual_time

from hawker.model.catalog import TIERS, Position, Tier
from hawker.model.machine import State
from hawker.model.rows import LogHeadRow, MachineRow
from hawker.sim.hosts.driver import FakeDriver
from hawker.sim.hosts.world import World
from hawker.store.tx import Tx
from hawker.store.verify import verify
from hawker.telemetry import Metrics
from hawker.worker.daemon import Worker
from hawker.worker.lost_database import DatabaseLost, ask, asked
from hawker.worker.settings import Way, WorkerSettings

MACHINES = 3
NOTHING = Position(0, 0)


class Catalog:
    """A node's own copy: what this worker told, at which position of its log."""

    def __init__(self, told: Sequence[tuple[str, str, str]] = (), at: Position = NOTHING) -> None:
        self.told = told
        self.at = at

        self.view = self
        self.on_applied: list[Callable[[tuple[str, ...]], None]] = []

    def seen(self, owner: str) -> Mapping[Tier, Position]:
        return dict.fromkeys(TIERS, self.at)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if "machines_rows" not in sql:
            return []
        return [(row[0],) for row in self.told] if sql.startswith("select id from") else list(self.told)


@asynccontextmanager
async def checked(
    directory: Path, world: World, catalog: Catalog | None = None, recover: Way = ""
) -> AsyncIterator[Worker]:
    """A worker's start as far as it tells nobody anything."""
    settings = WorkerSettings(name="ord-1", region=REGION, directory=directory, capacity=ROOMY, recover=recover)
    worker = Worker(settings, world.host, FakeDriver(world).for_all(), Metrics())
    await worker.open_store()
    try:
        await worker.check(catalog or Catalog())
        yield worker
    finally:
        await worker.close_store()


async def refused(directory: Path, world: World, catalog: Catalog | None = None) -> str:
    with pytest.raises(DatabaseLost) as caught:
        async with checked(directory, world, catalog):
            pass
    assert "hawker worker recover" in caught.value.hint
    return caught.value.message


async def machines(directory: Path, world: World, count: int = MACHINES) -> SimWorker:
    worker = await SimWorker.open(directory, world)
    for n in range(count):
        await worker.run_machine(f"order-{n}")
    return worker


def flip(path: Path, at: int) -> None:
    """One bit of the byte at this place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_the_log(directory: Path) -> None:
    flip(directory / "worker.db-wal", 156)  # in its first frame: SQLite reads nothing of it then


def remove_the_log(directory: Path) -> None:
    (directory / "worker.db-wal").unlink()


def empty(directory: Path) -> None:
    os.truncate(directory / "worker.db", 0)


def remove_all(directory: Path) -> None:
    for path in directory.glob("worker.db*"):
        path.unlink()


@pytest.mark.parametrize(
    ("killed", "damage"), [(True, flip_the_log), (True, remove_the_log), (False, empty), (False, remove_all)]
)
@virtual_time
async def test_a_lost_database_beside_programs_that_run_stops_the_worker_and_ends_none_of_them(
    killed: bool, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    world = a_world()
    worker = await machines(tmp_path, world)
    if killed:
        await worker.die()
    else:
        await worker.close()
    damage(tmp_path)
    for _ in range(2):  # and it says so again
        said = await refused(tmp_path, world)
        assert f"of worker ord-1, is empty beside {MACHINES} programs that run" in said
        assert "nothing was changed or ended" in said
    assert len(world.instances) == MACHINES
    assert not any(placed.exit for placed in world.instances.values())


@virtual_time
async def test_a_database_that_has_lost_its_last_commits_does_so_too(tmp_path: Path) -> None:
    world = a_world()
    worker = await machines(tmp_path, world, 1)
    await worker.close()
    worker = await machines(tmp_path, world, 0)
    for n in range(1, MACHINES):
        await worker.run_machine(f"order-{n}")
    await worker.die()
    flip_the_log(tmp_path)
    said = await refused(tmp_path, world)
    assert f"worker.db, of worker ord-1, does not know {MACHINES - 1} programs that run: " in said


@virtual_time
async def test_an_empty_database_beside_directories_or_rows_of_its_own_stops_the_worker(tmp_path: Path) -> None:
    for machine in ("m1", "m2"):
        (tmp_path / "process" / "work" / machine).mkdir(parents=True)
    (tmp_path / "container" / "roots" / "m2").mkdir(parents=True)
    catalog = Catalog([("m3", "web", "stopped")])
    said = await refused(tmp_path, a_world(), catalog)
    assert said.endswith(
        "worker.db, of worker ord-1, is empty beside 2 directories of machines, 1 machine in the catalog: "
        "nothing was changed or ended"
    )


@virtual_time
async def test_a_database_behind_what_it_told_the_catalog_stops_the_worker(tmp_path: Path) -> None:
    world = a_world()

    def begin(tx: Tx) -> None:
        tx.record("catalog.opened", "ord-1", cause="test")
        tx.put(LogHeadRow(tier="region", epoch=5, head=70))

    async with checked(tmp_path, world) as worker:
        await worker.store.submit(begin)
    async with checked(tmp_path, world, Catalog(at=Position(5, 70))):
        pass
    async with checked(tmp_path, world, Catalog(at=Position(4, 99))):
        pass
    for at in (Position(5, 71), Position(6, 1)):
        said = await refused(tmp_path, world, Catalog(at=at))
        assert "is older than what its worker had told the catalog of: nothing was changed or ended" in said


@virtual_time
async def test_a_new_worker_starts_with_no_questions_and_is_in_the_database_itself_at_once(tmp_path: Path) -> None:
    world = a_world()
    async with checked(tmp_path, world) as worker:
        assert (tmp_path / "worker.db").stat().st_size > 4096
        worker.store.abandon()
    (tmp_path / "worker.db-wal").unlink()
    async with checked(tmp_path, world) as worker:
        assert worker.store.read.query("select count(*) from log where kind = 'worker.started'") == [(2,)]


# --- what a person decides -------------------------------------------------------------------------------------------


@virtual_time
async def test_recovering_takes_over_what_runs_and_says_what_it_could_not_recover(tmp_path: Path) -> None:
    world = a_world()
    worker = await machines(tmp_path, world)
    suspended = worker.runs()[0].resource
    await worker.machines.suspend(APP.name, suspended, worker.request())
    await worker.at_rest()
    before = {row.id: row for row in worker.store.read.select(MachineRow)}
    await worker.die()
    remove_all(tmp_path)
    ask(tmp_path, "adopt")
    told = [(machine, "web", "started") for machine in before] + [("lost", "web", "stopped")]
    async with checked(tmp_path, world, Catalog(told), recover=asked(tmp_path)) as recovered:
        rows = {row.id: row for row in recovered.store.read.select(MachineRow)}
    assert asked(tmp_path) == ""
    assert rows.keys() == before.keys()
    for machine, row in rows.items():
        was = before[machine]
        for field in ("app", "name", "state", "config", "resources", "version", "instance", "private_ip", "ports"):
            assert getattr(row, field) == getattr(was, field), field
    again = await SimWorker.open(tmp_path, world)
    assert len(world.instances) == MACHINES
    assert again.machine(suspended).state is State.suspended
    for machine in before:
        await again.machines.destroy(APP.name, machine, again.request(), force=True)
    await again.at_rest()
    assert not world.instances
    assert verify(tmp_path / "worker.db").ok
    await again.close()


@virtual_time
async def test_a_program_without_a_note_is_not_taken_over_nor_ended(tmp_path: Path) -> None:
    world = a_world()
    worker = await machines(tmp_path, world, 2)
    await worker.die()
    placed = next(iter(world.instances.values()))
    placed.spec = msgspec.structs.replace(placed.spec, note={})
    remove_all(tmp_path)
    with pytest.raises(DatabaseLost, match="1 program that runs"):
        async with checked(tmp_path, world, recover="adopt"):
            pass
    assert len(world.instances) == 2
    async with checked(tmp_path, world, recover="discard") as recovered:
        assert len(recovered.store.read.select(MachineRow)) == 1
    again = await SimWorker.open(tmp_path, world)
    assert len(world.instances) == 1
    await again.close()


@virtual_time
async def test_discarding_ends_what_the_database_does_not_know(tmp_path: Path) -> None:
    world = a_world()
    worker = await machines(tmp_path, world)
    await worker.die()
    remove_all(tmp_path)
    async with checked(tmp_path, world, recover="discard"):
        pass
    again = await SimWorker.open(tmp_path, world)
    assert not world.instances
    await again.close()

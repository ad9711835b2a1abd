"""A kind that is added by one directory: it is served, held, published, recovered, and cut off at every point."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import pytest
from tests.clients.test_serving import ask
from tests.kit.flowkit import Scenario, explore
from tests.kit.sim_client import Client
from tests.kit.sim_worker import SimWorker, a_world
from tests.kit.virtual_time import virtual_time
from tests.worker.kinds.light.kind import LightParts, light
from tests.worker.kinds.light.lamps import Lamps
from tests.worker.kinds.light.life import State
from tests.worker.kinds.light.rows import LightRow

from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.host import live
from hawker.http.app import Serving, Tokens
from hawker.model.guest import Resources
from hawker.model.rows import PublishedRow
from hawker.sim.hosts.world import World
from hawker.store.tx import Tx
from hawker.telemetry import Metrics
from hawker.worker import ledger
from hawker.worker.daemon import Worker
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.flow import Done, StepContext
from hawker.worker.kinds import GROUP, Kinds
from hawker.worker.publishing import Publishing
from hawker.worker.settings import WorkerSettings

TWO = Resources(machines=2)


class House:
    """A worker with lights, and the lamps outside."""

    def __init__(self) -> None:
        self.world = a_world()
        self.lamps = Lamps(self.world)
        self.kind = light(self.lamps)

    async def open(self, directory: Path) -> SimWorker:
        return await SimWorker.open(directory, self.world, capacity=TWO, kinds=[self.kind])


def parts(worker: SimWorker) -> LightParts:
    return cast(LightParts, worker.parts["light"])


async def switch(worker: SimWorker, name: str, wish: State) -> None:
    run = await parts(worker).switch(name, wish, "a test")
    if run:
        await worker.runner.wait_ended(run)


@virtual_time
async def test_a_light_is_switched_by_its_call(tmp_path: Path) -> None:
    house = House()
    worker = await house.open(tmp_path)
    routes = [route for service in parts(worker).services for route in service.routes()]
    app = Serving(worker.host, Tokens({"c": "someone"}), worker.metrics, "ord").app(routes)
    headers = {"authorization": "Bearer c"}
    answer = await ask(app, "POST", "/v1/lights/hall/switch", headers, b'{"wish": "on"}')
    assert answer == (200, {"id": "hall", "state": "on"})
    assert house.lamps.lit == {"hall"}
    assert worker.store.read.query("select state from light") == [("on",)]
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_lights_hold_room_as_machines_do(tmp_path: Path) -> None:
    worker = await House().open(tmp_path)
    await switch(worker, "hall", "on")
    await switch(worker, "stairs", "on")
    assert ledger.held(worker.store.read) == TWO
    with pytest.raises(ledger.Full, match="insufficient machine slots"):
        await switch(worker, "attic", "on")
    await switch(worker, "hall", "off")
    await switch(worker, "attic", "on")
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_the_catalog_shows_lights(tmp_path: Path) -> None:
    house = House()
    worker = await house.open(tmp_path)
    shown = house.kind.projections(worker.store.read)
    outbox = Outbox(worker.host, OwnerLog(worker.host, "ord-1"), shown)
    await worker.store.submit(outbox.open)
    worker.store.on_change.append(outbox.on_change)
    await switch(worker, "hall", "on")
    (row,) = worker.store.read.select(PublishedRow)
    assert (row.tier, row.of, row.id, row.values) == ("region", "lights", "hall", {"state": "on"})
    await worker.close()


@virtual_time
async def test_what_another_package_shows_is_compared_at_every_start(tmp_path: Path) -> None:
    """Its files may have changed, which no version of ours tells."""
    house = House()
    worker = await house.open(tmp_path)
    for _ in range(2):
        shown = house.kind.projections(worker.store.read)
        outbox = Publishing("ord-1", "ord", "::1", 1, TWO, "fake", of_kinds=shown).outbox(worker.host)
        await worker.store.submit(outbox.open)
        await worker.store.submit(outbox.catch_up)
        await switch(worker, "hall", "on")  # nobody publishes it
        await worker.store.submit(outbox.close)
    rows = worker.store.read.select(PublishedRow, "id like 'region/lights/%'")
    assert [row.values for row in rows] == [{"state": "on"}]
    await worker.close()


@virtual_time
async def test_lamps_are_as_their_rows_say_when_the_worker_begins(tmp_path: Path) -> None:
    house = House()
    worker = await house.open(tmp_path)
    await switch(worker, "hall", "on")
    await worker.close()
    house.lamps.lit = {"attic"}
    worker = await house.open(tmp_path)
    assert house.lamps.lit == {"hall"}
    await worker.close()


@virtual_time
async def test_a_row_that_breaks_a_rule_of_its_kind_is_not_written(tmp_path: Path) -> None:
    worker = await House().open(tmp_path)

    def unpaid(tx: Tx) -> None:
        tx.record("light.forged", "hall", cause="a test")
        tx.put(LightRow(id="hall", state="on"))

    with pytest.raises(AssertionError, match="light hall is on, and holds"):
        await worker.store.submit(unpaid)
    await worker.close()


def test_the_life_of_a_light_is_a_page() -> None:
    assert "| off | on | power, tell |" in light(Lamps(World(live(), {}))).life()


# --- crashes ---------------------------------------------------------------------------------------------------------


def a_scenario(make: type[LightParts] = LightParts) -> Scenario:
    houses: dict[World, Lamps] = {}

    def kinds(world: World) -> Kinds:
        houses[world] = Lamps(world)
        return [light(houses[world], make)]

    async def evening(client: Client) -> None:
        """Whatever is cut off or fails meanwhile: in the end lamps, rows and the ledger say the same."""
        wishes: list[State] = ["on", "off", "on"]
        for wish in wishes:
            await client.ask(partial(_begin, wish=wish))
            await client.rest()

        async def look(worker: SimWorker) -> None:
            on = {row.id for row in worker.store.read.select(LightRow) if row.state == "on"}
            assert houses[client.world].lit == on
            assert ledger.held(worker.store.read) == Resources(machines=len(on))

        await client.ask(look)

    return Scenario("light", evening, kinds=kinds)


async def _begin(worker: SimWorker, wish: State) -> str:
    return await parts(worker).switch("hall", wish, f"wish {wish}")


def test_it_is_cut_off_at_every_point_and_each_of_its_acts_fails(in_memory: Path) -> None:
    count = explore(a_scenario(), in_memory)
    assert (count.acts, count.missed) == (3, 0)
    assert count.singles == count.points >= 20


class Careless(LightParts):
    async def undo(self, context: StepContext) -> Done:
        """It leaves the lamp as it is."""
        return Done(self._settle)


def test_the_kit_finds_a_light_that_is_not_undone(in_memory: Path) -> None:
    with pytest.raises(AssertionError, match="light: Plan"):
        explore(a_scenario(Careless), in_memory)


# --- found as an installed kind --------------------------------------------------------------------------------------

LIGHT = light(Lamps(World(live(), {})))


@virtual_time
async def test_a_worker_finds_the_kinds_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lights-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lights\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\nlight = {__name__}:LIGHT\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = WorkerSettings(name="ord-1", region="ord", directory=tmp_path / "worker", capacity=TWO, reserve_mib=0)
    worker = Worker(settings, a_world().host, DriverSet({}), Metrics())
    await worker.open_store()
    assert worker.store.types["light"] is LightRow
    await worker.close_store()

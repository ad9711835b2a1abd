"""Which machines stand by for others, as the catalog tells of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.fleets import REGION, Fleet

from hawker.core.outage import Outage
from hawker.errors import Unreachable
from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.app_table import AppTable
from hawker.proxy.background.standby import Named, Standby, Standbys
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.machines.calls import Workers
from hawker.proxy.settings import RouterSettings


class Calls:
    """A worker that starts what it is asked to start, but for the `failing` first times."""

    def __init__(self, failing: int = 0) -> None:
        self.woken: list[str] = []
        self.failing = failing

    async def wake(self, wish: words.Wake, released: Callable[[words.Awake], None] = lambda awake: None) -> words.Awake:
        self.woken.append(wish.machine)
        if len(self.woken) <= self.failing:
            raise Unreachable("it says nothing")
        return words.Awake(before=State.stopped)

    async def rest(self, wish: words.Rest) -> words.Resting:
        raise AssertionError("nothing is stopped")


STOOD_AT_MS = 5_000


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("began_ms", "desired", "stood_for", "heard", "started"),
    [
        (STOOD_AT_MS - 1, "stopped", "ord-2", None, False),
        (STOOD_AT_MS + 1, "stopped", "ord-2", None, True),
        (STOOD_AT_MS - 1, "stopped", "ord-3", None, True),
        (STOOD_AT_MS - 1, "started", "ord-2", None, True),
        (STOOD_AT_MS - 1, "stopped", "ord-2", {"m1": STOOD_AT_MS}, True),
        (STOOD_AT_MS - 1, "stopped", "ord-2", {"m1": STOOD_AT_MS - 1}, False),
        (STOOD_AT_MS - 1, "stopped", "ord-2", {}, False),
    ],
    ids=[
        "stopped in this outage",
        "its worker was back",
        "another worker's outage",
        "it failed",
        "heard of since",
        "started by another proxy since it was heard of",
        "started by another proxy for the first time",
    ],
)
async def test_a_standby_that_was_started_for_an_outage_and_stopped_is_left_alone_by_proxies_that_did_not_start_it(
    tmp_path: Path, began_ms: int, desired: str, stood_for: str, heard: dict[str, int] | None, started: bool
) -> None:
    """Once they took the outage for a new one, and started what its user had stopped: those that had begun in the
    middle of it, and those that were a second behind another."""
    fleet = Fleet(tmp_path)
    row = {"region": REGION, "host": "127.0.0.1", "port": 1, "state": "active"}  # nobody listens there
    for name in ("ord-1", "ord-2"):
        fleet.put(name, "workers", **{name: {**row, "began_ms": began_ms}})
    primary = {"app": "web", "region": REGION, "state": "started", "desired": "started", "generation": 1}
    standby = {**primary, "state": "stopped", "desired": desired, "standbys": '["m0"]'}
    fleet.put("ord-2", "machines", m0=primary)
    fleet.put("ord-1", "machines", m1={**standby, "stood_for": stood_for, "stood_at_ms": STOOD_AT_MS})
    calls, directory = Calls(), CatalogIndex(fleet.replica, REGION)
    workers = Workers("token", "ord-1", calls)
    random = fleet.host.rng.random
    app_table = AppTable(
        directory, workers, RouterSettings(), worker="ord-1", region=REGION, token="token", random=random
    )
    standbys = Standbys(app_table, fleet.replica, random)
    if heard is not None:
        standbys.outages["ord-2"] = Outage(asyncio.get_running_loop().time())
        standbys.outages["ord-2"].heard(asyncio.get_running_loop().time(), heard)
    for _ in range(20):
        await standbys.look()
        await asyncio.sleep(1)
    assert standbys.outages["ord-2"].told
    assert calls.woken == (["m1"] if started else [])
    await standbys.close()
    await workers.close()
    directory.close()
    fleet.close()


def a_pair(fleet: Fleet) -> Callable[..., None]:
    """A machine of ord-2 and a standby on ord-1, where nobody listens. What is returned publishes the standby's row."""
    primary = {"app": "web", "region": REGION, "state": "started", "desired": "started", "generation": 1}
    standby = {**primary, "state": "stopped", "desired": "stopped", "standbys": '["m0"]'}
    fleet.worker("ord-1", port=1)
    fleet.put("ord-2", "machines", m0=primary)

    def publish(**values: str | int) -> None:
        fleet.put("ord-1", "machines", m1={**standby, **values})

    publish()
    return publish


@asynccontextmanager
async def listen_probe(fleet: Fleet, calls: Calls) -> AsyncIterator[Standbys]:
    directory, workers = CatalogIndex(fleet.replica, REGION), Workers("token", "ord-1", calls)
    random = fleet.host.rng.random
    app_table = AppTable(
        directory, workers, RouterSettings(), worker="ord-1", region=REGION, token="token", random=random
    )
    standbys = Standbys(app_table, fleet.replica, random)
    yield standbys
    await standbys.close()
    await workers.close()
    directory.close()
    fleet.close()


async def looks(standbys: Standbys, seconds: int) -> None:
    for _ in range(seconds):
        await standbys.look()
        await asyncio.sleep(1)


@pytest.mark.virtual_time
async def test_what_another_proxy_did_about_an_outage_is_not_done_again_and_the_next_outage_is_another_one(
    tmp_path: Path,
) -> None:
    """A proxy that was a second behind another started the standby again, which its user had stopped by then."""
    fleet, calls = Fleet(tmp_path), Calls()
    publish = a_pair(fleet)
    async with listen_probe(fleet, calls) as standbys:
        for stood_at_ms, woken in ((STOOD_AT_MS, []), (0, ["m1"])):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                fleet.worker("ord-2", port=listener.getsockname()[1])
                await looks(standbys, 3)
                assert standbys.outages["ord-2"].ever
            await looks(standbys, 10)
            assert calls.woken == [], "it is not taken for gone yet"
            if stood_at_ms:
                publish(stood_for="ord-2", stood_at_ms=stood_at_ms)  # another one had it started, its user stopped it
            await looks(standbys, 10)
            assert standbys.outages["ord-2"].told
            assert calls.woken == woken


@pytest.mark.virtual_time
async def test_a_start_that_failed_is_not_tried_again_once_another_proxy_has_started_the_standby(
    tmp_path: Path,
) -> None:
    fleet, calls = Fleet(tmp_path), Calls(failing=2)
    publish = a_pair(fleet)
    fleet.worker("ord-2", port=1)
    async with listen_probe(fleet, calls) as standbys:
        while len(calls.woken) < 2:
            await looks(standbys, 1)
        publish(stood_for="ord-2", stood_at_ms=STOOD_AT_MS)
        await looks(standbys, 20)
        assert len(calls.woken) == 2


def test_only_what_changes_is_read_again_and_nothing_is_missed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)

    def machine(name: str, standbys: str, state: str = "stopped", worker: str = "ord-1") -> None:
        row = {"app": "web", "region": REGION, "state": state, "standbys": standbys, "generation": 1}
        fleet.put(worker, "machines", **{name: row})

    machine("m0", "[]")
    machine("m1", '["m0"]')
    named = Named(fleet.replica)
    first = Standby("m1", "web", "ord-1", ("m0",))
    assert named.standing() == [first]
    machine("m2", '["m0","m1"]')
    machine("m3", '["m0"]', state="started")
    machine("m4", "[7]")
    second = Standby("m2", "web", "ord-1", ("m0", "m1"))
    assert named.standing() == [first, second]
    machine("m1", "[]")
    machine("m3", '["m0"]')
    assert named.standing() == [second, Standby("m3", "web", "ord-1", ("m0",))]
    fleet.put("ord-1", "machines", m2=None)
    assert [each.machine for each in named.standing()] == ["m3"]
    fleet.replica.forget("ord-1")
    assert named.standing() == []
    named.close()
    assert fleet.replica.on_rows == []
    fleet.close()

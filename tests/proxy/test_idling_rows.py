"""Which machines are put to rest, over a catalog alone and a worker that does as it is told. In virtual time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.fleets import Fleet

from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.app_table import AppTable
from hawker.proxy.background.idling import Idling
from hawker.proxy.base import Lease
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.machines.calls import Released, Workers
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

IDLE_S = 10.0


class Worker:
    """Its machines come to rest at once, but those of `fails`."""

    def __init__(self) -> None:
        self.rested: list[str] = []
        self.fails: set[str] = set()

    async def wake(self, wish: words.Wake, released: Released = lambda awake: None) -> words.Awake:
        return words.Awake(before=State.stopped, instance="i")

    async def rest(self, wish: words.Rest) -> words.Resting:
        if wish.machine in self.fails:
            raise RuntimeError(f"a fault of ours, about machine {wish.machine}")
        self.rested.append(wish.machine)
        return words.Resting(state=State.stopped)


class Here:
    """A proxy beside worker ord-1, that looks at idle machines when it is told to."""

    def __init__(self, fleet: Fleet, port: int) -> None:
        self.fleet = fleet
        self.port = port
        self.worker = Worker()
        self.index = CatalogIndex(fleet.replica, "ord")
        settings = RouterSettings(idle_s=IDLE_S)
        random: Callable[[], float] = fleet.host.rng.random
        calls = Workers("token", "ord-1", self.worker)
        self.app_table = AppTable(
            self.index, calls, settings, worker="ord-1", region="ord", token="token", random=random
        )
        self.router = ProxyRouter(
            self.app_table, settings, domain="apps.example", claims=lambda port: "", random=random
        )
        self.idling = Idling(self.app_table, fleet.replica, random)

    def machine(
        self, machine: str, app: str = "web", *, state: str = "started", worker: str = "ord-1", autostop: str = "stop"
    ) -> None:
        self.fleet.machine(machine, app, state=state, worker=worker)
        self.fleet.service(machine, app, internal=self.port, worker=worker, autostop=autostop)
        self.index.settle()

    def member(self, name: str, status: str) -> None:
        self.fleet.replica.keep_member(name, region="ord", status=status)

    async def lease(self, app: str = "web") -> Lease:
        route = await self.router.load(80, f"{app}.apps.example")
        lease = route.take()
        assert lease is not None
        return lease

    async def look(self, seconds: float = 2 * IDLE_S) -> None:
        """Again and again for so long."""
        for _ in range(round(seconds)):
            await asyncio.sleep(1.0)
            await self.idling.look()

    def closed(self) -> list[str]:
        """Machines that get no request that another can take."""
        routed = self.app_table.load("web")
        assert routed is not None
        return sorted({endpoint.machine for endpoint in routed.endpoints.values() if endpoint.entry.closing})


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    fleet = Fleet(tmp_path / "fleet")
    fleet.worker("ord-1")
    fleet.worker("ord-2", port=4282, proxy=4290)
    for app in ("web", "db"):
        fleet.app(app)
    here = Here(fleet, listening.getsockname()[1])
    yield here
    await here.router.close()
    await here.app_table.workers.close()
    here.index.close()
    fleet.close()
    listening.close()


async def one_is_closed(here: Here) -> tuple[str, str]:
    """Of two machines that are both used, though one would do. Returns the other one, too."""
    for machine in ("m1", "m2"):
        here.machine(machine)
    leases: dict[str, Lease] = {}
    while len(leases) < 2:
        lease = await here.lease()
        if leases.setdefault(lease.machine, lease) is not lease:
            lease.release()
    await here.look()
    (closed,) = here.closed()
    return closed, "m1" if closed == "m2" else "m2"


async def test_a_machine_that_was_closed_to_come_to_rest_and_is_begun_anew_takes_requests_like_any_other(
    here: Here,
) -> None:
    closed, _ = await one_is_closed(here)
    here.machine(closed, state="restarting")
    await here.look(1)
    here.machine(closed)
    await here.look(1)
    assert here.closed() == []
    assert here.worker.rested == []


async def test_a_machine_that_was_closed_is_opened_when_its_app_is_not_to_be_stopped_any_more(here: Here) -> None:
    for machine in await one_is_closed(here):
        here.machine(machine, autostop="off")
    await here.look(1)
    assert here.closed() == []


@pytest.mark.parametrize("state", ["starting", "started"])
async def test_machines_of_a_worker_that_may_be_gone_neither_keep_others_awake_nor_stand_for_them(
    here: Here, state: str
) -> None:
    here.member("ord-1", "alive")
    here.member("ord-2", "dead")
    here.fleet.machine("m1", "web")
    service: dict[str, Any] = {"internal": here.port, "autostop": "stop", "min_machines_running": 1}
    here.fleet.service("m1", "web", **service)
    for number in range(2, 8):
        here.fleet.machine(f"m{number}", "web", worker="ord-2", state=state)
        here.fleet.service(f"m{number}", "web", worker="ord-2", **service)
    here.index.settle()
    here.machine("n1", "db")
    here.machine("n2", "db", worker="ord-2", state="starting")
    await here.look()
    assert here.worker.rested[:1] == ["n1"], "it waits for none that will not come"
    assert "m1" not in here.worker.rested, "it is the only one that anybody can use"


async def test_what_goes_wrong_with_one_app_keeps_no_other_from_its_rest(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.worker.fails.add("a1")
    here.machine("a1", "db")
    here.machine("m1")
    await here.look()
    assert here.worker.rested[:1] == ["m1"]
    assert capsys.readouterr().err.count("autostop.fault") == 1

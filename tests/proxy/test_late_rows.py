"""Rows that tell of a machine's last stop, and come only when it was started again: the worker's own word counts.

The worker is a model of one, with real sockets: a machine's address listens while its program runs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.fleets import Fleet

from hawker.core.routing import ANY
from hawker.errors import Unreachable
from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.app_table import AppTable
from hawker.proxy.base import Address, Lease, NoUpstreams, Route
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.machines.calls import Released, Workers
from hawker.proxy.machines.states import runs_on
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.settings import RouterSettings

PATIENCE_S = 30.0


def awake(before: State, instance: str) -> words.Awake:
    return words.Awake(before=before, instance=instance)


@pytest.mark.parametrize(
    ("told", "before", "same"),
    [
        (awake(State.started, "i1"), awake(State.stopped, "i1"), True),
        (awake(State.started, "i1"), awake(State.started, "i1"), True),
        (awake(State.started, "i2"), awake(State.stopped, "i1"), False),  # it was stopped, and somebody started it
        (awake(State.stopped, "i1"), awake(State.stopped, "i1"), False),  # suspended, and resumed for this
        (awake(State.started, ""), awake(State.stopped, ""), False),  # a worker that does not tell instances
    ],
)
def test_a_worker_that_tells_of_the_same_instance_running_tells_of_the_same_start(
    told: words.Awake, before: words.Awake, same: bool
) -> None:
    assert runs_on(told, before) is same


class Worker(NoUpstreams):
    """One machine that listens, its door, and a worker. `tells` are rows that come while a connection is being taken,
    after which `then` is called, once."""

    def __init__(self, fleet: Fleet, port: int) -> None:
        self.fleet = fleet
        self.port = port
        self.tells: tuple[str, ...] = ()
        self.then: Callable[[], None] = lambda: None
        self.state = State.stopped
        self.starts = 0
        self.wakes = 0
        self.quick = False  # whether it says that it has let a program go, before it says that it runs
        self.runs = asyncio.Event()
        self.connections: list[Address] = []
        self.hung_up: list[bool] = []
        fleet.worker("ord-1")
        fleet.app("web")
        self.show("started")
        self.index = CatalogIndex(fleet.replica, "ord")
        settings, random = RouterSettings(), lambda: 0.5
        calls = Workers("token", "ord-1", self)
        self.app_table = AppTable(
            self.index, calls, settings, worker="ord-1", region="ord", token="token", random=random, upstreams=self
        )
        self.router = ProxyRouter(
            self.app_table, settings, domain="apps.example", claims=lambda port: "", random=random
        )
        self.app_table.load("web")

    def offer(self, address: Address, sock: socket.socket) -> None:
        sock.close()
        self.connections.append(address)
        tells, self.tells = self.tells, ()
        for state in tells:
            self.show(state)
            self.index.settle()
            assert self.app_table.doors["m1"].machine.state == state
        if tells:
            self.then()

    async def wake(self, wish: words.Wake, released: Released = lambda awake: None) -> words.Awake:
        self.wakes += 1
        before, self.state = self.state, State.started
        if before is not State.started:
            self.starts += 1
        answer = awake(before, f"i{self.starts}")
        if self.quick:
            released(answer)
            await self.runs.wait()
        return answer

    async def rest(self, wish: words.Rest) -> words.Resting:
        raise Unreachable("not asked")

    def show(self, state: str) -> None:
        self.fleet.machine("m1", "web", state=state)
        self.fleet.service("m1", "web", internal=self.port)

    async def request(self) -> Lease:
        """As one whose connection was refused, which is how a stop is met that no row has told of."""
        route = await self.router.load(80, "web.apps.example")
        first = route.take(ANY, ())
        assert first is not None
        self.app_table.on_let_go.append(lambda address, asleep: self.hung_up.append(asleep))
        first.failed("refused")
        return route.take(ANY, ()) or await self.obtain(route)

    async def obtain(self, route: Route) -> Lease:
        return await route.obtain(ANY, (), deadline=asyncio.get_running_loop().time() + PATIENCE_S)


@asynccontextmanager
async def worker(directory: Path) -> AsyncIterator[Worker]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        it = Worker(Fleet(directory), listener.getsockname()[1])
        try:
            yield it
        finally:
            await it.router.close()
            await it.app_table.workers.close()
            it.index.close()
            it.fleet.close()


LATE = [("stopped",), ("stopping", "stopped"), ("stopping", "stopped", "starting", "started", "stopping", "stopped")]


@pytest.mark.parametrize("rows", LATE, ids=" ".join)
async def test_a_program_that_was_let_go_keeps_its_connection_whatever_is_told_of_the_last_stop(
    tmp_path: Path, rows: tuple[str, ...]
) -> None:
    """As long as its worker is not done with the start, nothing else has the machine."""
    async with worker(tmp_path) as it:
        it.tells, it.quick = rows, True
        lease = await it.request()
        assert not it.runs.is_set()  # its worker has yet to say that it runs
        assert (it.wakes, len(it.connections), it.hung_up) == (1, 1, [])
        assert it.app_table.doors["m1"].state == "started"
        it.runs.set()
        lease.release()


async def test_what_listens_is_not_looked_for_again_when_its_worker_says_that_it_runs_on(tmp_path: Path) -> None:
    """The row may tell of a later stop. The worker knows."""
    async with worker(tmp_path) as it:
        it.tells = ("stopped",)
        (await it.request()).release()
        assert (it.wakes, it.starts, len(it.connections)) == (2, 1, 1)


async def test_what_listens_and_was_stopped_since_is_not_asked(tmp_path: Path) -> None:
    async with worker(tmp_path) as it:
        it.tells = ("stopping",)
        it.then = lambda: setattr(it, "state", State.stopping)
        (await it.request()).release()
        assert (it.wakes, it.starts, len(it.connections)) == (2, 2, 2)
        assert it.app_table.doors["m1"].instance == "i2"


async def test_a_stop_that_its_worker_tells_of_is_believed_until_rows_tell_of_it_or_of_a_start(tmp_path: Path) -> None:
    async with worker(tmp_path) as it:
        (await it.request()).release()
        door = it.app_table.doors["m1"]
        assert door.state == "started"
        it.app_table.rests("m1", "stopped")
        it.app_table.rests("no-such-machine", "stopped")
        assert door.state == "started"  # inside the commit nothing is done
        await asyncio.sleep(0)
        assert door.state == "stopping"
        it.state = State.stopped
        route = await it.router.load(80, "web.apps.example")
        assert route.take(ANY, ()) is None
        (await it.obtain(route)).release()
        assert (it.starts, door.state) == (2, "started")

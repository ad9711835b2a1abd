"""What an edge does when the proxy of a worker hangs, or membership says that the worker may be gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.doors import free_port
from tests.kit.fleets import REGION, Fleet
from tests.kit.raw_http import Answer, Behaviour, Upstream, User, Visit, hello, silent
from tests.kit.waiting import until

from hawker.host import live
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.machines.remote_proxy import SILENT_TIMES
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings, RouterSettings

PORT = 80
HUNG_S = 0.3


class Door:
    """A worker's proxy: it answers requests with its worker's name, and whoever has no token with 401. `goes`: it does
    anything at all; `serves`: its machines answer."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.goes, self.serves = asyncio.Event(), asyncio.Event()
        self.goes.set()
        self.serves.set()
        self.asked: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._served(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"hawker-app" in head:
                    self.asked.append(head.split()[0].decode())
                    await self.serves.wait()
                await self.goes.wait()
                status = b"200 OK" if b"hawker-app" in head else b"401 Unauthorized"
                name = self.worker.encode()
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(name), name))
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


class Edge:
    """An edge before two workers, `ord-1` and `ord-2`, each with its door."""

    def __init__(self, fleet: Fleet, proxy: Proxy, one: Door, two: Door) -> None:
        self.fleet = fleet
        self.proxy = proxy
        self.one = one
        self.two = two

    def machine(self, app: str, worker: str) -> None:
        self.fleet.machine(f"{app}-{worker}", app, worker=worker)
        self.fleet.service(f"{app}-{worker}", app, worker=worker)

    def member(self, name: str, status: str) -> None:
        self.fleet.replica.keep_member(name, region=REGION, status=status)

    async def ask(self, app: str, method: str = "GET") -> str:
        reader, writer = await asyncio.open_connection(*self.proxy.listening[PORT])
        try:
            writer.write(f"{method} / HTTP/1.1\r\nhost: {app}.localhost\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return body.decode() if b" 200 " in head else head.decode()

    async def by(self, app: str, count: int = 12) -> Counter[str]:
        return Counter([await self.ask(app) for _ in range(count)])


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    fleet = Fleet(tmp_path)
    doors = Door("ord-1"), Door("ord-2")
    for door in doors:
        fleet.worker(door.worker, proxy=await door.open())
    for app in ("web", "db"):
        fleet.app(app)
    settings = ProxySettings(listen={str(PORT): "127.0.0.1:0"}, routing=RouterSettings(hung_s=HUNG_S))
    proxy = await Proxy.open(settings, fleet.replica, live(), region=REGION, token="secret")
    try:
        yield Edge(fleet, proxy, *doors)
    finally:
        for door in doors:
            await door.close()
        await proxy.close()
        fleet.close()


async def test_what_waits_at_a_proxy_that_hangs_goes_elsewhere_if_it_may_be_made_twice(edge: Edge) -> None:
    edge.machine("web", "ord-1")
    edge.one.goes.clear()
    twice, once = (asyncio.create_task(edge.ask("web", method)) for method in ("GET", "POST"))
    await until(lambda: sorted(edge.one.asked) == ["GET", "POST"])
    for app, worker in (("web", "ord-2"), ("db", "ord-1"), ("db", "ord-2")):
        edge.machine(app, worker)
    assert await twice == "ord-2"
    assert await edge.by("db", 6) == {"ord-2": 6}, "no request of any app finds out once more"
    assert not once.done()
    edge.one.goes.set()
    assert await once == "ord-1"
    assert edge.one.asked.count("POST") == 1
    await until(lambda: not edge.proxy.app_table.remote_proxies["ord-1"].away)
    assert set(await edge.by("db")) == {"ord-1", "ord-2"}


async def test_what_may_be_made_only_once_gets_an_error_when_a_proxy_goes_on_to_say_nothing(edge: Edge) -> None:
    edge.machine("web", "ord-1")
    edge.one.goes.clear()
    once = asyncio.create_task(edge.ask("web", "POST"))
    await until(lambda: edge.one.asked == ["POST"])
    answer = await asyncio.wait_for(once, HUNG_S * SILENT_TIMES + 5)
    assert " 504 " in answer
    assert 'details="PC05"' in answer


async def test_a_machine_that_is_slow_is_waited_for_as_long_as_its_workers_proxy_answers(edge: Edge) -> None:
    edge.machine("web", "ord-1")
    edge.one.serves.clear()
    slow = asyncio.create_task(edge.ask("web"))
    await until(lambda: edge.one.asked == ["GET"])
    edge.machine("web", "ord-2")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(slow), HUNG_S * 2.5)
    edge.one.serves.set()
    assert await slow == "ord-1"
    assert edge.two.asked == []


async def test_a_proxy_that_is_back_at_another_address_gets_requests_at_once(edge: Edge) -> None:
    edge.machine("web", "ord-1")
    await edge.one.close()
    waits = asyncio.create_task(edge.ask("web"))
    remote_proxy = edge.proxy.app_table.remote_proxy("ord-1")
    await until(lambda: remote_proxy.away)
    edge.one = Door("ord-1")
    edge.fleet.worker("ord-1", proxy=await edge.one.open())
    assert await asyncio.wait_for(waits, 5) == "ord-1"
    assert not remote_proxy.away
    await edge.one.close()


async def test_a_worker_that_membership_suspects_gets_what_no_other_can_take(edge: Edge) -> None:
    for app, worker in (("web", "ord-1"), ("web", "ord-2"), ("db", "ord-1")):
        edge.machine(app, worker)
    assert set(await edge.by("web")) == {"ord-1", "ord-2"}
    for status in ("suspect", "dead", "left"):
        edge.member("ord-2", "alive")
        edge.member("ord-1", status)
        assert await edge.by("web") == {"ord-2": 12}
        assert await edge.ask("db") == "ord-1", "there is no other, and it may be there"
        edge.member("ord-2", status)
        assert set(await edge.by("web")) == {"ord-1", "ord-2"}, "who hears nobody knows nothing of them"
    edge.member("ord-2", "alive")
    edge.member("ord-1", "alive")
    assert set(await edge.by("web")) == {"ord-1", "ord-2"}


async def test_an_edge_learns_how_far_other_regions_are(edge: Edge) -> None:
    remote_proxy = Door("far-1")
    edge.fleet.worker("far-1", region="basement", proxy=await remote_proxy.open())
    edge.fleet.worker("gone-1", region="attic", proxy=1)
    await edge.proxy.measuring.look()
    assert 0 < edge.proxy.router.distances.distance("basement") < 0.1
    assert edge.proxy.router.distances.nearest(["attic", "lhr", "basement"]) == ["basement", "lhr", "attic"]
    await remote_proxy.close()


# --- programs --------------------------------------------------------------------------------------------------------


class Programs:
    """The proxy of worker ord-1 and an edge, before programs of this host."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.proxies: dict[str, Proxy] = {}
        self.upstreams: dict[str, Upstream] = {}

    async def machine(self, name: str, behaviour: Behaviour) -> Upstream:
        upstream = self.upstreams[name] = Upstream(behaviour)
        await upstream.open()
        self.fleet.machine(name, "web")
        self.fleet.service(name, "web", internal=upstream.address[1])
        return upstream

    def check(self, name: str, status: str) -> None:
        self.fleet.check(name, "web", status=status, service=f"tcp/{self.upstreams[name].address[1]}")

    async def ask(self, at: str, method: str) -> Answer:
        user = await User.at(self.proxies[at].listening[PORT])
        try:
            return await user.ask(f"{method} / | Host: web.localhost", within=30)
        finally:
            await user.close()


@pytest.fixture
async def programs(tmp_path: Path) -> AsyncIterator[Programs]:
    fleet = Fleet(tmp_path)
    backhaul = free_port()
    fleet.worker("ord-1", proxy=backhaul)
    fleet.app("web")
    programs = Programs(fleet)
    door = ProxySettings(
        listen={str(PORT): "127.0.0.1:0"},
        backhaul=f"127.0.0.1:{backhaul}",
        routing=RouterSettings(hung_s=HUNG_S),
        embedded=Settings(drain_s=0.1),
    )
    for name, worker in (("door", "ord-1"), ("edge", "")):
        settings = replace(door, backhaul=door.backhaul if worker else "")
        programs.proxies[name] = await Proxy.open(
            settings, fleet.replica, live(), region=REGION, token="secret", worker=worker
        )
    try:
        yield programs
    finally:
        for upstream in programs.upstreams.values():
            await upstream.close()
        for proxy in reversed(programs.proxies.values()):
            await proxy.close()
        fleet.close()


@pytest.mark.parametrize("at", ["door", "edge"])
async def test_what_waits_at_a_program_whose_checks_fail_goes_elsewhere_if_it_may_be_made_twice(
    programs: Programs, at: str
) -> None:
    hung = await programs.machine("m1", silent)
    twice, once = (asyncio.create_task(programs.ask(at, method)) for method in ("GET", "POST"))
    await until(lambda: len(hung.visits) == 2)
    other = await programs.machine("m2", hello)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(twice), HUNG_S * 2)
    programs.check("m1", "critical")
    assert (await twice).body == b"hello"
    assert [(await programs.ask(at, "GET")).body for _ in range(5)] == [b"hello"] * 5
    assert (len(hung.visits), len(other.visits)) == (2, 6)
    assert not once.done(), "it may have been acted on"
    once.cancel()
    await asyncio.gather(once, return_exceptions=True)


async def test_where_no_other_machine_takes_it_a_request_waits_for_the_program_that_hangs(programs: Programs) -> None:
    go = asyncio.Event()

    async def late(visit: Visit) -> None:
        await go.wait()
        await hello(visit)

    hung = await programs.machine("m1", late)
    waits = asyncio.create_task(programs.ask("edge", "GET"))
    await until(lambda: len(hung.visits) == 1)
    programs.check("m1", "critical")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waits), HUNG_S * 2)
    go.set()
    assert (await waits).body == b"hello"
    assert len(hung.visits) == 1

"""The catalog over HTTP, from agents with real sockets; and what takes virtual time, from simulated ones."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from tests.catalog.owners import Owner, machine
from tests.kit.virtual_time import run_in_virtual_time
from tests.kit.waiting import eventually, until

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings
from hawker.catalog.gossip.node import Node as Member
from hawker.catalog.gossip.replica import Replica
from hawker.client.connection import Peer
from hawker.client.deadline import within
from hawker.host import live
from hawker.http.events import SEND_S, EventStream
from hawker.model.catalog import LogId, Position
from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process
from hawker.sim.platform.record import Record

TOKENS = TokenSettings(cluster="c" * 20, users={"alice": "t" * 20})
AS_ALICE = {"authorization": "Bearer " + "t" * 20, "content-type": "application/json"}


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: Any


class Reader:
    """A client of one agent."""

    def __init__(self, agent: Agent, port: int) -> None:
        self.agent = agent
        self.port = port
        self.peer = Peer("127.0.0.1", port, headers=AS_ALICE)

    @property
    def replica(self) -> Replica:
        """That of the built-in engine."""
        assert isinstance(self.agent.catalog, Member)
        return self.agent.catalog.replica

    async def get(self, path: str) -> Answer:
        answer = await self.peer.request("GET", path, timeout_s=10)
        return Answer(answer.status, json.loads(answer.body))

    async def sql(self, query: str, **more: Any) -> Answer:
        body = json.dumps({"query": query, **more}).encode()
        answer = await self.peer.request("POST", "/v1/hawker/sql", body=body, timeout_s=10)
        return Answer(answer.status, json.loads(answer.body))

    async def events(
        self, query: str, headers: dict[str, str] | None = None, **more: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        path = "/v1/hawker/subscribe?" + urlencode({"query": query, **more})
        async with self.peer.stream("GET", path, headers=headers or {}, timeout_s=10) as stream:
            assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            rest = b""
            async for chunk in stream.chunks:
                *whole, rest = (rest + chunk).split(b"\n\n")
                for text in whole:
                    yield dict(line.split(": ", 1) for line in text.decode().splitlines())


@asynccontextmanager
async def agents(directory: Path, *names: str) -> AsyncIterator[list[Reader]]:
    """Brokers of one region that know each other, without workers."""
    async with AsyncExitStack() as stack:
        readers: list[Reader] = []
        for name in names:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            join = [f"127.0.0.1:{readers[0].port}"] if readers else []
            settings = AgentSettings(
                name=name,
                region="ord",
                directory=directory / name,
                tokens=TOKENS,
                broker=BrokerRole(listen=f"127.0.0.1:{port}"),
                catalog=CatalogSettings(join=join),
            )
            agent = Agent(settings, live())
            await agent.open()
            stack.push_async_callback(agent.close)
            readers.append(Reader(agent, port))
            stack.push_async_callback(readers[-1].peer.close)
        yield readers


async def test_a_query_is_answered_from_the_agents_own_replica(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        Owner(reader.replica, "ord-1").put("machines", m1=machine(), m2=machine("stopped"))
        found = await reader.sql("select worker, id, state from machines order by id")
        rows = [["ord-1", "m1", "started"], ["ord-1", "m2", "stopped"]]
        assert found == Answer(200, {"columns": ["worker", "id", "state"], "rows": rows})
        assert (await reader.sql("select id from machines limit 0", on="catalog")).body == {
            "columns": ["id"],
            "rows": [],
        }


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("delete from machines", "view"),
        ("delete from machines_of", "not authorized"),
        ("insert into _log values ('x', 'region', 1, 1, 0, '[]')", "not authorized"),
        ("attach 'x.db' as x", "not authorized"),
        ("select 1; select 2", "one statement at a time"),
        ("select a.rowid from machines a", "no such column"),
        ("", "give a select statement"),
    ],
)
async def test_a_query_that_would_write_or_makes_no_sense_is_refused_with_sqlites_own_words(
    tmp_path: Path, query: str, why: str
) -> None:
    async with agents(tmp_path, "a") as (reader,):
        answer = await reader.sql(query)
        assert (answer.status, answer.body["status"]) == (400, "invalid_argument")
        assert why in answer.body["error"]


async def test_workers_databases_are_asked_only_when_that_is_said(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        nobody = {"columns": ["worker"], "rows": [], "unreachable": []}
        assert await reader.sql("select 1", on="workers") == Answer(200, nobody)
        assert (await reader.sql("select 1", worker="ord-9")).status == 404
        assert (await reader.sql("select 1", worker="ord-9", on="catalog")).status == 400


async def test_a_subscription_is_a_stream_of_events_that_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        owner = Owner(reader.replica, "ord-1")
        owner.put("machines", m1=machine())
        query = "select id, state from machines"
        events = reader.events(query)
        snapshot = [await anext(events) for _ in range(3)]
        assert [(e["event"], json.loads(e["data"])) for e in snapshot] == [
            ("columns", ["id", "state"]),
            ("row", {"row": 1, "values": ["m1", "started"]}),
            ("end", {"rows": 1}),
        ]
        owner.put("machines", m1=machine("stopped"))
        told = await anext(events)
        assert json.loads(told["data"]) == {"kind": "update", "row": 1, "values": ["m1", "stopped"]}
        await events.aclose()
        owner.put("machines", m2=machine())
        for headers, since in (({"last-event-id": told["id"]}, {}), ({}, {"from": told["id"]})):
            again = reader.events(query, headers, **since)
            assert (await anext(again))["event"] == "columns"
            missed = await anext(again)
            assert (missed["event"], json.loads(missed["data"])["values"]) == ("change", ["m2", "started"])
            await again.aclose()
        ended = [e["event"] async for e in reader.events(query, seconds="0")]
        assert ended == ["columns", "row", "row", "end"]


async def test_a_listener_that_goes_away_is_noticed(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        listeners = 'hawker_catalog_subscriptions{of="listeners"}'

        def listening() -> str:
            text = reader.agent.metrics.exposition().decode()
            return next(
                line.removeprefix(listeners).strip() for line in text.splitlines() if line.startswith(listeners)
            )

        events = reader.events("select id from machines")
        await anext(events)
        assert listening() == "1.0"
        await events.aclose()
        await until(lambda: listening() == "0.0")


async def test_a_bad_subscription_is_refused_before_the_stream_begins(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        for query in ("query=", "", "query=selec", "query=select+1&seconds=-1"):
            assert (await reader.get(f"/v1/hawker/subscribe?{query}")).status == 400


async def test_an_agent_that_stops_ends_its_streams_at_once_and_says_so(tmp_path: Path) -> None:
    async with agents(tmp_path, "a") as (reader,):
        events = reader.events("select 1")
        names = [(await anext(events))["event"] for _ in range(3)]
        assert names == ["columns", "row", "end"]
        closing = asyncio.create_task(reader.agent.close())
        last = await anext(events)
        assert (last["event"], json.loads(last["data"])["error"]) == ("error", "this agent stops")
        async with within(2.0):  # less than a server waits for requests that go on
            await closing


async def test_members_tells_who_is_there_and_how_fresh_their_rows_are(tmp_path: Path) -> None:
    async with agents(tmp_path, "a", "b") as (a, b):

        async def alive() -> bool:
            found = (await a.get("/v1/hawker/members")).body
            return [(m["name"], m["status"], m["here"]) for m in found] == [("a", "alive", True), ("b", "alive", False)]

        await eventually(alive, "both are members")
        Owner(a.replica, "ord-9").put("machines", m1=machine())
        Owner(a.replica, "mad-1", "global").put(
            "workers", **{"mad-1": {"region": "mad", "host": "10.0.0.9", "port": 4281}}
        )
        found = {m["name"]: m for m in (await a.get("/v1/hawker/members")).body}
        assert list(found) == ["a", "b", "ord-9", "mad-1"]
        assert found["b"]["address"] == f"127.0.0.1:{b.port}"
        assert (found["b"]["region"], found["b"]["roles"], found["b"]["logs"]) == ("ord", ["broker"], [])
        assert found["ord-9"]["status"] == "missing"
        assert found["ord-9"]["logs"] == [
            {"tier": "region", "epoch": 1, "head": 1, "confirmed_s": None, "behind_s": 0.0}
        ]
        assert (found["mad-1"]["status"], found["mad-1"]["region"]) == ("remote", "mad")
        assert found["mad-1"]["address"] == "10.0.0.9:4281"
        await b.agent.close()

        async def left() -> bool:
            return any(m["name"] == "b" and m["status"] == "left" for m in (await a.get("/v1/hawker/members")).body)

        await eventually(left, "b has left")
        counted = a.agent.metrics.exposition().decode()
        assert 'hawker_members{status="left"} 1.0' in counted
        assert (await a.get("/health")).status == 200


async def test_an_agent_without_a_catalog_says_so(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    broker = BrokerRole(listen=f"127.0.0.1:{port}", workers=["ord-1@ord=127.0.0.1:1"])
    agent = Agent(AgentSettings(name="a", region="ord", directory=tmp_path, tokens=TOKENS, broker=broker), live())
    await agent.open()
    reader = Reader(agent, port)
    try:
        for answer in (
            await reader.sql("select 1"),
            await reader.get("/v1/hawker/members"),
            await reader.get("/v1/hawker/subscribe?query=select+1"),
        ):
            assert (answer.status, answer.body["error"]) == (
                412,
                "this agent has a fixed list of workers, and no catalog",
            )
        assert await reader.get("/health") == Answer(200, {"ok": True, "role": "broker", "name": "a", "reason": ""})
    finally:
        await reader.peer.close()
        await agent.close()


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """Its connection is left unfinished, which makes the server close it."""

    async def test() -> None:
        closed: list[float] = []

        async def events() -> Any:
            try:
                yield b"event: a\ndata: 1\n\n"
            finally:
                closed.append(asyncio.get_running_loop().time())

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await EventStream(events())({"type": "http"}, receive, send)
        assert closed == [pytest.approx(SEND_S)]

    run_in_virtual_time(test())


# --- simulated agents ------------------------------------------------------------------------------------------------


class Simulated:
    """Two brokers of one region on a simulated network and disk, and a client of theirs."""

    def __init__(self, loop: SimLoop) -> None:
        self.net = Net(loop, Record(loop.time), "1", ["ord"])
        self.nodes: list[Node] = []
        for number, name in enumerate(("a", "b"), start=1):
            join = [f"{self.nodes[0].station.address}:4280"] if self.nodes else []
            settings = AgentSettings(
                name=name,
                region="ord",
                directory=DIRECTORY,
                tokens=TOKENS,
                broker=BrokerRole(listen="0.0.0.0:4280"),
                catalog=CatalogSettings(join=join, advertise=f"10.1.0.{number}:4280"),
            )
            self.nodes.append(Node(self.net, "1", settings, {}, the_agent))
        self.client = Process("client", self.net.station("client", "ord"))

    def agent(self, number: int) -> Agent:
        agent = self.nodes[number].agent
        assert agent is not None
        return agent

    async def ask(self, path: str, body: bytes = b"", *, number: int = 0) -> tuple[int, Any]:
        peer = Peer(self.nodes[number].station.address, 4280, headers=AS_ALICE)
        answer = await peer.request("POST" if body else "GET", path, body=body, timeout_s=5)
        await peer.close()
        return answer.status, json.loads(answer.body)

    def cut(self, by: int) -> None:
        a, b = (node.station for node in self.nodes)
        for link in (self.net.link(a, b), self.net.link(b, a)):
            link.cuts += by


def in_simulation(test: Callable[[Simulated], Awaitable[None]], *, cut: bool = False) -> None:
    async def main(loop: SimLoop) -> None:
        simulated = Simulated(loop)
        simulated.cut(int(cut))
        for node in simulated.nodes:
            node.start()

        async def talk() -> None:
            await asyncio.sleep(5)
            await test(simulated)

        await loop.run_in(simulated.client, talk())
        assert not loop.unhandled
        for node in simulated.nodes:
            node.kill()

    run(main)


def test_an_isolated_agent_says_that_it_should_get_no_traffic_until_it_hears_from_somebody() -> None:
    async def test(simulated: Simulated) -> None:
        assert (await simulated.ask("/health"))[0] == 200
        simulated.cut(1)
        await asyncio.sleep(50)
        assert (await simulated.ask("/health"))[0] == 200, "suspicion takes its time, too"
        await asyncio.sleep(20)
        status, health = await simulated.ask("/health")
        assert (status, health["ok"], health["name"]) == (503, False, "a")
        assert health["reason"].startswith("isolated: it has heard from none of 1 other nodes")
        simulated.cut(-1)
        await asyncio.sleep(60)
        assert await simulated.ask("/health") == (200, {"ok": True, "role": "broker", "name": "a", "reason": ""})

    in_simulation(test)


def test_an_agent_whose_neighbours_have_all_left_is_well() -> None:
    async def test(simulated: Simulated) -> None:
        leaving = simulated.nodes[1]
        assert leaving.process is not None
        await simulated.net.loop.run_in(leaving.process, simulated.agent(1).close())
        await asyncio.sleep(70)
        assert {m["name"]: m["status"] for m in (await simulated.ask("/v1/hawker/members"))[1]}["b"] == "left"
        assert (await simulated.ask("/health"))[0] == 200

    in_simulation(test)


def test_an_agent_that_never_reached_whom_it_was_told_to_join_is_isolated_and_one_that_knows_nobody_is_not() -> None:
    async def test(simulated: Simulated) -> None:
        await asyncio.sleep(70)
        assert (await simulated.ask("/health", number=0))[0] == 200
        status, health = await simulated.ask("/health", number=1)
        assert (status, health["reason"].partition(":")[0]) == (503, "isolated")

    in_simulation(test, cut=True)


def test_an_agent_that_cannot_get_what_a_live_owner_has_says_that_it_is_behind() -> None:
    async def test(simulated: Simulated) -> None:
        node = simulated.nodes[0].member
        assert node is not None
        told = (simulated.nodes[1].station.address, 4280)
        node.replication.heard(told, LogId("gone", "region"), Position(1, 5))
        await asyncio.sleep(40)
        assert (await simulated.ask("/health"))[0] == 200, "what a dead owner announced is nowhere to be had"
        node.replication.heard(told, LogId("b", "region"), Position(1, 5))
        await asyncio.sleep(40)
        status, health = await simulated.ask("/health")
        assert (status, health["reason"]) == (503, "behind: it has known for 40 s of versions that it lacks")
        found = {member["name"]: member for member in (await simulated.ask("/v1/hawker/members"))[1]}
        (log,) = found["b"]["logs"]
        assert (log["tier"], log["head"], log["behind_s"]) == ("region", 0, pytest.approx(40, abs=1))

    in_simulation(test)


def test_people_read_over_the_one_connection_that_a_simulated_disk_takes() -> None:
    async def test(simulated: Simulated) -> None:
        node = simulated.nodes[0].member
        assert node is not None
        owner = Owner(node.replica, "ord-1")
        owner.put("machines", m1=machine())
        query = b'{"query": "select id from machines"}'
        assert await simulated.ask("/v1/hawker/sql", query) == (200, {"columns": ["id"], "rows": [["m1"]]})
        endless = b'{"query": "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"}'
        assert (await simulated.ask("/v1/hawker/sql", endless))[0] == 400
        ours = "with recursive c(n) as (select 1 union all select n + 1 from c limit 100000) select count(*) from c"
        assert node.replica.rows(ours) == [(100_000,)], "limits are people's alone"
        assert (await simulated.ask("/v1/hawker/sql", b'{"query": "delete from machines_of"}'))[0] == 400
        owner.put("machines", m1=None, m2=machine())
        assert (await simulated.ask("/v1/hawker/sql", query))[1]["rows"] == [["m2"]]

    in_simulation(test)

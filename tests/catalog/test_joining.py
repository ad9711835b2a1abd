"""How members find each other, on virtual time: live agents over a simulated network."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.virtual_time import virtual_time

from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings
from hawker.catalog.gossip.joining import HINT_S, Joining
from hawker.client.wire import PeerUnreachable
from hawker.core.swim.members import Member, Status, View
from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.record import Record
from hawker.telemetry import logs_into

PORT = 4280


def a_region(loop: SimLoop, seed: int, size: int) -> list[Node]:
    """Brokers of one region, each told of the first, who is told of nobody."""
    net = Net(loop, Record(loop.time), str(seed), ["ord"])
    nodes: list[Node] = []
    for n in range(size):
        nodes.append(a_broker(net, seed, f"ord-{n}", nodes[:1]))
    return nodes


def a_broker(net: Net, seed: int, name: str, joins: list[Node], token: str = "c" * 20) -> Node:
    settings = AgentSettings(
        name=name,
        region="ord",
        directory=DIRECTORY,
        tokens=TokenSettings(cluster=token),
        broker=BrokerRole(listen=f"0.0.0.0:{PORT}"),
        catalog=CatalogSettings(join=[f"{node.station.address}:{PORT}" for node in joins]),
    )
    node = Node(net, str(seed), settings, {}, the_agent)
    settings.catalog.advertise = f"{node.station.address}:{PORT}"
    return node


def known_to(node: Node) -> int:
    assert node.agent is not None
    assert node.member is not None
    return len(node.member.membership.live())


@pytest.mark.parametrize("seed", range(4))
def test_members_that_start_again_together_find_those_that_ran_on(seed: int) -> None:
    """Once each asked one member, and those that had just started introduced each other and nobody else: they heard
    nothing of the rest until a timer of ten seconds had run out."""

    async def main(loop: SimLoop) -> None:
        nodes = a_region(loop, seed, 4)
        for node in nodes:
            node.start()
        await asyncio.sleep(20)
        assert [known_to(node) for node in nodes] == [3] * 4
        for node in nodes[:2]:
            node.kill()
        for node in nodes[:2]:
            node.start()
        await asyncio.sleep(2)
        assert [known_to(node) for node in nodes] == [3] * 4
        for node in nodes:
            node.kill()

    run(main)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_second_agent_of_a_name_in_use_does_not_start_and_is_told_who_has_it(asked: int) -> None:
    """It published under the name of the first, whose machines vanished from the brokers' lists meanwhile."""

    async def main(loop: SimLoop) -> None:
        nodes = a_region(loop, 1, 3)
        for node in nodes:
            node.start()
        await asyncio.sleep(20)
        second = a_broker(nodes[0].net, 1, "ord-1", [nodes[asked]])
        ends: list[str] = []
        second.on_event = lambda what, why: ends.append(why) if what == "end" else None
        second.start()
        await asyncio.sleep(10)
        taken = f"the name ord-1 is taken: the agent at {nodes[1].station.address}:{PORT} has it, and answers"
        assert {why.removeprefix("could not open: ") for why in ends} == {taken}
        assert [known_to(node) for node in nodes] == [2] * 3
        second.kill()
        nodes[1].kill()
        moved = a_broker(nodes[0].net, 1, "ord-1", [nodes[0]])
        moved.start()  # the same agent with another address: nobody answers at the one before
        await asyncio.sleep(10)
        assert moved.serving
        for node in (*nodes, moved):
            node.kill()

    run(main)


def test_an_agent_with_another_cluster_token_says_so() -> None:
    async def main(loop: SimLoop) -> None:
        (first,) = a_region(loop, 1, 1)
        first.start()
        second = a_broker(first.net, 1, "ord-1", [first], token="d" * 20)
        said: set[str] = set()

        def hear(level: str, event: str, fields: dict[str, Any]) -> None:
            if event == "catalog.join_failed":
                said.add(fields["error"])

        with logs_into(hear):
            second.start()
            await asyncio.sleep(5)
        at = f"{first.station.address}:{PORT}"
        assert said == {f"{at} has another cluster token: tokens.cluster must be the same at all agents"}
        for node in (first, second):
            node.kill()

    run(main)


@virtual_time
async def test_an_address_that_packets_come_from_and_nobody_announces_is_asked_now_and_then() -> None:
    """A host with two addresses sends from the one and announces the other: each of its packets is a hint."""
    asked: list[float] = []
    loop = asyncio.get_running_loop()

    async def ask(*question: Any) -> Any:
        asked.append(loop.time())
        raise PeerUnreachable("10.0.0.9", "takes no connection", sent=False)

    me = Member("ord-1", 1, "10.0.0.1", PORT, "ord")
    replica: Any = SimpleNamespace(on_applied=[], rows=lambda sql, values: [])
    exchange: Any = SimpleNamespace(ask=ask)
    swim = SimpleNamespace(members={me.name: View(me, Status.alive, 0)})
    membership: Any = SimpleNamespace(swim=swim, live=list)
    replication: Any = SimpleNamespace()
    joining = Joining(me, (), replica, exchange, membership, replication, Random(1))
    running = loop.create_task(joining.run())
    for _ in range(200):
        joining.hint(("10.0.0.9", PORT))
        await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert 3 <= len(asked) <= 20 / HINT_S + 1

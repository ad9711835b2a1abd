"""What a node asks for, and for how long it knows that it lacks something."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.catalog.owners import Owner
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.catalog.gossip.exchange import Address, Exchange
from hawker.catalog.gossip.packets import Sealer
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import HOLE_S, SOON_S, TAKE_S, FetchAnswer, Replication
from hawker.client.wire import PeerUnreachable
from hawker.model.catalog import Change, Position, Version
from hawker.sim.platform.disk import CrashDisk
from hawker.telemetry import Metrics, logs_into

NEIGHBOUR = "127.0.0.1", 4281


class Asked(Exchange):
    """Nobody answers; what was asked for is noted."""

    def __init__(self) -> None:
        super().__init__(Sealer("fleet", ["secret"], Random(1)), "token")
        self.asked: list[Any] = []

    async def ask(self, to: Address, call: Any, question: Any, timeout_s: float | None = None) -> Any:
        self.asked.append(question)
        raise PeerUnreachable("ord-2", "does not answer", sent=False)


def replication(replica: Replica, exchange: Exchange) -> Replication:
    return Replication("ord-1", NEIGHBOUR, replica, exchange, lambda version: None, lambda tier, epoch: None, Metrics())


def row(name: str) -> dict[str, Any]:
    return {name: {"app": "web", "name": name, "region": "ord", "state": "started"}}


@virtual_time
async def test_what_was_made_up_for_does_not_count_towards_the_next_time_it_is_behind(tmp_path: Path) -> None:
    replica = Replica.open(tmp_path / "catalog.db", virtual_host())
    node, now = replication(replica, Asked()), asyncio.get_running_loop().time
    owner = Owner(replica, "ord-2")
    owner.put("machines", **row("a"))
    log = owner.origin.log
    node.heard(NEIGHBOUR, log, Position(1, 2))
    await asyncio.sleep(40)
    assert node.behind(log, now()) == pytest.approx(40)
    owner.put("machines", **row("b"))
    assert node.behind(log, now()) == 0
    await asyncio.sleep(3600)
    node.heard(NEIGHBOUR, log, Position(1, 3))
    await asyncio.sleep(1)
    assert node.behind(log, now()) == pytest.approx(1)
    await node.close()
    replica.close()


@virtual_time
async def test_every_hole_is_asked_for_not_only_the_first_one_of_a_log(tmp_path: Path) -> None:
    replica = Replica.open(tmp_path / "catalog.db", virtual_host())
    exchange = Asked()
    node = replication(replica, exchange)
    owner = Owner(replica, "ord-2")
    owner.put("machines", **row("a"))
    node.heard(NEIGHBOUR, owner.origin.log, Position(1, 2))
    await asyncio.sleep(1)
    owner.put("machines", **row("b"))
    exchange.asked.clear()
    for lost in (3, 5):
        change = Change("machines", "c", row("c")["c"])
        node.told(NEIGHBOUR, [Version("ord-2", "region", 1, lost + 1, (change,))])
        await asyncio.sleep(1)
        assert len(exchange.asked) == (lost - 1) // 2
        owner.put("machines", **row("b"))  # what was lost comes
        owner.origin = replica.origin(owner.origin.log) or owner.origin
        assert owner.origin.head == lost + 1
    await node.close()
    replica.close()


@virtual_time
async def test_what_is_told_by_its_position_is_asked_for_sooner_than_what_may_only_be_late(tmp_path: Path) -> None:
    replica = Replica.open(tmp_path / "catalog.db", virtual_host())
    exchange = Asked()
    node, owner = replication(replica, exchange), Owner(replica, "ord-2")
    owner.put("machines", **row("a"))
    node.told(NEIGHBOUR, [Version("ord-2", "region", 1, 9, (Change("machines", "c", row("c")["c"]),))])
    await asyncio.sleep(HOLE_S * 0.9)
    assert exchange.asked == []
    node.told(NEIGHBOUR, [Version("ord-2", "region", 1, 10, ())])
    await asyncio.sleep(HOLE_S * 0.9)
    assert len(exchange.asked) == 1, "for both together"
    node.told(NEIGHBOUR, [Version("ord-2", "region", 1, 11, ())])
    await asyncio.sleep(SOON_S * 1.5)
    assert len(exchange.asked) == 2
    await node.close()
    replica.close()


class HeldUp(Replica):
    """Its file waits for the disk while `held`."""

    held = False

    @property
    def held_up(self) -> bool:
        return self.held


@virtual_time
async def test_what_is_told_while_the_file_waits_for_the_disk_is_taken_a_moment_later(tmp_path: Path) -> None:
    replica = HeldUp.open(tmp_path / "catalog.db", virtual_host())
    node, owner = replication(replica, Asked()), Owner(replica, "ord-2")
    owner.put("machines", **row("a"))
    replica.held = True
    node.told(NEIGHBOUR, [Version("ord-2", "region", 1, 2, (Change("machines", "b", row("b")["b"]),))])
    await asyncio.sleep(1)
    assert replica.position(owner.origin.log).head == 1
    replica.held = False
    await asyncio.sleep(TAKE_S * 1.5)
    assert replica.position(owner.origin.log).head == 2
    await node.close()
    replica.close()


class Answers(Exchange):
    """What `owner` has is given to who asks for it."""

    def __init__(self, owner: Replica) -> None:
        super().__init__(Sealer("fleet", ["secret"], Random(1)), "token")
        self._owner = owner

    async def ask(self, to: Address, call: Any, question: Any, timeout_s: float | None = None) -> Any:
        found = [self._owner.answer(log, at) for log, at in question.logs]
        return FetchAnswer(tuple(each for each in found if each))


@virtual_time
async def test_what_was_fetched_is_passed_on_by_its_position(tmp_path: Path) -> None:
    """Once only those that the owner itself told knew of it; in a large region the others found out a second later."""
    theirs = Replica.open(tmp_path / "theirs.db", virtual_host())
    owner = Owner(theirs, "ord-2")
    owner.put("machines", **row("a"))
    replica = Replica.open(tmp_path / "catalog.db", virtual_host())
    passed_on: list[Version] = []
    node = Replication(
        "ord-1", NEIGHBOUR, replica, Answers(theirs), passed_on.append, lambda tier, epoch: None, Metrics()
    )
    told = Version("ord-2", "region", owner.origin.epoch, owner.origin.head, ())
    node.told(NEIGHBOUR, [told])
    await asyncio.sleep(SOON_S * 2)
    assert replica.rows("select id from machines") == [("a",)]
    assert passed_on == [told]
    await node.close()
    replica.close()
    theirs.close()


@virtual_time
async def test_a_node_that_has_closed_takes_nothing_and_asks_nobody(tmp_path: Path) -> None:
    replica = Replica.open(tmp_path / "catalog.db", virtual_host())
    exchange = Asked()
    node = replication(replica, exchange)
    owner = Owner(replica, "ord-2")
    owner.put("machines", **row("a"))
    node.heard(NEIGHBOUR, owner.origin.log, Position(1, 5))
    await node.close()
    node.told(NEIGHBOUR, [Version("ord-2", "region", 1, 2, ())])
    replica.close()
    await asyncio.sleep(1)
    assert exchange.asked == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_a_full_disk_is_told_of_once_and_again_after_it_had_room() -> None:
    events = list[str]()
    with CrashDisk(seed=1) as disk, logs_into(lambda _, event, fields: events.append(event)):
        replica = Replica.open("catalog.db", virtual_host(), vfs=disk.name)
        node, owner = replication(replica, Asked()), Owner(replica, "ord-2")
        owner.put("machines", **row("a"))
        failed = []
        for number in range(2, 62):
            disk.room = None if number == 40 else disk.used()
            version = Version("ord-2", "region", 1, replica.position(owner.origin.log).head + 1, (large(number),))
            node.told(NEIGHBOUR, [version])
            await asyncio.sleep(0.01)
            failed.append(events.count("catalog.not_taken"))
        assert (failed[0], failed[30], failed[-1]) == (1, 1, 2)
        await node.close()
        replica.close()


def large(number: int) -> Change:
    return Change("machines", "a", {**row("a")["a"], "image": "x" * 4000, "generation": number})

"""Who is told what is new, and when, on virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.kit.virtual_time import virtual_time

from hawker.catalog.gossip import rumours
from hawker.catalog.gossip.local_log import GATHER_S
from hawker.catalog.gossip.rumours import RumourSender
from hawker.core.swim.settings import LAN
from hawker.model.catalog import Change, Version

VERSION = Version("ord-1", "region", 1, 1, (Change("machines", "m", {"state": "started"}),))


@pytest.mark.parametrize("neighbours", [1, 2, 3])
@virtual_time
async def test_a_small_region_hears_of_an_owners_news_at_once(neighbours: int) -> None:
    """Once a version was told twice in all where three were to hear it; the third found out a second later."""
    others = [(f"10.0.0.{n}", 1) for n in range(neighbours)]
    sent: list[tuple[rumours.Address, bytes]] = []
    own = RumourSender(LAN, Random(1), lambda: others, lambda to, payload: sent.append((to, payload)))
    own.tell(VERSION, ours=True)
    await asyncio.sleep(GATHER_S)
    assert sorted(to for to, _ in sent) == others
    assert [rumours.read(payload[1:]) for _, payload in sent] == [[VERSION]] * neighbours
    own.close()


def many(first: int, last: int) -> list[Version]:
    values = {"state": "started", "image": "x" * 300}
    return [
        Version("ord-1", "region", 1, number, (Change("machines", f"m{number}", values),))
        for number in range(first, last + 1)
    ]


@virtual_time
async def test_more_than_the_next_packets_carry_is_told_by_its_position_at_once_and_in_no_other_way() -> None:
    """Once it waited for its turn: for seconds, where an owner changed a hundred rows at a time. Then it was told whole
    to whoever fetched it, again and again."""
    sent: list[bytes] = []
    own = RumourSender(LAN, Random(1), lambda: [("10.0.0.1", 1)], lambda to, payload: sent.append(payload))
    for version in many(1, 100):
        own.tell(version, ours=True)
    await asyncio.sleep(GATHER_S)
    told = [version for payload in sent for version in rumours.read(payload[1:])]
    before = [version.number for version in told if not version.changes]
    assert len(before) == 1
    assert [version.number for version in told if version.changes] == [*range(before[0] + 1, 101)]
    own.close()


@pytest.mark.parametrize("neighbours", [2, 3])
@virtual_time
async def test_every_neighbour_hears_the_newest_first_however_much_is_told_again(neighbours: int) -> None:
    """Once what one neighbour had just heard came last for the next one, behind all that is told a second time: a
    quarter of a second later, where 200 apps were made in a second."""
    others = [(f"10.0.0.{n}", 1) for n in range(neighbours)]
    newest = dict.fromkeys(others, 0)

    def hear(to: rumours.Address, payload: bytes) -> None:
        newest[to] = max(newest[to], *(version.number for version in rumours.read(payload[1:])))

    own = RumourSender(LAN, Random(1), lambda: others, hear)
    for last in range(10, 201, 10):
        for version in many(last - 9, last):
            own.tell(version, ours=True)
        await asyncio.sleep(GATHER_S)
        assert min(newest.values()) > last - 10
    own.close()


@virtual_time
async def test_what_is_new_in_the_last_moment_is_told_before_the_end() -> None:
    sent: list[bytes] = []
    own = RumourSender(LAN, Random(1), lambda: [("10.0.0.1", 1)], lambda to, payload: sent.append(payload))
    own.tell(VERSION, ours=True)
    own.close()
    assert [rumours.read(payload[1:]) for payload in sent] == [[VERSION]]
    await asyncio.sleep(1)
    assert len(sent) == 1

"""A broker's fleet follows the catalog, and what the catalog has of apps and machines is a hint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.owners import Owner, machine

from hawker.broker.directory import Directory
from hawker.broker.fleet import Fleet
from hawker.catalog.gossip.replica import Replica
from hawker.host import live

MINUTE_MS = 60_000


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica.open(tmp_path / "catalog.db", live())
    yield replica
    replica.close()


def worker(region: str, port: int, **more: Any) -> dict[str, Any]:
    return {"region": region, "host": "127.0.0.1", "port": port, "state": "active", "since_ms": 0, **more}


def app(stamp_ms: int, **more: Any) -> dict[str, Any]:
    row = {"app_id": "web", "org": "personal", "network": "default", "number": 7, "created_at_ms": 1}
    return {**row, "stamp": stamp_ms << 16, **more}


async def test_workers_come_move_and_go_as_the_catalog_says(replica: Replica) -> None:
    fleet = Fleet([], "token")
    directory = Directory(replica, fleet)
    ord_1, mad_1 = Owner(replica, "ord-1", "global"), Owner(replica, "mad-1", "global")
    ord_1.put("workers", **{"ord-1": worker("ord", 1001)})
    mad_1.put("workers", **{"mad-1": worker("mad", 1002)})
    assert {name: (link.region, link.peer.name) for name, link in fleet.links.items()} == {
        "mad-1": ("mad", "127.0.0.1:1002"),
        "ord-1": ("ord", "127.0.0.1:1001"),
    }
    stays = fleet.links["ord-1"]
    mad_1.put("workers", **{"mad-1": worker("mad", 2002)})
    assert fleet.links["mad-1"].peer.name == "127.0.0.1:2002"
    ord_1.put("workers", **{"ord-1": worker("ord", 1001, since_ms=MINUTE_MS)})
    assert fleet.links["ord-1"] is stays  # it lost its disk; what is on its way there goes on
    mad_1.put("workers", **{"mad-1": None})
    assert fleet.links == {"ord-1": stays}
    directory.close()
    ord_1.put("workers", **{"ord-1": None})
    assert fleet.links == {"ord-1": stays}  # nobody listens any more
    await fleet.close()


@pytest.mark.parametrize("name", ["a\r\nx: y", "\u2603", "a b", "\x7f", "a/b", "'", "\U0001f600", "[", "]", "*"])
async def test_a_row_of_what_cannot_be_a_worker_keeps_nobody_from_the_others(replica: Replica, name: str) -> None:
    """A broker that read it followed the directory no more, and one that began did not begin."""
    fleet = Fleet([], "token")
    directory = Directory(replica, fleet)
    owner, other = Owner(replica, "ord-1", "global"), Owner(replica, name, "global")
    other.put("workers", **{name: worker("ord", 1000)})
    owner.put("workers", **{"ord-1": worker("ord", 1001)})
    assert list(fleet.links) == ["ord-1"]
    directory.close()
    again = Fleet([], "token")
    Directory(replica, again).close()
    assert list(again.links) == ["ord-1"]
    assert replica.rows("select id from workers_rows order by id = 'ord-1'") == [(name,), ("ord-1",)]
    await fleet.close()
    await again.close()


@pytest.mark.parametrize("sketch", ["[1]", '["a", null]', "[[]]", '[{"a": 1}]'])
async def test_a_sketch_of_images_that_is_none_keeps_no_order_from_the_others(replica: Replica, sketch: str) -> None:
    """Every order of a region with many workers looks at all sketches."""
    fleet = Fleet([], "token", "ord")
    directory = Directory(replica, fleet)
    Owner(replica, "ord-2").put("images", **{"ord-2": {"names": sketch}})
    Owner(replica, "ord-1").put("images", **{"ord-1": {"names": '["abcd"]'}})
    assert directory.image_holders("ord") == {"abcd": frozenset({"ord-1"})}
    directory.close()
    await fleet.close()


async def test_who_holds_the_links_across_an_await_keeps_the_fleet_as_it_was(replica: Replica) -> None:
    fleet = Fleet([], "token")
    Directory(replica, fleet)
    owner = Owner(replica, "ord-1", "global")
    owner.put("workers", **{"ord-1": worker("ord", 1001)})
    held = fleet.links
    owner.put("workers", **{"ord-1": None})
    await asyncio.sleep(0)
    assert list(held) == ["ord-1"]
    assert fleet.links == {}
    await fleet.close()


async def test_a_worker_decides_nothing_until_every_broker_has_heard_of_it(replica: Replica) -> None:
    fleet = Fleet([], "token")
    Directory(replica, fleet)
    Owner(replica, "ord-1", "global").put("workers", **{"ord-1": worker("ord", 1001)})
    late = worker("ord", 1002, since_ms=10 * MINUTE_MS)
    Owner(replica, "ord-2", "global").put("workers", **{"ord-2": late})
    assert fleet.settled(10 * MINUTE_MS + 1) == ["ord-1"]
    assert sorted(fleet.settled(11 * MINUTE_MS)) == ["ord-1", "ord-2"]
    await fleet.close()


async def test_of_an_apps_rows_the_newest_counts_and_its_deletion_is_told(replica: Replica) -> None:
    directory = Directory(replica, Fleet([], "token"))
    Owner(replica, "ord-1", "global").put("apps", web=app(10), shop=app(10))
    Owner(replica, "mad-1", "global").put("apps", web=app(20, deployed=True))
    known = directory.app("web")
    assert known is not None
    assert (known.stamp_ms, known.deployed, known.deleted, known.number) == (20, True, False, 7)
    Owner(replica, "mad-2", "global").put("apps", web=app(30, deleted=True))
    deleted = directory.app("web")
    assert deleted is not None
    assert deleted.deleted
    assert {row.name: row.stamp_ms for row in directory.apps()} == {"web": 30, "shop": 10}
    assert directory.app("unknown") is None


async def test_a_machines_worker_is_the_one_with_the_highest_generation(replica: Replica) -> None:
    directory = Directory(replica, Fleet([], "token"))
    assert directory.worker_of("a" * 14) == ""
    Owner(replica, "ord-1").put("machines", **{"a" * 14: machine()})
    Owner(replica, "ord-2").put("machines", **{"a" * 14: machine(generation=2)})
    assert directory.worker_of("a" * 14) == "ord-2"

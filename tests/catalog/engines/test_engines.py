"""What every engine of the catalog does: what a worker publishes is seen by all, whole and in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.engines.fleet import CHECKS, PORT, Fleet, catalog, in_fleet, rows, seen_check, worker
from tests.kit.waiting import until

from hawker.errors import NotFound
from hawker.model.catalog import Change
from hawker.sim.hosts.node import Node


def watched(node: Node, sql: str) -> list[list[tuple[Any, ...]]]:
    """What a reader sees each time that the view tells of a change."""
    found: list[list[tuple[Any, ...]]] = []
    view = catalog(node).view
    view.on_applied.append(lambda tables: found.append(view.rows(sql)))
    return found


def test_what_a_worker_publishes_is_seen_elsewhere_whole_and_in_order(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        seen = watched(reader, "select id, updated_at_ms from checks order by id")
        for n in range(1, 21):
            await fleet.check(owner, ("m1", n), ("m2", n))
            await asyncio.sleep(0.03)
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 20), seen_check("m2", 20)])
        pairs = [dict(each) for each in seen if each]
        assert all(pair["m1/up"] == pair["m2/up"] for pair in pairs), "a commit is seen whole"
        numbers = [pair["m1/up"] for pair in pairs]
        assert numbers == sorted(numbers)
        assert len(set(numbers)) > 5, "and not only the last one"

    in_fleet(engine, tmp_path, test)


def test_a_region_keeps_its_own_rows_and_shares_the_others(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, near = await fleet.worker("a"), await fleet.worker("b")
        far = await fleet.worker("c", "fra")
        await fleet.count(owner, "web", 1)
        await fleet.check(owner, ("m1", 1))
        await fleet.until_seen(near, CHECKS, [seen_check("m1", 1)])
        for node in (near, far):
            await fleet.until_seen(node, "select app, region, workers from app_regions", [("web", "ord", 1)])
        await asyncio.sleep(5)
        assert rows(far, CHECKS) == []

    in_fleet(engine, tmp_path, test)


def test_a_deleted_row_is_gone_everywhere(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, ("m1", 1), ("m2", 1))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 1), seen_check("m2", 1)])
        await fleet.check(owner, gone=("m1",))
        await fleet.until_seen(reader, CHECKS, [seen_check("m2", 1)])

    in_fleet(engine, tmp_path, test)


@pytest.mark.parametrize("how", ["kill", "cut_power"])
def test_an_owner_that_is_started_again_goes_on_where_it_was(engine: str, how: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, ("m1", 1), ("m2", 1))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 1), seen_check("m2", 1)])
        getattr(owner, how)()
        await asyncio.sleep(2)
        assert rows(reader, CHECKS) == [seen_check("m1", 1), seen_check("m2", 1)], "an owner that is away is believed"
        await fleet.start(owner)
        await fleet.check(owner, ("m1", 2), gone=("m2",))
        for node in (owner, reader):
            await fleet.until_seen(node, CHECKS, [seen_check("m1", 2)])

    in_fleet(engine, tmp_path, test)


def test_of_an_owner_that_lost_its_disk_only_what_it_publishes_now_is_left(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, ("m1", 1), ("m2", 1))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 1), seen_check("m2", 1)])
        owner.cut_power()
        owner.lose_disk()
        owner.recover = "discard"
        await fleet.start(owner)
        await fleet.check(owner, ("m3", 1))
        for node in (owner, reader):
            await fleet.until_seen(node, CHECKS, [seen_check("m3", 1)])

    in_fleet(engine, tmp_path, test)


def test_of_an_owner_whose_backup_was_brought_back_only_what_the_backup_has_is_left(
    engine: str, tmp_path: Path
) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, ("m1", 1))
        owner.kill()
        backup = {name: bytes(content.seen) for name, content in owner.disk.files.items()}
        await fleet.start(owner)
        await fleet.check(owner, ("m1", 2), ("m2", 2))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 2), seen_check("m2", 2)])
        owner.kill()
        owner.lose_disk(backup)
        owner.recover = "discard"
        await fleet.start(owner)
        await fleet.check(owner, ("m3", 3))
        for node in (owner, reader):
            await fleet.until_seen(node, CHECKS, [seen_check("m1", 1), seen_check("m3", 3)])

    in_fleet(engine, tmp_path, test)


@pytest.mark.parametrize("disk", ["its disk kept", "its disk lost"])
def test_a_reader_that_was_away_catches_up(engine: str, disk: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, ("m1", 1), ("m2", 1))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 1), seen_check("m2", 1)])
        reader.cut_power()
        if disk == "its disk lost":
            reader.lose_disk()
            reader.recover = "discard"
        for n in range(2, 6):
            await fleet.check(owner, ("m1", n), gone=("m2",))
        await fleet.start(reader)
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 5)])

    in_fleet(engine, tmp_path, test)


def test_a_node_that_says_it_is_complete_shows_all_that_was_published_before_it_began(
    engine: str, tmp_path: Path
) -> None:
    async def test(fleet: Fleet) -> None:
        owner, other = await fleet.worker("a"), await fleet.worker("b")
        await fleet.check(owner, *((f"m{n:03}", 1) for n in range(200)))
        await fleet.check(other, ("other", 1))
        late = await fleet.worker("c")
        await until(lambda: catalog(late).complete(), 120)
        assert len(rows(late, CHECKS)) == 201
        assert catalog(late).unfit() == ""

    in_fleet(engine, tmp_path, test)


def test_a_worker_changes_no_rows_but_its_own(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, thief = await fleet.worker("a"), await fleet.worker("b")
        reader = await fleet.worker("c")
        await fleet.check(owner, ("m1", 1))
        for table, key, values in (
            ("workers", "a", {"region": "ord", "host": "stolen", "port": 1}),
            ("checks", "m1/up", {"machine": "m1", "name": "up", "status": "critical", "updated_at_ms": 9}),
        ):
            tier: Any = "global" if table == "workers" else "region"
            put = worker(thief).publisher.put(tier, Change(table, key, values), "test.put", "a test")
            await fleet.do(thief, put)
        both = "select worker, status from checks_rows where id = 'm1/up' order by worker"
        await fleet.until_seen(reader, both, [("a", "passing"), ("b", "critical")])
        hosts = "select host from workers where name = 'a'"
        assert rows(reader, hosts) == [(owner.station.address,)]

    in_fleet(engine, tmp_path, test)


def test_a_row_that_cannot_be_shown_stops_no_other_and_is_shown_once_it_can(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")

        async def put(updated: Any) -> None:
            values = {"machine": "bad", "name": "up", "status": "passing", "updated_at_ms": updated}
            change = Change("checks", "bad/up", values)
            await fleet.do(owner, worker(owner).publisher.put("region", change, "test.put", "a test"))

        await put("no number")
        await fleet.check(owner, ("m1", 1))
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", 1)])
        assert rows(reader, "select owner, key from quarantine") == [("a", "bad/up")]
        await put(7)
        await fleet.until_seen(reader, CHECKS, [seen_check("bad", 7), seen_check("m1", 1)])
        assert rows(reader, "select owner, key from quarantine") == []

    in_fleet(engine, tmp_path, test)


def test_a_worker_that_is_forgotten_is_gone_everywhere_until_it_is_back(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        gone, asked, reader = await fleet.worker("a"), await fleet.worker("b"), await fleet.worker("c")
        await fleet.check(gone, ("m1", 1))
        names = "select name from workers order by name"
        for node in (asked, reader):
            await fleet.until_seen(node, CHECKS, [seen_check("m1", 1)])
            await fleet.until_seen(node, names, [("a",), ("b",), ("c",)])
        gone.kill()
        with pytest.raises(NotFound):
            await fleet.do(asked, catalog(asked).forget("nobody", "a test"))
        await fleet.do(asked, catalog(asked).forget("a", "a test"))
        for node in (asked, reader):
            await fleet.until_seen(node, names, [("b",), ("c",)])
            await fleet.until_seen(node, CHECKS, [])
        await fleet.start(gone)
        for node in (asked, reader):
            await fleet.until_seen(node, CHECKS, [seen_check("m1", 1)])

    in_fleet(engine, tmp_path, test)


def test_every_owner_is_named_with_its_region_and_address(engine: str, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await fleet.until_seen(reader, "select name from workers order by name", [("a",), ("b",)])
        await until(lambda: {member.name for member in catalog(reader).owners()} == {"a", "b"})
        [found] = [member for member in catalog(reader).owners() if member.name == "a"]
        assert (found.region, found.address, found.here) == ("ord", f"{owner.station.address}:{PORT}", False)
        assert {log.tier for log in found.logs} == {"region", "global"}
        assert all(log.behind_s == 0 for log in found.logs)
        began = rows(reader, "select began_ms from workers where name = 'a'")
        assert 0 < began[0][0] <= reader.world.host.now_ms()

    in_fleet(engine, tmp_path, test)

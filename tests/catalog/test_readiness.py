"""When a member may conclude from a row that is missing that what it tells of is not there, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.catalog.owners import Owner
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.catalog.gossip.readiness import LOOK_S, WAIT_S, Readiness
from hawker.catalog.gossip.replica import Replica
from hawker.core.freshness import Freshness
from hawker.core.swim.members import Member
from hawker.errors import StoreError
from hawker.model.catalog import TIERS, LogId, Tier


class Around:
    """A member `edge` of a region, and what it has met of that so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replica = Replica.open(path, virtual_host())
        self.freshness = Freshness()
        self.seeds = True
        self.live: list[Member] = []
        self.owners: dict[tuple[str, Tier], Owner] = {}
        self.readiness = Readiness("edge", "ord", self.replica, self.freshness, lambda: self.seeds, lambda: self.live)

    def member(self, name: str, *roles: str) -> None:
        self.live.append(Member(name, 1, "127.0.0.1", 4281, "ord", roles))

    def rows(self, worker: str) -> None:
        """What a worker published comes here; from whom is not said."""
        for tier in TIERS:
            owner = self.owners.setdefault((worker, tier), Owner(self.replica, worker, tier))
            table = {"global": "workers", "region": "capacity"}[tier]
            owner.put(table, **{worker: {"region": "ord", "host": "h", "port": 1} if tier == "global" else {}})

    def says(self, worker: str, *tiers: Tier) -> None:
        """The worker itself says how far its logs go."""
        for tier in tiers or TIERS:
            log, now = LogId(worker, tier), asyncio.get_running_loop().time()
            self.freshness.told(log, self.owners[worker, tier].origin.position, self.replica.position(log), now)

    def compared(self, *, complete: bool) -> None:
        for tier in TIERS:
            self.readiness.compared(tier, complete)

    async def soon(self) -> bool:
        await asyncio.sleep(LOOK_S)
        return self.readiness()


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-8192:] = b"\xff" * 8192
    path.write_bytes(raw)


@contextmanager
def around_a_member(path: Path) -> Iterator[Around]:
    around = Around(path)
    yield around
    around.replica.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@virtual_time
async def test_who_has_nobody_to_ask_is_all_there_is(path: Path) -> None:
    with around_a_member(path) as around:
        around.seeds = False
        assert await around.soon()


@virtual_time
async def test_who_reaches_nobody_has_not_caught_up_however_long_it_tries(path: Path) -> None:
    with around_a_member(path) as around:
        assert not await around.soon()
        await asyncio.sleep(100 * WAIT_S)
        assert not around.readiness()


@virtual_time
async def test_a_comparison_with_one_that_has_caught_up_is_enough_if_it_was_of_both_tiers(path: Path) -> None:
    with around_a_member(path) as around:
        around.rows("ord-1")
        around.member("ord-1", "worker")
        around.readiness.compared("region", True)
        assert not await around.soon()
        around.readiness.compared("global", True)
        assert around.readiness()


@virtual_time
async def test_who_may_know_of_others_of_its_region_has_met_none_until_it_has_compared_both_tiers_with_one(
    path: Path,
) -> None:
    with around_a_member(path) as around:
        await around.readiness.until_met()  # it knows of none
        around.rows("ord-1")
        meeting = asyncio.ensure_future(around.readiness.until_met())
        for tier in TIERS:
            await asyncio.sleep(1)
            assert not meeting.done()
            around.readiness.compared(tier, False)
        await meeting
        assert not around.readiness()


@virtual_time
async def test_where_all_began_together_every_worker_must_have_spoken_for_itself(path: Path) -> None:
    with around_a_member(path) as around:
        around.member("other-edge", "proxy")
        around.compared(complete=False)
        assert not await around.soon(), "nobody knows of any worker"
        for worker in ("ord-1", "ord-2"):
            around.rows(worker)
        around.member("ord-1", "worker")
        around.says("ord-1")
        around.says("ord-2", "region")
        assert not await around.soon()
        around.says("ord-2", "global")
        assert await around.soon()


@virtual_time
async def test_a_worker_that_is_not_there_is_waited_for_a_while_and_one_that_lives_until_it_has_spoken(
    path: Path,
) -> None:
    with around_a_member(path) as around:
        for worker in ("ord-1", "gone"):
            around.rows(worker)
        around.member("ord-1", "worker")
        around.compared(complete=False)
        await asyncio.sleep(WAIT_S * 0.9)
        around.says("ord-1")
        assert not await around.soon()
        await asyncio.sleep(WAIT_S * 0.1)
        assert around.readiness()


@virtual_time
async def test_who_lives_and_has_not_spoken_is_waited_for_longer(path: Path) -> None:
    with around_a_member(path) as around:
        around.rows("ord-1")
        around.member("ord-1", "worker")
        around.compared(complete=False)
        await asyncio.sleep(2 * WAIT_S)
        assert not around.readiness()
        around.says("ord-1")
        assert await around.soon()


@virtual_time
async def test_a_file_that_was_begun_anew_has_to_catch_up_anew(path: Path) -> None:
    with around_a_member(path) as around:
        for number in range(200):
            around.replica.keep_member(f"{number:0250}", region="ord")
    damage(path)
    with around_a_member(path) as around:
        around.compared(complete=True)
        assert around.readiness()
        assert around.replica.resets == 0
        with suppress(StoreError):
            around.replica.rows("select * from members")
        assert around.replica.resets == 1, "its file was damaged"
        assert not around.readiness()
        around.compared(complete=True)
        assert around.readiness()

"""A reservation is filled, released or lapsed: exactly one of them, in whatever order the calls arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit import crash_time
from tests.kit.crash_rig import APP, CAPACITY, Rig, check_invariants
from tests.kit.crash_world import World

from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.market import LEASE_S, Ask, Offer, Order, Reason, Refusal, Reservation
from hawker.worker import ledger
from hawker.worker.market import Lapsed


def on_a_worker(path: Path, test: Callable[[Rig], Awaitable[Any]]) -> None:
    """Run a test on a worker of its own, on virtual time, and check the kit's invariants after it."""

    async def main() -> None:
        rig = await Rig(path / "worker.db", World(), 1).open()
        await test(rig)
        await rig.settled()
        check_invariants(rig)
        await rig.close()

    crash_time.run(main())


def order(key: str, *, region: str = "ord") -> Order:
    config = check_config({"image": "host", "init": {"exec": ["program"]}})
    return Order(
        key=key,
        app=APP.name,
        region=region,
        name=key,
        config=config.raw,
        resources=config.guest.resources(),
        request="req",
    )


def test_a_reservation_holds_its_room_until_it_is_confirmed(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        held = await rig.market.reserve(order("a"))
        assert isinstance(held, Reservation)
        assert ledger.held(rig.store.read) == order("a").resources
        row, _, _ = await rig.market.confirm("a", APP, None)
        assert row.id == held.machine
        assert ledger.held(rig.store.read) == order("a").resources

    on_a_worker(tmp_path, test)


def test_a_reservation_that_nobody_confirms_lapses_and_gives_its_room_back(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.market.reserve(order("a"))
        await asyncio.sleep(LEASE_S + 1)
        with pytest.raises(Lapsed):
            await rig.market.confirm("a", APP, None)
        assert await rig.market.sweep() == 1
        assert ledger.held(rig.store.read) == Resources()
        assert rig.market.fate("a") == "released"

    on_a_worker(tmp_path, test)


def test_room_of_a_lapsed_reservation_is_there_for_the_next_order_at_once(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        for n in range(CAPACITY.machines):
            assert isinstance(await rig.market.reserve(order(f"a{n}")), Reservation)
        assert isinstance(await rig.market.reserve(order("late")), Refusal)
        await asyncio.sleep(LEASE_S + 1)
        assert isinstance(await rig.market.reserve(order("later")), Reservation)

    on_a_worker(tmp_path, test)


def test_a_release_that_overtakes_its_reservation_still_holds(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        assert await rig.market.release("a", "the broker gave the order up") == ""
        late = await rig.market.reserve(order("a"))
        assert isinstance(late, Refusal)
        assert late.reason is Reason.in_doubt
        assert ledger.held(rig.store.read) == Resources()

    on_a_worker(tmp_path, test)


def test_a_release_gives_back_what_was_held_and_names_a_machine_that_was_made(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.market.reserve(order("a"))
        await rig.market.release("a", "the broker gave the order up")
        await rig.market.release("a", "the broker gave the order up")
        assert ledger.held(rig.store.read) == Resources()
        await rig.market.reserve(order("b"))
        row, _, _ = await rig.market.confirm("b", APP, None)
        assert await rig.market.release("b", "too late") == row.id

    on_a_worker(tmp_path, test)


def test_the_same_key_is_the_same_reservation_and_the_same_machine(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        twice = await asyncio.gather(rig.market.reserve(order("a")), rig.market.reserve(order("a")))
        assert twice[0] == twice[1]
        rows = [await rig.market.confirm("a", APP, None) for _ in range(2)]
        assert rows[0][0].id == rows[1][0].id
        assert rows[1][2] == "", "confirming again begins nothing"
        again = await rig.market.reserve(order("a"))
        assert isinstance(again, Reservation)
        assert (again.state, again.machine) == ("confirmed", rows[0][0].id)
        assert ledger.held(rig.store.read) == order("a").resources

    on_a_worker(tmp_path, test)


def test_the_last_slots_go_to_as_many_as_there_are_whoever_asks_at_once(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        answers = await asyncio.gather(*(rig.market.reserve(order(f"o{n}")) for n in range(64)))
        won = [a for a in answers if isinstance(a, Reservation)]
        refused = [a for a in answers if isinstance(a, Refusal)]
        assert len(won) == CAPACITY.machines
        assert {(r.reason, r.free) for r in refused} == {(Reason.full, 0)}

    on_a_worker(tmp_path, test)


def test_offers_tell_what_is_free_and_refusals_what_is_short(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        ask = Ask(app=APP.name, region="ord", image="host", resources=order("a").resources)
        offer = rig.market.offer(ask)
        assert isinstance(offer, Offer)
        assert (offer.free, offer.capacity, offer.app_machines) == (CAPACITY, CAPACITY, 0)
        await rig.market.reserve(order("a"))
        await rig.market.confirm("a", APP, None)
        offer = rig.market.offer(ask)
        assert isinstance(offer, Offer)
        assert (offer.free, offer.app_machines) == (CAPACITY - order("a").resources, 1)
        short = rig.market.offer(Ask(app="x", region="ord", image="host", resources=Resources(memory_mib=4000)))
        assert isinstance(short, Refusal)
        assert (short.resource, short.wanted, short.free) == ("memory_mib", 4000, CAPACITY.memory_mib - 256)
        for region, image, reason in (("mad", "host", Reason.wrong_region), ("ord", "nginx", Reason.no_driver)):
            refused = rig.market.offer(Ask(app="x", region=region, image=image, resources=Resources()))
            assert isinstance(refused, Refusal)
            assert refused.reason is reason

    on_a_worker(tmp_path, test)

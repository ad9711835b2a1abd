"""What an order takes from the broker to its running machine, counted: messages to its worker, commits, and waits for
the disk there. Three round trips and three commits are what the market needs; a fourth has to be argued for here."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from tests.broker.test_batches import ASKED_MOST, linked
from tests.kit.counting import counting_syncs
from tests.kit.sim_worker import APP, REGION, a_worker, machine_config, order

from hawker.broker.fleet import BATCH_MAX, Fleet
from hawker.broker.orders import Orders, Wanted
from hawker.core.ranking import SpreadPolicy
from hawker.errors import NoCapacity, Unreachable
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.market import Ask, ConfirmOrder, Reservation
from hawker.telemetry import Metrics

MESSAGES = ["/v1/market/offers", "/v1/market/reserve", "/v1/market/confirm"]


def wanted(name: str, *, skip_launch: bool) -> Wanted:
    asked = replace(order(name), name=name, skip_launch=skip_launch)
    return Wanted(order=asked, config=check_config(machine_config()))


class Cost(NamedTuple):
    messages: list[str]
    commits: int
    syncs: int


async def cost_of_an_order(directory: Path, *, skip_launch: bool) -> Cost:
    """Raises what an order does that the machine was too busy for: what is undone of it would be counted, too."""
    with counting_syncs() as syncs:
        async with a_worker(directory, sweeping=False) as worker, linked(worker) as (link, app):
            fleet = Fleet([], "token")
            fleet.links = {"ord-1": link}
            orders = Orders(fleet, worker.host, SpreadPolicy(), Metrics())
            commits_before, syncs_before = worker.store.commits, syncs.count
            try:
                await orders.place(wanted("one", skip_launch=skip_launch))
                await worker.at_rest()
                await worker.until(lambda: not worker.store.committing)  # the thread's commit is read before it counts
            finally:
                await orders.releases.close()
            return Cost(app.paths, worker.store.commits - commits_before, syncs.count - syncs_before)


@pytest.mark.parametrize(("skip_launch", "commits"), [(True, 2), (False, 3)])
async def test_an_order_takes_three_messages_and_a_commit_for_each_thing_that_is_promised(
    tmp_path_factory: pytest.TempPathFactory, skip_launch: bool, commits: int
) -> None:
    for _ in range(ASKED_MOST):
        with suppress(NoCapacity, Unreachable):
            cost = await cost_of_an_order(tmp_path_factory.mktemp("worker"), skip_launch=skip_launch)
            assert cost == Cost(MESSAGES, commits, syncs=commits), "each commit waits for the disk once"
            return
    raise AssertionError("it never had the time")


async def test_orders_that_come_at_once_share_each_of_the_three_messages(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As many as a message holds; twice as many take two."""
    for _ in range(ASKED_MOST):
        with suppress(NoCapacity, Unreachable):
            paths = await messages_of(2 * BATCH_MAX, tmp_path_factory.mktemp("worker"))
            assert Counter(paths) == dict.fromkeys(MESSAGES, 2)
            return
    raise AssertionError("it never had the time")


async def messages_of(orders: int, directory: Path) -> list[str]:
    """Offers, reservations and confirmations, each asked for at once for all."""
    async with a_worker(directory, sweeping=False) as worker, linked(worker) as (link, app):
        names = [f"order-{number}" for number in range(orders)]
        ask = Ask(app=APP.name, region=REGION, image="host", resources=Resources(cpus_shared=1))
        await asyncio.gather(*(link.send(ask) for _ in names))
        held = await asyncio.gather(*(link.send(order(name, skip_launch=True)) for name in names))
        assert {type(answer) for answer in held} == {Reservation}
        confirmed = await asyncio.gather(*(link.send(ConfirmOrder(key=name, app=APP)) for name in names))
        assert {answer.status for answer in confirmed} == {200}
        return app.paths

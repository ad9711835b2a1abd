"""A hundred clients at once order from six workers with room for sixty, and two brokers race for the last slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.kit.markets import SLEEPER, Client, Market, free_port, running_agent, running_market

from hawker.store.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WORKERS, ROOM, CLIENTS = 6, 10, 100


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    options = ("--region", "ord", "--workers", str(WORKERS), "--machines", str(ROOM), "--cpus", "500")
    with running_market(tmp_path_factory.mktemp("slots"), (*options, "--memory", "200000")) as market:
        yield market


async def order_from_many(market: Market, app: str) -> list[Any]:
    """One order from each of a hundred clients, each over a connection of its own, all at once."""
    clients = [Client(market.endpoint, market.token) for _ in range(CLIENTS)]
    try:
        order = {"region": "ord", "config": SLEEPER}
        return await asyncio.gather(*(c.call("POST", f"/apps/{app}/machines?wait=true", order) for c in clients))
    finally:
        await asyncio.gather(*(c.close() for c in clients))


async def test_sixty_fills_and_forty_refusals_with_reasons_and_again_after_all_is_destroyed(market: Market) -> None:
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "rush"})
        for _ in range(2):
            answers = await order_from_many(market, "rush")
            assert Counter(a.status for a in answers) == {200: WORKERS * ROOM, 409: CLIENTS - WORKERS * ROOM}
            assert all(a.body["state"] == "started" for a in answers if a.status == 200)
            for refused in (a.body for a in answers if a.status == 409):
                assert refused["status"] == "insufficient_capacity"
                reasons = {r["worker"]: r["reason"] for r in refused["details"]["refusals"]}
                assert set(reasons) == set(market.workers())
            held = Counter(m["hawker"]["worker"] for m in await client.ok("GET", "/apps/rush/machines"))
            assert held == dict.fromkeys(market.workers(), ROOM)
            ids = [m["id"] for m in await client.ok("GET", "/apps/rush/machines")]
            await asyncio.gather(*(client.ok("DELETE", f"/apps/rush/machines/{i}?force=true") for i in ids))
            for worker in await client.ok("GET", "/hawker/workers"):
                assert not any(worker["held"].values()), worker


async def test_an_impossible_order_is_refused_in_one_round_and_leaves_nothing(market: Market) -> None:
    guest = {"cpu_kind": "performance", "cpus": 128, "memory_mb": 262144}
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "huge"})
        answer = await client.call(
            "POST", "/apps/huge/machines", {"region": "ord", "config": {**SLEEPER, "guest": guest}}
        )
        assert answer.status == 409
        for refusal in answer.body["details"]["refusals"]:
            assert (refusal["reason"], refusal["resource"], refusal["wanted"]) == ("full", "cpus_dedicated", 128)
        for worker in await client.ok("GET", "/hawker/workers"):
            assert not any(worker["held"].values())
        rows = await client.ok("POST", "/hawker/sql", {"query": "select count(*) from reservation", "on": "workers"})
        assert [row[1] for row in rows["rows"]] == [0] * WORKERS


@pytest.fixture
def second_broker(market: Market) -> Iterator[str]:
    """The endpoint of another broker over the same workers."""
    config, port = market.home / "second.toml", free_port()
    text = (market.home / "broker.toml").read_text().replace('name = "broker"', 'name = "second"')
    listen = next(line for line in text.splitlines() if line.startswith("listen"))
    tables = [table for table in text.split("\n[") if not table.startswith("proxy")]  # users come to the first one
    config.write_text("\n[".join(tables).replace(listen, f'listen = "127.0.0.1:{port}"'))
    with running_agent(config, port):
        yield f"http://127.0.0.1:{port}"


async def test_two_brokers_race_for_the_last_slot_and_one_fills(market: Market, second_broker: str) -> None:
    other = Client(second_broker, market.token)
    try:
        async with market.client() as client:
            await client.ok("POST", "/apps", {"app_name": "last"})
            order = {"region": "ord", "config": SLEEPER}
            filled = WORKERS * ROOM - 1
            await asyncio.gather(*(client.ok("POST", "/apps/last/machines", order) for _ in range(filled)))
            for _ in range(10):
                answers = await asyncio.gather(*(c.call("POST", "/apps/last/machines", order) for c in (client, other)))
                assert sorted(a.status for a in answers) == [200, 409]
                won = next(a.body["id"] for a in answers if a.status == 200)
                await client.ok("DELETE", f"/apps/last/machines/{won}?force=true")
    finally:
        await other.close()


async def test_the_same_idempotency_key_makes_one_machine_however_often_it_is_sent(market: Market) -> None:
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "once"})
        order = {"region": "ord", "config": SLEEPER}
        await client.ok("DELETE", "/apps/last?force=true")
        headers = {"idempotency-key": "the-one"}
        answers = await asyncio.gather(
            *(client.call("POST", "/apps/once/machines", order, headers=headers) for _ in range(10))
        )
        assert {a.status for a in answers} <= {200, 409}
        again = await client.ok("POST", "/apps/once/machines", order, headers=headers)
        machines = await client.ok("GET", "/apps/once/machines")
        assert [m["id"] for m in machines] == [again["id"]]
        assert {a.body["id"] for a in answers if a.status == 200} <= {again["id"]}


def test_ledgers_and_tables_follow_from_the_logs(market: Market) -> None:
    for worker in market.workers():
        report = verify(market.database(worker))
        assert report.ok, report.faults
        assert report.records > ROOM

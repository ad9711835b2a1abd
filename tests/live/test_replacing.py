"""A machine whose worker does not answer is ordered anew under its id, and that worker gives it up when it is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.kit.markets import SLEEPER, Client, Market, running_market
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    home: Path = tmp_path_factory.mktemp("replacing")
    with running_market(home, ("--region", "ord", "--workers", "2")) as market:
        yield market


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def seen_by(market: Market, agent: str, machine: str) -> list[tuple[Any, ...]]:
    """Worker and generation of a machine in an agent's replica of the catalog."""
    db = apsw.Connection(str(market.home / agent / "catalog.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return list(db.execute("select worker, generation from machines where id = ?", (machine,)))
    finally:
        db.close()


async def a_machine(market: Market, client: Client, app: str) -> tuple[dict[str, Any], str, str]:
    """A machine that every agent knows of, its worker and the other one."""
    await client.ok("POST", "/apps", {"app_name": app})
    machine = await client.ok("POST", f"/apps/{app}/machines?wait=true", {"region": "ord", "config": SLEEPER})
    owner = machine["hawker"]["worker"]
    [other] = [worker for worker in market.workers() if worker != owner]

    async def known() -> bool:
        return all(seen_by(market, agent, machine["id"]) == [(owner, 1)] for agent in (owner, other, "broker"))

    await eventually(known, "every agent knows the machine")
    return machine, owner, other


async def test_a_machine_of_a_silent_worker_is_replaced_and_given_up_by_it_once_it_is_back(market: Market) -> None:
    async with market.client() as client:
        machine, owner, other = await a_machine(market, client, "moved")
        path = f"/apps/moved/machines/{machine['id']}"
        order = {"config": SLEEPER, "replaces": machine["id"]}
        with frozen(market.pid(owner)):
            replaced = await client.ok("POST", "/apps/moved/machines?wait=true", order)
            assert (replaced["id"], replaced["name"]) == (machine["id"], machine["name"])
            assert replaced["hawker"]["worker"] == other
        again = await client.call("POST", "/apps/moved/machines", order)
        assert again.status == 409
        assert (again.body["details"]["worker"], again.body["details"]["generation"]) == (other, 2)

        async def given_up() -> bool:
            listed = await client.ok("GET", "/apps/moved/machines")
            return [m["hawker"]["worker"] for m in listed if m["state"] == "started"] == [other]

        await eventually(given_up, f"{owner} has given the machine up")
        there = await client.ok("GET", path)
        assert (there["hawker"]["worker"], there["state"]) == (other, "started")
        db = apsw.Connection(str(market.database(owner)), flags=apsw.SQLITE_OPEN_READONLY)
        [(state, cause)] = db.execute("select state, cause from machine where id = ?", (machine["id"],))
        db.close()
        assert state in ("destroying", "destroyed")
        assert cause == f"local rule: superseded, generation 2 of it is on {other}"


async def test_a_machine_whose_worker_answers_is_not_replaced(market: Market) -> None:
    async with market.client() as client:
        machine, owner, _ = await a_machine(market, client, "stays")
        order = {"config": SLEEPER, "replaces": machine["id"]}
        answer = await client.call("POST", "/apps/stays/machines", order)
        assert answer.status == 409
        assert answer.body["error"] == f"machine {machine['id']} is on {owner}, which answers"


@pytest.mark.parametrize(
    ("replaces", "status", "error"),
    [
        ("00000000000000", 404, "machine not found: 00000000000000"),
        ("web", 400, "replaces"),
    ],
)
async def test_what_no_worker_knows_cannot_be_replaced(market: Market, replaces: str, status: int, error: str) -> None:
    async with market.client() as client:
        answer = await client.call("POST", "/apps/moved/machines", {"config": SLEEPER, "replaces": replaces})
        assert answer.status == status
        assert error in answer.body["error"]


async def test_a_worker_that_is_gone_for_good_is_forgotten_and_listed_again_when_it_is_back(market: Market) -> None:
    async with market.client() as client:

        async def listed() -> list[str]:
            return sorted(w["name"] for w in await client.ok("GET", "/hawker/workers"))

        async def without_it() -> bool:
            return await listed() == [other]

        async def as_before() -> bool:
            return await listed() == market.workers()

        gone, other = market.workers()
        answer = await client.call("POST", f"/hawker/workers/{gone}/forget")
        assert (answer.status, answer.body["error"]) == (409, f"worker {gone} answers: it is not gone")
        with frozen(market.pid(gone)):
            await client.ok("POST", f"/hawker/workers/{gone}/forget")
            await eventually(without_it, f"{gone} is listed no more")
            order = {"region": "ord", "config": SLEEPER}
            placed = await client.ok("POST", "/apps/stays/machines?wait=true", order)  # others keep the app, too
            assert placed["hawker"]["worker"] == other
        market.kill(gone)  # only a start begins another epoch: a worker that was only frozen is told so by none
        await eventually(as_before, f"{gone} is listed again", 30)


async def test_nobody_forgets_a_worker_that_is_not_known(market: Market) -> None:
    async with market.client() as client:
        assert (await client.call("POST", "/hawker/workers/nobody/forget")).status == 404


async def test_a_worker_refuses_what_is_meant_for_another(market: Market) -> None:
    async with market.client() as client:
        body = {"query": "select name, host, port from workers order by name"}
        (name, host, port), (other, _, _) = (await client.ok("POST", "/hawker/sql", body))["rows"]
    direct = Client(f"http://{host}:{port}", market.token)
    assert (await direct.call("GET", "/apps/web/machines", headers={"hawker-worker": name})).status == 200
    answer = await direct.call("GET", "/apps/web/machines", headers={"hawker-worker": other})
    assert (answer.status, answer.body["error"]) == (421, f"this is worker {name}, not {other}")
    await direct.close()

"""Orders that travel together, over real connections: what is wrong with one of them is that one's alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.client.servers import Call as ServerCall
from tests.client.servers import serving
from tests.kit.sim_worker import APP, REGION, SimWorker, a_worker, machine_config, order

from hawker.broker.fleet import Fleet, WorkerLink
from hawker.broker.orders import Orders, Wanted
from hawker.client.connection import Peer
from hawker.core.ranking import SpreadPolicy
from hawker.errors import HawkerError, NoCapacity, Refused, Unreachable
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.server import serve
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.market import Ask, ConfirmOrder, Failed, Order, Reason, Refusal, Reservation
from hawker.store.tx import Tx
from hawker.telemetry import Metrics

ASKED_MOST = 20
TOKEN = "token-of-the-agents"
NEWER = {**machine_config(), "stop_config": {"signal": "SIGTWIRL"}}
"""What a broker of another version took, and this worker does not."""


class Counting:
    """Passes requests on. `paths`: of those that came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await self._app(scope, receive, send)


@asynccontextmanager
async def linked(worker: SimWorker) -> AsyncIterator[tuple[WorkerLink, Counting]]:
    """A broker's link to a worker's market, over HTTP, and what came over it."""

    def keep(tx: Tx) -> None:
        tx.record("app.kept", APP.name, cause="a test")
        tx.put(APP)

    await worker.store.submit(keep)
    serving = Serving(worker.host, Tokens({TOKEN: AGENT}), Metrics(), REGION, "ord-1")
    app = Counting(serving.app(worker.market_api.routes()))
    listening = socket.create_server(("127.0.0.1", 0))
    server = await serve(app, listening, worker.host)
    peer = Peer("127.0.0.1", listening.getsockname()[1], headers={"authorization": f"Bearer {TOKEN}"})
    link = WorkerLink("ord-1", REGION, peer)
    try:
        yield link, app
    finally:
        await link.close()
        await server.close()


def odd_orders() -> list[Order]:
    """Each is wrong in a way of its own."""
    return [
        replace(order("newer"), config=NEWER),
        replace(order("another-type"), lease_ttl_s="an hour"),
        replace(order("no-image"), config={}),
    ]


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What each gave or raised. Those that had no time on this machine are asked again, together: all may be repeated.
    Placing an order takes several requests, and has that in it."""

    async def asked(call: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(ASKED_MOST):
            with suppress(Unreachable, NoCapacity):
                return await call()
        raise AssertionError("it never had the time")

    return list(await asyncio.gather(*map(asked, calls), return_exceptions=True))


def few(paths: list[str], verb: str, items: int) -> bool:
    """Whether they travelled together."""
    return paths.count(f"/v1/market/{verb}") < items


async def test_an_order_that_its_worker_does_not_take_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker, linked(worker) as (link, app):
        orders = [order("first"), *odd_orders(), order("last")]
        first, newer, typed, imageless, last = await together(*(partial(link.send, each) for each in orders))
        assert few(app.paths, "reserve", len(orders))
        assert (first.key, last.key) == ("first", "last")
        told = []
        for refusal in (newer, typed, imageless):
            assert isinstance(refusal, Refusal)
            assert (refusal.reason, refusal.status) == (Reason.invalid, 400)
            assert refusal.error is not None
            assert refusal.error["details"]["remedy"]
            told.append((refusal.error["details"]["field"], refusal.error["details"]["value"]))
        assert told == [("config.stop_config.signal", "SIGTWIRL"), ("lease_ttl_s", "an hour"), ("config.image", None)]
        assert worker.market.fate("first") == "held"
        assert worker.market.fate("newer") == "unknown", "and nothing is held for it"


async def test_a_fault_with_one_order_leaves_that_one_in_doubt_and_no_other(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker, linked(worker) as (link, app):
        endless = replace(order("endless"), hold_s=1e308)
        orders = (order("first"), endless, order("last"))
        first, fault, last = await together(*(partial(link.send, each) for each in orders))
        assert isinstance(first, Reservation)
        assert isinstance(last, Reservation)
        assert fault == Failed(error="internal error: OverflowError")
        assert few(app.paths, "reserve", len(orders))


async def test_an_ask_and_a_confirmation_that_do_not_read_cost_their_neighbours_nothing(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker, linked(worker) as (link, app):
        ask = Ask(app=APP.name, region=REGION, image="host", resources=Resources())
        offer, refusal = await together(partial(link.send, ask), partial(link.send, replace(ask, image=7)))
        assert offer.worker == "ord-1"
        assert (refusal.reason, refusal.sentence()) == (
            Reason.invalid,
            "ord-1: image: 7 is not valid: expected `str`, got `int`",
        )
        await together(partial(link.send, order("first")))
        good = ConfirmOrder(key="first", app=APP)
        bad = ConfirmOrder(key="first", app=replace(APP, number="seven"))
        filled, refused = await together(partial(link.send, good), partial(link.send, bad))
        assert filled.status == 200
        assert worker.market.fate("first") in bytes(filled.machine).decode()
        assert refused.status == 400
        assert refused.error["details"]["field"] == "app.number"
        assert few(app.paths, "offers", 2)
        assert few(app.paths, "confirm", 2)


async def test_an_answer_that_a_broker_cannot_read_costs_the_others_of_its_batch_nothing() -> None:
    """A newer worker may have a reason that this broker has not heard of."""

    async def answer(call: ServerCall) -> None:
        while await call.request():
            known = b'{"type":"refusal","worker":"ord-1","region":"ord","reason":"cordoned"}'
            await call.reply(b"[%s,%s,%s]" % (known, known.replace(b"cordoned", b"asleep"), known))

    async with serving(answer) as server:
        link = WorkerLink("ord-1", REGION, Peer("127.0.0.1", server.port))
        first, odd, last = await together(*(partial(link.send, order(key)) for key in "abc"))
        assert first == last == Refusal(worker="ord-1", region="ord", reason=Reason.cordoned)
        assert isinstance(odd, HawkerError)
        assert "ord-1: an answer to /v1/market/reserve does not read: Invalid enum value 'asleep'" in odd.message
        await link.close()


async def test_a_batch_with_another_number_of_answers_is_an_error_of_all() -> None:
    async def answer(call: ServerCall) -> None:
        while await call.request():
            await call.reply(b"[]")

    async with serving(answer) as server:
        link = WorkerLink("ord-1", REGION, Peer("127.0.0.1", server.port))
        for timeout_s in (None, 5.0):
            (error,) = await together(partial(link.send, ConfirmOrder(key="a", app=APP), timeout_s))
            assert isinstance(error, HawkerError)
            assert error.message == "ord-1: /v1/market/confirm was asked 1 times and gave 0 answers"
        await link.close()


async def test_who_ordered_what_no_worker_takes_is_told_field_value_and_remedy(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker, linked(worker) as (link, _):
        fleet = Fleet([], "token")
        fleet.links = {"ord-1": link}
        orders = Orders(fleet, worker.host, SpreadPolicy(), Metrics())
        good = Wanted(order=order("one"), config=check_config(machine_config()))
        odd = replace(good, order=replace(order("two"), config=NEWER))
        filled, refused = await together(partial(orders.place, good), partial(orders.place, odd))
        assert filled.worker == "ord-1"
        assert isinstance(refused, Refused)
        assert (refused.status, refused.code) == (400, "invalid_argument")
        assert refused.message.startswith('ord-1: config.stop_config.signal: "SIGTWIRL" is not valid: ')
        assert {"field", "value", "remedy", "refusals"} <= set(refused.details)
        await orders.releases.close()

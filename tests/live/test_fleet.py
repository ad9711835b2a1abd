"""A broker's calls to its workers: what is left of them at the end, and what a worker that answers nothing costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.client.servers import Call, serving
from tests.kit.markets import SLEEPER, Client, running_market
from tests.kit.virtual_time import virtual_time
from tests.kit.waiting import eventually, until

from hawker.broker.fleet import Fleet, WorkerAddress, WorkerLink
from hawker.broker.offers import GRACE_S, book
from hawker.client.connection import Peer, Response
from hawker.client.wire import NO_HEADERS, PeerUnreachable
from hawker.core.silence import PATIENCE_S
from hawker.errors import Unreachable
from hawker.model.guest import Resources
from hawker.model.market import CALL_S, OFFERS_S, Ask, ConfirmOrder, DescribeWorker, Reason, Refusal
from hawker.model.op import Op, Request
from hawker.model.rows import AppRow

ASK = Ask(app="web", region="ord", image="host", resources=Resources(cpus_shared=1))
APP = AppRow(name="web", id="web", org="o", network="n", number=1, created_at_ms=0, stamp_ms=0)


class Anything(Request[dict[str, Any]]):
    op = Op("Anything", "GET", "/", deadline_s=CALL_S)


class Quick(Request[dict[str, Any]]):
    op = Op("Quick", "GET", "/quick", deadline_s=CALL_S)


async def never(call: Call) -> None:
    """A worker that takes requests and answers none."""
    while await call.request():
        pass


async def test_closing_a_fleet_ends_every_call_and_leaves_nothing_pending() -> None:
    async with serving(never) as server:
        before = asyncio.all_tasks()
        fleet = Fleet([WorkerAddress(name="ord-1", region="ord", host="127.0.0.1", port=server.port)], "token")
        link = fleet.links["ord-1"]
        offered = [asyncio.ensure_future(link.send(ASK)) for _ in range(3)]  # in one batch
        confirmed = asyncio.ensure_future(link.send(ConfirmOrder(key="k", app=APP)))
        listed = asyncio.ensure_future(fleet.ask_all(DescribeWorker()))
        await until(lambda: len(server.requests) == 3)
        lone = asyncio.ensure_future(link.send(ASK))
        lone.cancel()  # its caller is gone: nobody is left to wait for it
        await fleet.close()
        told = await asyncio.gather(*offered, confirmed, return_exceptions=True)
        assert [type(error) for error in told] == [Unreachable] * 4
        answers, errors = await listed
        assert (answers, list(errors)) == ({}, ["ord-1"])
        assert lone.cancelled()
        await until(lambda: asyncio.all_tasks() == before)
        await fleet.close()
        with pytest.raises(Unreachable, match="closed here"):
            await link.send(ASK)


class Freezing(Peer):
    """A peer that answers nothing while it is frozen. What it was asked meanwhile it answers when it thaws."""

    def __init__(self, answer: bytes = b"{}") -> None:
        super().__init__("127.0.0.1", 1)
        self.answer = answer
        self.thawed = asyncio.Event()
        self.asked = 0

    async def request(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
        idempotent: bool = False,
        body_bytes_max: int = 0,
    ) -> Response:
        self.asked += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self.thawed.wait()
        except TimeoutError:
            raise PeerUnreachable("ord-1", "did not answer", sent=True) from None
        return Response(200, {}, self.answer)


@virtual_time
async def test_a_worker_that_makes_no_offer_costs_one_order_the_deadline_and_the_next_ones_hardly_anything() -> None:
    """An order into a region with a worker that was cut off used to cost the whole deadline, each time."""
    refusal = msgspec.json.encode([Refusal(worker="w", region="ord", reason=Reason.cordoned)])
    cut_off, answering = Freezing(refusal), Freezing(refusal)
    answering.thawed.set()
    links = [WorkerLink("ord-1", "ord", cut_off), WorkerLink("ord-2", "ord", answering)]
    loop = asyncio.get_running_loop()

    async def offers_and_cost_s() -> tuple[int, Any]:
        began = loop.time()
        return len(await book(links, ASK)), loop.time() - began

    assert await offers_and_cost_s() == (1, pytest.approx(OFFERS_S))
    for _ in range(3):
        assert await offers_and_cost_s() == (1, pytest.approx(GRACE_S))
    cut_off.thawed.set()
    await asyncio.sleep(OFFERS_S)  # what was on its way is answered
    assert await offers_and_cost_s() == (2, pytest.approx(0))
    cut_off.thawed.clear()
    assert await offers_and_cost_s() == (1, pytest.approx(OFFERS_S)), "and it is waited for again"
    answering.thawed.clear()
    await offers_and_cost_s()
    assert await offers_and_cost_s() == (0, pytest.approx(OFFERS_S)), "with nobody else there is time"
    for link in links:
        await link.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_a_frozen_worker_costs_one_deadline_and_none_again_until_it_answers() -> None:
    peer = Freezing()
    link = WorkerLink("ord-1", "ord", peer)
    loop = asyncio.get_running_loop()

    async def cost_s() -> float:
        began = loop.time()
        with pytest.raises(Unreachable):
            await link.ask(Anything())
        return loop.time() - began

    assert await cost_s() == pytest.approx(CALL_S)
    assert await cost_s() == pytest.approx(PATIENCE_S)
    assert await asyncio.gather(*(cost_s() for _ in range(100))) == [0] * 100  # the last question is still on its way
    assert peer.asked == 2
    await asyncio.sleep(CALL_S)
    assert max(await asyncio.gather(*(cost_s() for _ in range(100)))) == pytest.approx(PATIENCE_S)
    assert peer.asked == 3
    peer.thawed.set()
    await asyncio.sleep(0.001)  # the question that was on its way is answered
    assert await link.ask(Anything()) == {}
    peer.thawed.clear()
    assert await cost_s() == pytest.approx(CALL_S), "and it is trusted again"
    await cost_s()
    await link.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_closing_ends_every_late_question_also_of_an_earlier_silence() -> None:
    """A worker that answers one call and goes silent again is asked again while the first question is on its way."""

    class Moody(Freezing):
        async def request(self, method: str, target: str, **options: Any) -> Response:
            return Response(200, {}, b"{}") if target == "/quick" else await super().request(method, target, **options)

    link = WorkerLink("ord-1", "ord", Moody())
    for timeout_s in (CALL_S, CALL_S):  # the second question is left on its way
        with pytest.raises(Unreachable):
            await link.ask(Anything(), timeout_s)
    assert await link.send(Quick()) == {}
    for timeout_s in (1.5, CALL_S):
        with pytest.raises(Unreachable):
            await link.ask(Anything(), timeout_s)
    assert [task.get_name() for task in asyncio.all_tasks()].count("late ord-1") == 2
    await link.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.slow
@pytest.mark.timeout(180)  # a whole market comes up and goes down, on a host that may be busy
async def test_lists_are_quick_and_name_the_worker_that_is_frozen(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with running_market(tmp_path, ("--region", "ord", "--region", "mad", "--workers", "1", "--no-cgroups")) as market:
        async with market.client() as client:
            await client.ok("POST", "/apps", {"app_name": "web", "org_slug": "personal"})
            frozen = market.pid("mad-1")
            os.kill(frozen, signal.SIGSTOP)
            try:
                for number, path in enumerate(LISTS):
                    began = loop.time()
                    answer = await client.call("GET", path)
                    assert number == 0 or loop.time() - began < CALL_S / 2, path
                    assert answer.headers["hawker-unreachable-workers"] == "mad-1", path
                workers = await client.ok("GET", "/hawker/workers")
                assert [(w["name"], w["reachable"]) for w in workers] == [("mad-1", False), ("ord-1", True)]
            finally:
                os.kill(frozen, signal.SIGCONT)
            await eventually(lambda: all_answer(client), "everybody answers again")
    told = (tmp_path / "broker.log").read_text()
    assert "Task was destroyed" not in told
    assert "never retrieved" not in told


@pytest.mark.slow
@pytest.mark.timeout(180)  # a whole market comes up and goes down, on a host that may be busy
async def test_orders_with_large_configurations_are_all_filled_at_once(tmp_path: Path) -> None:
    """Together they are more than a client may send: once their batches were refused, and so were most of them."""
    config = {**SLEEPER, "metadata": {"note": "x" * 150_000}}
    room = ("--machines", "144", "--cpus", "144", "--memory", "65536")
    with running_market(tmp_path, ("--region", "ord", "--workers", "1", *room)) as market:
        async with market.client() as client:
            await client.ok("POST", "/apps", {"app_name": "web", "org_slug": "personal"})
            order = {"config": config, "skip_launch": True}
            for _ in range(3):  # a worker that is not given a processor in time leaves its part in doubt
                answers = await asyncio.gather(*(client.call("POST", "/apps/web/machines", order) for _ in range(48)))
                if all(answer.status == 200 for answer in answers):
                    break
            assert [answer.status for answer in answers] == [200] * 48, {str(a.body)[:500] for a in answers}


LISTS = ("/apps/web/machines", "/apps/web/machines", "/apps", "/platform/regions")


async def all_answer(client: Client) -> bool:
    answers = [await client.call("GET", path) for path in LISTS]
    return not any("hawker-unreachable-workers" in answer.headers for answer in answers)


async def test_a_worker_at_an_address_that_is_anothers_by_now_is_not_taken_for_it() -> None:
    """A claim or an order would have gone to whoever listens there."""

    async def another(call: Call) -> None:
        await call.request()
        await call.reply('{"error": "this is worker ord-2, not ord-1"}', status="421 Misdirected Request")

    async with serving(another) as server:
        fleet = Fleet([WorkerAddress(name="ord-1", region="ord", host="127.0.0.1", port=server.port)], "token")
        with pytest.raises(PeerUnreachable, match="is not the one that answers at its address") as refused:
            await fleet.links["ord-1"].send(DescribeWorker())
        assert not refused.value.sent  # nothing was done, so the next worker may be tried
        assert "hawker-worker: ord-1" in server.heads[0]
        await fleet.close()

"""A broker's calls to its workers, over real sockets: what is left of them at the end, and what a silent worker costs."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.servers import Call, serving
from tests.kit.waiting import until

from hawker.broker.fleet import Confirmation, Fleet, WorkerAddress
from hawker.errors import Unreachable
from hawker.model.guest import Resources
from hawker.model.market import Ask
from hawker.model.rows import AppRow

ASK = Ask(app="web", region="ord", image="host", resources=Resources(cpus_shared=1))
APP = AppRow(name="web", id="web", org="o", network="n", number=1, created_at_ms=0, stamp_ms=0)


async def never(call: Call) -> None:
    """A worker that takes requests and answers none."""
    while await call.request():
        pass


async def test_closing_a_fleet_ends_every_call_and_leaves_nothing_pending() -> None:
    async with serving(never) as server:
        before = asyncio.all_tasks()
        fleet = Fleet([WorkerAddress(name="ord-1", region="ord", host="127.0.0.1", port=server.port)], "token")
        link = fleet.links["ord-1"]
        asked = [
            asyncio.ensure_future(link.confirm(Confirmation(key="k", app=APP))),
            *(asyncio.ensure_future(link.offer(ASK)) for _ in range(3)),  # in one batch
            asyncio.ensure_future(fleet.ask_all("GET", "/v1/market/worker", dict)),
        ]
        await until(lambda: len(server.requests) == 3)
        lone = asyncio.ensure_future(link.offer(ASK))
        lone.cancel()  # its caller is gone: nobody is left to wait for it
        await fleet.close()
        told = await asyncio.gather(*asked, lone, return_exceptions=True)
        assert [type(error) for error in told[:4]] == [Unreachable] * 4
        answers, errors = told[4]
        assert (answers, list(errors)) == ({}, ["ord-1"])
        await until(lambda: server.open == 0)
        assert asyncio.all_tasks() - before == set()
        await fleet.close()
        with pytest.raises(Unreachable, match="closed here"):
            await link.offer(ASK)

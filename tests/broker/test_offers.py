"""Asking workers for offers over real connections, in a broker whose own event loop stands still."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from tests.client.servers import Call, serving

from hawker.broker.fleet import WorkerLink
from hawker.broker.offers import book
from hawker.client.connection import Peer
from hawker.model.guest import Resources
from hawker.model.market import OFFERS_S, Ask, Reason, Refusal

ASK = Ask(app="web", region="ord", image="host", resources=Resources(cpus_shared=1))
REFUSAL = Refusal(worker="ord-1", region="ord", reason=Reason.cordoned)


@pytest.mark.parametrize("turns", range(2, 9))
async def test_a_broker_that_stood_still_itself_takes_no_worker_for_silent(turns: int) -> None:
    """An order was refused, with nobody's offer, by a broker that a long callback had held up for half a second."""
    loop = asyncio.get_running_loop()
    stood_still = False

    def stand_still(turns: int) -> None:
        nonlocal stood_still
        if turns:
            loop.call_soon(stand_still, turns - 1)
        else:
            time.sleep(1.5 * OFFERS_S)
            stood_still = True

    async def answer(call: Call) -> None:
        while await call.request():
            await call.reply(msgspec.json.encode([REFUSAL]))

    async with serving(answer) as server:
        link = WorkerLink("ord-1", "ord", Peer("127.0.0.1", server.port))
        loop.call_soon(stand_still, turns)  # some while it connects, some while it asks
        assert await book([link], ASK) == [REFUSAL]
        assert stood_still
        assert not link.missed
        await link.close()

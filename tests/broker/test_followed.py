"""What a broker passes on piece by piece, over real connections: it finds the worker like anything else does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.responses import StreamingResponse
from tests.client.servers import Call as ServerCall
from tests.client.servers import serving

from hawker.broker.fleet import Fleet, WorkerAddress
from hawker.broker.relay import Relay
from hawker.errors import Misdirected, NotFound, Unreachable
from hawker.http.call import Call
from hawker.model.machine_calls import FollowLogs

MACHINE = "1234567890abcd"
LOGS = f"/v1/apps/web/machines/{MACHINE}/logs"
LINES = b'{"message":"one"}\n{"message":"two"}\n'


def followed() -> Call:
    scope = {"raw_path": LOGS.encode(), "query_string": b"follow=true", "path": LOGS}
    request = SimpleNamespace(method="GET", scope=scope, headers={})
    return cast(Call, SimpleNamespace(path=lambda part: MACHINE, request=request, body=b"", id="r", owner="o"))


@asynccontextmanager
async def workers(old_status: str, *, moved: bool = True) -> AsyncIterator[tuple[Relay, Fleet]]:
    """`old`, which the broker believes to have a machine and which answers its calls with this status, and `new`, which
    has it if it was moved."""

    async def old(call: ServerCall) -> None:
        while await call.request():
            await call.reply(b'{"error": "not here"}', old_status, "content-type: application/json\r\n")

    async def new(call: ServerCall) -> None:
        while target := await call.request():
            if not moved:
                await call.reply(b'{"error": "not here"}', "404 Not Found")
            elif "/market/machines/" in target:
                await call.reply(b'{"app": "web", "generation": 2}')
            else:
                await call.reply(LINES)

    async with serving(old) as one, serving(new) as two:
        places = {"old": one.port, "new": two.port}
        fleet = Fleet(
            [WorkerAddress(name=n, region="ord", host="127.0.0.1", port=port) for n, port in places.items()], "token"
        )
        relay = Relay(fleet)
        relay.remember(MACHINE, "old")
        yield relay, fleet
        assert [link.peer.statistics().streams for link in fleet.links.values()] == [0, 0]
        await fleet.close()


@pytest.mark.parametrize("status", ["404 Not Found", f"{Misdirected.status} Misdirected"])
async def test_a_followed_log_finds_the_worker_that_a_machine_was_ordered_anew_on(status: str) -> None:
    async with workers(status) as (relay, fleet):
        response = await relay.machine_call(FollowLogs, followed())
        assert isinstance(response, StreamingResponse)
        assert b"".join([cast(bytes, piece) async for piece in response.body_iterator]) == LINES
        assert await relay.locate(MACHINE) is fleet.links["new"]


async def test_an_error_in_the_place_of_a_followed_log_is_passed_on_whole() -> None:
    async with workers("404 Not Found", moved=False) as (relay, _):
        response = await relay.machine_call(FollowLogs, followed())
        assert (response.status_code, response.body) == (404, b'{"error": "not here"}')
        with pytest.raises((NotFound, Unreachable)):
            await relay.locate(MACHINE)

"""A server that cannot begin leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.http.server import Server


async def app(scope: Scope, receive: Receive, send: Send) -> None: ...


@virtual_time
async def test_a_server_whose_address_is_taken_keeps_no_timer() -> None:
    host = virtual_host()
    asked = 0

    class Counting:
        def now_ms(self) -> int:
            nonlocal asked
            asked += 1
            return host.now_ms()

    server = Server(app, Counting())  # type: ignore[arg-type]
    with pytest.raises((OSError, NotImplementedError)):
        await server.open(("192.0.2.1", 80))  # of no interface
    before = asked
    await asyncio.sleep(10)
    assert asked == before

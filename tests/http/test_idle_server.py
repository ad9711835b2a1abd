"""A server that nobody asks: it waits for its next connection and for nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.kit.ports import free_port

from hawker.client.connection import Peer
from hawker.host import Host, live
from hawker.http.server import serve


class Counting(asyncio.SelectorEventLoop):
    """Counts the timers that are set on it."""

    timers = 0

    def call_at(self, *args: Any, **more: Any) -> asyncio.TimerHandle:  # type: ignore[override]  # as it is given
        self.timers += 1
        return super().call_at(*args, **more)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"well")(scope, receive, send)


def test_it_sets_no_timer() -> None:
    async def idle() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counting)
        server = await serve(app, ("127.0.0.1", free_port()), live())
        await asyncio.sleep(0)
        assert loop.timers == 0
        await server.close()

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(idle())


async def test_its_answers_carry_the_time_of_their_second() -> None:
    clock = [784111777.0]
    port = free_port()
    server = await serve(app, ("127.0.0.1", port), Host(lambda: clock[0], live().rng))
    peer = Peer("127.0.0.1", port)
    dates = []
    for _ in range(2):
        answer = await peer.request("GET", "/", timeout_s=5)
        dates.append(answer.headers["date"])
        clock[0] += 1
    assert dates == ["Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:38 GMT"]
    await peer.close()
    await server.close()

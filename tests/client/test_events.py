"""Server-sent events out of an answer: what counts as one, and where to go on from."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.servers import LIMIT_S, Call, chunk, serving

from hawker.client.api import Client
from hawker.client.events import Event
from hawker.errors import Unreachable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def events_of(*pieces: bytes) -> tuple[list[Event], str]:
    """The events of an answer sent in these pieces, and the last id."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD)
        for piece in pieces:
            await call.send(chunk(piece))
        await call.send(b"0\r\n\r\n")

    def read(port: int) -> tuple[list[Event], str]:
        with Client(f"http://127.0.0.1:{port}", "t", timeout_s=LIMIT_S) as client, client.subscribe("q") as events:
            return list(events), events.last_id

    async with serving(script) as server:
        return await asyncio.to_thread(read, server.port)


async def test_events_are_put_together_whatever_their_pieces() -> None:
    stream = b"event: row\ndata: [1]\n\n: still here\n\nevent: end\nid: S/0\ndata: {}\n\n"
    expected = [Event("row", [1]), Event("end", {}, "S/0")]
    for size in (1, 7, len(stream)):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert await events_of(*pieces) == (expected, "S/0")


async def test_an_empty_id_takes_back_where_to_go_on_from() -> None:
    found, last = await events_of(b"id: S/3\ndata: 1\n\nevent: reset\nid: \ndata: {}\n\nevent: row\ndata: 2\n\n")
    assert found == [Event("message", 1, "S/3"), Event("reset", {}, ""), Event("row", 2)]
    assert last == ""


async def test_data_of_several_lines_is_one_text_and_a_half_event_none() -> None:
    assert await events_of(b"data: [1,\ndata:2]\n\nevent: row\ndata: 3\n") == ([Event("message", [1, 2])], "")


async def test_a_server_that_falls_silent_counts_as_gone_when_that_was_asked_for() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD + chunk(b"one\n"))
        assert await call.closed()

    def read(port: int) -> list[bytes]:
        with Client(f"http://127.0.0.1:{port}", "t", timeout_s=LIMIT_S) as client:
            return list(client.lines("/v1/hawker/subscribe", quiet_s=0.05))

    async with serving(script) as server:
        with pytest.raises(Unreachable, match="broke off"):
            await asyncio.to_thread(read, server.port)


async def test_data_that_is_not_json_is_told_as_not_the_api() -> None:
    with pytest.raises(Unreachable, match="not JSON"):
        await events_of(b"data: hello\n\n")

"""Replies read while they come: live, for long, at the reader's pace."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.servers import LIMIT_S, Call, answers, chunk, serving
from tests.kit.waiting import at_rest, until

from hawker.client.connection import Peer, PeerUnreachable
from hawker.client.stream import BUFFER_BYTES_MAX

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_each_piece_is_read_as_soon_as_it_is_sent_and_the_end_ends_the_iterator() -> None:
    seen = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD)
        for line in (b"one\n", b"two\n"):
            await call.send(chunk(line))
            await seen.acquire()  # the next line is written only after this one was read
        await call.send(b"0\r\n\r\n")
        await call.closed()

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        lines = []
        async with (
            asyncio.timeout(LIMIT_S),
            peer.stream("GET", "/logs", timeout_s=LIMIT_S) as (status, headers, chunks),
        ):
            async for piece in chunks:
                lines.append(piece)
                seen.release()
        assert (status, headers["content-type"], lines) == (200, "application/x-ndjson", [b"one\n", b"two\n"])
        assert peer.statistics().streams == 0


async def test_leaving_early_closes_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD + chunk(b"one\n"))
        assert await call.closed()

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        async with peer.stream("GET", "/logs", timeout_s=LIMIT_S) as stream:
            assert await anext(stream.chunks) == b"one\n"
            assert peer.statistics().streams == 1
        await server.ended.wait()


async def test_a_reader_cancelled_in_mid_wait_closes_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD)
        assert await call.closed()

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)

        async def read() -> None:
            async with peer.stream("GET", "/logs", timeout_s=LIMIT_S) as stream:
                reading.set()
                await anext(stream.chunks)

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        await server.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("end", [b"", b"this is no chunk\r\n"])
async def test_a_stream_that_breaks_off_gives_what_came_and_then_raises(end: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD + chunk(b"one\n") + end)

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        async with peer.stream("GET", "/logs", timeout_s=LIMIT_S) as stream:
            assert await anext(stream.chunks) == b"one\n"
            with pytest.raises(PeerUnreachable, match="/logs") as caught:
                await anext(stream.chunks)
        assert caught.value.sent


async def test_the_time_limit_holds_for_the_head_and_not_for_the_body() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if await call.request() == "GET /head":
            assert await call.closed()
        else:
            await call.send(HEAD)
            await release.wait()
            await call.send(chunk(b"late\n") + b"0\r\n\r\n")

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        with pytest.raises(PeerUnreachable, match=r"within 0\.1 s"):
            async with peer.stream("GET", "/head", timeout_s=0.1):
                pass
        async with peer.stream("GET", "/body", timeout_s=0.1) as stream:
            asyncio.get_running_loop().call_later(0.2, release.set)
            assert [piece async for piece in stream.chunks] == [b"late\n"]


async def test_a_reader_that_falls_behind_makes_the_peer_wait_and_loses_nothing() -> None:
    sent = 0
    total = 40 << 20  # more than any socket buffer

    async def script(call: Call) -> None:
        nonlocal sent
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            await call.send(b"x" * 65536)
            sent += 65536

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        async with peer.stream("GET", "/logs", timeout_s=LIMIT_S) as stream:
            received = len(await anext(stream.chunks))
            await until(lambda: sent > BUFFER_BYTES_MAX)
            assert await at_rest(lambda: sent, 0.05) < total
            async for piece in stream.chunks:
                received += len(piece)
        assert received == total


async def test_streams_take_no_place_of_the_pool() -> None:
    async def script(call: Call) -> None:
        if (request := await call.request()).endswith("/logs"):
            await call.send(HEAD)
        else:
            await call.reply(request)
        await call.closed()

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port, connections_max=1)
        async with peer.stream("GET", "/logs", timeout_s=LIMIT_S), peer.stream("GET", "/logs", timeout_s=LIMIT_S):
            assert (await peer.request("GET", "/x", timeout_s=LIMIT_S)).body == b"GET /x"
        await peer.close()


async def test_closing_the_peer_breaks_its_streams_off() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(HEAD)
        await call.closed()

    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port)
        async with peer.stream("GET", "/logs", timeout_s=LIMIT_S) as stream:
            await peer.close()
            with pytest.raises(PeerUnreachable, match="given up"):
                await anext(stream.chunks)


async def test_a_short_reply_read_as_a_stream_is_whole() -> None:
    async with serving(answers) as server:
        peer = Peer("127.0.0.1", server.port)
        async with peer.stream("POST", "/x", body=b"{}", timeout_s=LIMIT_S) as stream:
            assert b"".join([piece async for piece in stream.chunks]) == b"POST /x {}"

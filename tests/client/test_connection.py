"""Requests between agents over real sockets, against servers that behave and servers that do not."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.client.servers import LIMIT_S, Call, Script, Server, answers, serving
from tests.kit.waiting import until

from hawker.client.connection import Connection, Peer, PeerUnreachable, Response
from hawker.errors import Unreachable

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def peer_of(script: Script, **options: Any) -> AsyncIterator[tuple[Peer, Server]]:
    async with serving(script) as server:
        peer = Peer("127.0.0.1", server.port, **options)
        try:
            yield peer, server
        finally:
            await peer.close()


async def unreachable(peer: Peer, method: str = "POST", target: str = "/x", **options: Any) -> PeerUnreachable:
    with pytest.raises(PeerUnreachable) as caught:
        await peer.request(method, target, timeout_s=options.pop("timeout_s", LIMIT_S), **options)
    assert isinstance(caught.value, Unreachable)
    assert peer.name in caught.value.message
    return caught.value


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_reply_has_its_status_its_headers_in_lower_case_and_its_body() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.reply("no", "409 Conflict", "X-Reason: full\r\nVia: a\r\nVia: b\r\n")
        await call.closed()

    async with peer_of(script) as (peer, _):
        reply = await peer.request("GET", "/x", timeout_s=LIMIT_S)
    assert reply == Response(409, {"x-reason": "full", "via": "a, b", "content-length": "2"}, b"no")


async def test_a_request_carries_the_headers_of_the_peer_and_its_own_and_a_body() -> None:
    async with peer_of(answers, headers={"authorization": "Bearer t"}) as (peer, server):
        reply = await peer.request("POST", "/x?a=1", body=b"{}", headers={"traceparent": "00-1"}, timeout_s=LIMIT_S)
    assert reply.body == b"POST /x?a=1 {}"
    assert server.heads == [
        f"POST /x?a=1 HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nauthorization: Bearer t\r\n"
        "traceparent: 00-1\r\ncontent-length: 2\r\n\r\n"
    ]


@pytest.mark.parametrize(
    ("method", "raw", "status", "body"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 200, b""),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ("GET", CHUNKED + b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\na: b\r\n\r\n", 200, b"abc"),
        ("GET", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        ("GET", b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
    ],
    ids=["head", "no content", "chunks and a trailer", "an interim answer first", "http/1.0"],
)  # fmt: skip
async def test_every_form_of_a_reply_is_understood(method: str, raw: bytes, status: int, body: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)
        await call.closed()

    async with peer_of(script) as (peer, _):
        reply = await peer.request(method, "/x", timeout_s=LIMIT_S)
    assert (reply.status, reply.body) == (status, body)


async def test_after_a_head_with_a_length_the_next_call_reads_its_own_reply() -> None:
    async def script(call: Call) -> None:
        while request := await call.request():
            body = b"" if request.startswith("HEAD") else b"hello"
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + body)

    async with peer_of(script) as (peer, _):
        replies = [await peer.request(method, "/x", timeout_s=LIMIT_S) for method in ("GET", "HEAD", "GET")]
    assert [(reply.status, reply.body) for reply in replies] == [(200, b"hello"), (200, b""), (200, b"hello")]


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async with peer_of(script) as (peer, _):
        assert (await peer.request("GET", "/x", timeout_s=LIMIT_S)).body == b"all of it"


# --- the pool --------------------------------------------------------------------------------------------------------


async def test_calls_one_after_another_share_a_connection() -> None:
    async with peer_of(answers) as (peer, server):
        for n in range(10):
            assert (await peer.request("POST", f"/{n}", timeout_s=LIMIT_S)).body == f"POST /{n} ".encode()
        assert server.accepted == 1
        statistics = peer.statistics()
    assert (statistics.open, statistics.idle, statistics.requests, statistics.reconnects) == (1, 1, 10, 0)


async def test_calls_at_once_open_no_more_connections_than_allowed_and_each_gets_its_own_reply() -> None:
    async with peer_of(answers, connections_max=4) as (peer, server):
        replies = await asyncio.gather(*(peer.request("GET", f"/{n}", timeout_s=LIMIT_S) for n in range(100)))
        assert peer.statistics().open == 4
    assert [r.body for r in replies] == [f"GET /{n} ".encode() for n in range(100)]
    assert server.open_most == 4


async def test_waiters_for_a_connection_are_served_in_order() -> None:
    async with peer_of(answers, connections_max=1) as (peer, server):
        await asyncio.gather(*(peer.request("GET", f"/{n}", timeout_s=LIMIT_S) for n in range(20)))
    assert server.requests == [f"GET /{n}" for n in range(20)]


async def test_a_waiter_whose_time_is_up_has_sent_nothing_and_leaves_the_queue() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.closed()

    async with peer_of(script, connections_max=1) as (peer, server):
        first = asyncio.create_task(peer.request("POST", "/first", timeout_s=LIMIT_S))
        await until(lambda: server.requests == ["POST /first"])
        error = await unreachable(peer, "POST", "/second", timeout_s=0.05)
        assert not error.sent
        assert peer.statistics().waiting == 0
        first.cancel()
    assert server.requests == ["POST /first"]


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        while request := await call.request():
            await release.wait()
            await call.reply(request)

    async with peer_of(script, connections_max=1) as (peer, server):
        first, second, third = (
            asyncio.create_task(peer.request("GET", f"/{n}", timeout_s=LIMIT_S)) for n in ("first", "second", "third")
        )
        await until(lambda: peer.statistics().waiting == 2 and bool(server.requests))
        second.cancel()
        release.set()
        assert (await first).body == b"GET /first"
        assert (await third).body == b"GET /third"
    assert second.cancelled()
    assert server.requests == ["GET /first", "GET /third"]


class Interrupted(Peer):
    """Cancels a task at the one moment that tests cannot reach from outside: its turn has come, and it has not run."""

    victim: asyncio.Task[Response] | None = None

    def released(self, connection: Connection) -> None:
        super().released(connection)
        self._interrupt()

    def lost(self, connection: Connection) -> None:
        super().lost(connection)
        self._interrupt()

    def _interrupt(self) -> None:
        if self.victim is not None:
            self.victim.cancel()
            self.victim = None


@pytest.mark.parametrize("ends", ["released", "lost"])
async def test_a_waiter_cancelled_in_the_very_moment_its_turn_comes_passes_it_on(ends: str) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        request = await call.request()
        await go_on.wait()
        await call.reply(request, headers="connection: close\r\n" if ends == "lost" else "")
        if ends == "released":
            await answers(call)

    async with serving(script) as server:
        peer = Interrupted("127.0.0.1", server.port, connections_max=1)
        first, second, third = (
            asyncio.create_task(peer.request("GET", f"/{n}", timeout_s=LIMIT_S)) for n in ("first", "second", "third")
        )
        await until(lambda: peer.statistics().waiting == 2)
        peer.victim = second
        go_on.set()
        async with asyncio.timeout(LIMIT_S / 2):  # sooner than its own deadline would free the third
            assert (await first).status == (await third).status == 200
        assert second.cancelled()
        assert server.requests == ["GET /first", "GET /third"]
        await peer.close()


async def test_a_connection_that_rested_too_long_is_not_used_again() -> None:
    async with peer_of(answers, idle_s_max=0.0) as (peer, server):
        await peer.request("POST", "/1", timeout_s=LIMIT_S)
        await peer.request("POST", "/2", timeout_s=LIMIT_S)
        assert server.accepted == 2
        assert peer.statistics().open == 1


async def test_an_idle_connection_that_the_peer_closed_is_replaced_without_a_word() -> None:
    async def script(call: Call) -> None:
        await call.reply(await call.request())

    async with peer_of(script) as (peer, server):
        assert (await peer.request("POST", "/1", timeout_s=LIMIT_S)).body == b"POST /1"
        await until(lambda: peer.statistics().open == 0)
        assert (await peer.request("POST", "/2", timeout_s=LIMIT_S)).body == b"POST /2"
    assert server.requests == ["POST /1", "POST /2"]
    assert peer.statistics().reconnects == 0


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"\0", b"HTT"])
async def test_bytes_after_a_reply_end_its_connection_and_are_never_the_next_reply(extra: bytes) -> None:
    async def script(call: Call) -> None:
        while request := await call.request():
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(request) + request.encode() + extra)

    async with peer_of(script) as (peer, server):
        for n in range(3):
            assert (await peer.request("POST", f"/{n}", timeout_s=LIMIT_S)).body == f"POST /{n}".encode()
    assert server.accepted == 3


async def test_bytes_that_nobody_asked_for_end_the_idle_connection() -> None:
    speak = asyncio.Event()

    async def script(call: Call) -> None:
        await call.reply(await call.request())
        await speak.wait()
        await call.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await call.closed()

    async with peer_of(script) as (peer, _):
        await peer.request("GET", "/1", timeout_s=LIMIT_S)
        speak.set()
        await until(lambda: peer.statistics().open == 0)
        assert (await peer.request("GET", "/2", timeout_s=LIMIT_S)).body == b"GET /2"


# --- a connection closed as it is used again -------------------------------------------------------------------------


async def closes_at_the_second(call: Call) -> None:
    """Answers one request; reads the second, when there is one on this connection, and closes without a byte."""
    await call.reply(await call.request())
    await call.request()


async def test_a_post_on_a_reused_connection_that_closes_is_in_doubt_and_not_repeated() -> None:
    async with peer_of(closes_at_the_second) as (peer, server):
        await peer.request("POST", "/1", timeout_s=LIMIT_S)
        assert (await unreachable(peer, "POST", "/2")).sent
    assert server.requests == ["POST /1", "POST /2"]


@pytest.mark.parametrize(("method", "idempotent"), [("GET", False), ("POST", True)])
async def test_what_may_be_repeated_is_repeated_once_on_a_new_connection(method: str, idempotent: bool) -> None:
    async with peer_of(closes_at_the_second) as (peer, server):
        await peer.request("GET", "/1", timeout_s=LIMIT_S)
        reply = await peer.request(method, "/2", timeout_s=LIMIT_S, idempotent=idempotent)
        assert reply.body == f"{method} /2".encode()
        assert peer.statistics().reconnects == 1
    assert server.requests == ["GET /1", f"{method} /2", f"{method} /2"]


async def test_nothing_is_repeated_twice() -> None:
    async def script(call: Call) -> None:
        request = await call.request()
        if call.number == 1:
            await call.reply(request)
            await call.request()

    async with peer_of(script) as (peer, server):
        await peer.request("GET", "/1", timeout_s=LIMIT_S)
        assert (await unreachable(peer, "GET", "/2")).sent
    assert server.requests == ["GET /1", "GET /2", "GET /2"]


async def test_a_fresh_connection_that_closes_is_not_tried_again() -> None:
    async def script(call: Call) -> None:
        await call.request()

    async with peer_of(script) as (peer, server):
        assert (await unreachable(peer, "GET", "/1")).sent
    assert server.requests == ["GET /1"]


# --- broken replies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (OK + b"content-le", "broke off"),
        (OK + b"content-length: 10\r\n\r\nhalf", "broke off"),
        (CHUNKED + b"5\r\nab", "broke off"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx", "not HTTP/1.1"),
        (OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab", "not HTTP/1.1"),
        (OK + b"content-length: 1001\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
        (CHUNKED + b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501 + b"\r\n0\r\n\r\n", "more than 1000 bytes"),
        (OK + b"a: b\r\n" * 20000, "head or framing"),
        (CHUNKED + b"1;" + b"x" * 200000, "head or framing"),
        (CHUNKED + b"0\r\n" + b"a" * 200000, "head or framing"),
    ],
    ids=[
        "closed in the head", "closed in the body", "closed in a chunk", "another protocol", "an upgrade",
        "two lengths", "long body", "long chunks", "endless head", "endless extension", "endless trailer",
    ],
)  # fmt: skip
async def test_a_broken_reply_is_an_error_that_says_how_and_its_connection_is_closed(raw: bytes, word: str) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)
        if "broke off" not in word:
            await call.closed()

    async with peer_of(script) as (peer, server):
        error = await unreachable(peer, body_bytes_max=1000)
        assert error.sent
        assert word in error.message
        await until(lambda: peer.statistics().open == 0 and server.open == 0)


# --- no reply --------------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_an_error_and_nothing_was_sent() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        peer = Peer("127.0.0.1", free.getsockname()[1])
        error = await unreachable(peer, "POST", "/x")
    assert not error.sent
    assert "Connection refused" in error.message
    assert "nothing was sent" in error.message
    assert error.details == {"peer": peer.name, "sent": False}


async def test_waiters_behind_a_connection_that_cannot_be_made_fail_too() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        peer = Peer("127.0.0.1", free.getsockname()[1], connections_max=1)
        errors = await asyncio.gather(*(unreachable(peer) for _ in range(10)))
    assert all("Connection refused" in error.message and not error.sent for error in errors)
    assert peer.statistics().open == peer.statistics().waiting == 0


async def test_a_connection_that_is_not_accepted_in_time_is_an_error_and_nothing_was_sent() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):  # one for the queue and one more: later ones wait for an answer
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        error = await unreachable(Peer("127.0.0.1", full.getsockname()[1], connect_timeout_s=0.05))
    assert not error.sent
    assert "in time" in error.message


@pytest.mark.parametrize("raw", [b"", OK, OK + b"content-length: 5\r\n\r\nhal"])
async def test_an_answer_that_does_not_come_in_time_is_in_doubt_and_its_connection_closed(raw: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)
        assert await call.closed()

    async with peer_of(script) as (peer, server):
        error = await unreachable(peer, timeout_s=0.05)
        assert error.sent
        assert "within 0.05 s" in error.message
        await server.ended.wait()


async def test_a_drop_at_a_time_does_not_stretch_the_deadline() -> None:
    async def script(call: Call) -> None:
        await call.request()
        while True:
            await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.005)

    async with peer_of(script) as (peer, _):
        async with asyncio.timeout(LIMIT_S):
            assert (await unreachable(peer, timeout_s=0.1)).sent


async def test_a_short_deadline_holds_on_a_connection_whose_last_one_was_long() -> None:
    async def script(call: Call) -> None:
        await call.reply(await call.request())
        await call.request()
        await call.closed()

    async with peer_of(script) as (peer, _):
        await peer.request("GET", "/1", timeout_s=600)
        async with asyncio.timeout(LIMIT_S):
            assert "within 0.05 s" in (await unreachable(peer, timeout_s=0.05)).message


async def test_a_long_deadline_holds_on_a_connection_whose_last_one_was_short() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await call.reply(await call.request())
        request = await call.request()
        await release.wait()
        await call.reply(request)
        await call.closed()

    async with peer_of(script) as (peer, _):
        loop = asyncio.get_running_loop()
        await peer.request("GET", "/1", timeout_s=0.25)
        loop.call_later(0.35, release.set)
        assert (await peer.request("GET", "/2", timeout_s=LIMIT_S)).body == b"GET /2"


# --- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_closes_its_connection_and_its_reply_goes_to_nobody() -> None:
    async def script(call: Call) -> None:
        request = await call.request()
        if request == "GET /cancelled":
            assert await call.closed()
        else:
            await call.reply(request)
            await call.closed()

    async with peer_of(script, connections_max=1) as (peer, server):
        call = asyncio.create_task(peer.request("GET", "/cancelled", timeout_s=LIMIT_S))
        await until(lambda: bool(server.requests))
        call.cancel()
        assert (await peer.request("GET", "/next", timeout_s=LIMIT_S)).body == b"GET /next"
        assert call.cancelled()


async def test_among_calls_cancelled_timed_out_and_broken_every_other_gets_its_own_reply() -> None:
    rng = random.Random(20261121)

    async def script(call: Call) -> None:
        while request := await call.request():
            fate = rng.random()
            if fate < 0.1:
                return
            if fate < 0.3:
                await asyncio.sleep(0.004)
            await call.reply(request)

    outcomes = {"answered": 0, "unreachable": 0, "cancelled": 0}

    async with peer_of(script, connections_max=5) as (peer, server):

        async def one(n: int) -> None:
            try:
                async with asyncio.timeout(rng.choice((0.002, LIMIT_S, LIMIT_S))):
                    reply = await peer.request("POST", f"/{n}", timeout_s=rng.choice((0.003, LIMIT_S, LIMIT_S)))
                assert reply.body == f"POST /{n}".encode()
                outcomes["answered"] += 1
            except PeerUnreachable:
                outcomes["unreachable"] += 1
            except TimeoutError:
                outcomes["cancelled"] += 1

        for start in range(0, 400, 20):
            await asyncio.gather(*(one(n) for n in range(start, start + 20)))
        await until(lambda: peer.statistics().open == peer.statistics().idle)
        assert peer.statistics().waiting == 0
        assert (await peer.request("GET", "/last", timeout_s=LIMIT_S, idempotent=True)).status == 200
    assert all(outcomes.values()), outcomes
    assert server.open_most <= 5 + 5  # the server may see the end of a connection after the beginning of the next


# --- closing ---------------------------------------------------------------------------------------------------------


async def test_closing_fails_what_is_under_way_and_what_waits_and_leaves_no_connection() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.closed()

    async with peer_of(script, connections_max=1) as (peer, server):
        first = asyncio.create_task(unreachable(peer))
        await until(lambda: bool(server.requests))
        second = asyncio.create_task(unreachable(peer))
        await until(lambda: peer.statistics().waiting == 1)
        await peer.close()
        assert ((await first).sent, (await second).sent) == (True, False)
        assert peer.statistics().open == 0
        assert not (await unreachable(peer)).sent
        await peer.close()


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/x HTTP/1.1\r\nevil: yes\r\n\r\n", {}),
        ("GET", "/a b", {}),
        ("GET", "/a\tb", {}),
        ("GET /", "/x", {}),
        ("GET", "/x", {"a": "b\r\nevil: yes"}),
        ("GET", "/x", {"a: b\r\nevil": "yes"}),
        ("GET", "/x", {"": "b"}),
        ("GET", "/x", {"Content-Length": "7"}),
        ("GET", "/x", {"transfer-encoding": "chunked"}),
    ],
)
async def test_what_would_not_be_one_request_is_never_sent(method: str, target: str, headers: dict[str, str]) -> None:
    async with peer_of(answers) as (peer, server):
        with pytest.raises(ValueError, match=r".+"):
            await peer.request(method, target, headers=headers, timeout_s=LIMIT_S)
    assert server.accepted == 0


async def test_odd_bytes_of_a_stranger_that_break_nothing_are_passed_on() -> None:
    async with peer_of(answers) as (peer, server):
        reply = await peer.request("GET", "/\u00e9?q=\u20ac", headers={"traceparent": "\tx\x80\xff"}, timeout_s=LIMIT_S)
    assert reply.status == 200
    assert server.requests == ["GET /\u00e9?q=\u20ac".encode().decode("latin-1")]
    assert "traceparent: \tx\x80\xff\r\n" in server.heads[0]


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 70_000), ("127.0.0.1", 1 << 62), ("a..b", 80), ("\N{SNOWMAN}" * 70, 80), ("a\r\nb", 80), ("", 0)],
    ids=["port", "number", "label", "text", "lines", "nothing"],
)
async def test_what_is_no_address_is_unreachable_like_one_where_nobody_listens(host: str, port: int) -> None:
    """Addresses come from other members, and one that makes no sense must not end who follows them."""
    peer = Peer(host, port)
    for _ in range(2):
        assert not (await unreachable(peer)).sent
    assert peer.statistics().open == 0
    await peer.close()

"""The clients over real sockets: what a program gets, and what it is told when something is wrong. Everything is asked
of both, the one that blocks and the one that awaits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from tests.client.servers import LIMIT_S, Call, Script, Server, chunk, serving

from hawker.client.answering import LINE_BYTES_MAX
from hawker.client.client import ApiError, AsyncClient, Client
from hawker.errors import Invalid, Unreachable
from hawker.model.op import BYTES, EVENTS, NDJSON, Op, Request, StreamRequest


class Get(Request[Any], kw_only=False):
    op = Op("Get", "GET", "/v1/{name}")

    name: str = "x"
    b: bool = False


class Post(Request[Any], kw_only=False):
    op = Op("Post", "POST", "/v1/{name}", query=("wait",), headers={"key": "x-y"})

    name: str = "x"
    é: int = 1
    wait: bool = False
    key: str = ""


class Repeat(Request[Any]):
    op = Op("Repeat", "POST", "/v1/again", idempotent=True)


class Known(msgspec.Struct):
    at: int


class Typed(Request[Known]):
    op = Op("Typed", "GET", "/v1/known")


class Line(msgspec.Struct):
    a: int


class Event(msgspec.Struct):
    event: Literal["row", "end"]
    data: str
    id: str | UnsetType = UNSET


class FollowLines(StreamRequest[Line]):
    op = Op("Lines", "GET", "/v1/lines", media=NDJSON)


class FollowEvents(StreamRequest[Event]):
    op = Op("Events", "GET", "/v1/events", media=EVENTS)


class FollowBytes(StreamRequest[bytes]):
    op = Op("Bytes", "GET", "/v1/bytes", media=BYTES, quiet_s=0.05)


class Both:
    """One of the two clients; its calls are awaited in any case."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def send(self, request: Request[Any], *, timeout_s: float | None = None) -> Any:
        if isinstance(self.client, AsyncClient):
            return await self.client.send(request, timeout_s=timeout_s)
        return await asyncio.to_thread(partial(self.client.send, request, timeout_s=timeout_s))

    @asynccontextmanager
    async def stream(
        self, request: StreamRequest[Any], *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[Any]]:
        if isinstance(self.client, AsyncClient):
            async with self.client.stream(request, timeout_s=timeout_s) as parts:
                yield parts
            return
        stream = await asyncio.to_thread(partial(self.client.stream, request, timeout_s=timeout_s))

        async def parts_of() -> AsyncIterator[Any]:
            while (part := await asyncio.to_thread(next, stream, None)) is not None:
                yield part

        with stream:
            yield parts_of()

    async def all_of(self, request: StreamRequest[Any]) -> list[Any]:
        async with self.stream(request) as parts:
            return [part async for part in parts]


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@asynccontextmanager
async def client_of(kind: Any, script: Script, suffix: str = "", **options: Any) -> AsyncIterator[tuple[Both, Server]]:
    async with serving(script) as server:
        client = kind(f"http://127.0.0.1:{server.port}{suffix}", "t", **{"timeout_s": LIMIT_S, **options})
        try:
            yield Both(client), server
        finally:
            await client.close() if isinstance(client, AsyncClient) else client.close()


def says(body: str, status: str = "200 OK", headers: str = "") -> Script:
    """A server that answers every request alike."""

    async def script(call: Call) -> None:
        while await call.request():
            await call.reply(body, status, headers)

    return script


async def error_of(kind: Any, script: Script, request: Request[Any]) -> ApiError:
    async with client_of(kind, script) as (client, _):
        with pytest.raises(ApiError) as caught:
            await client.send(request)
    return caught.value


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_sends_what_it_declares_and_gives_a_decoded_reply(kind: Any) -> None:
    async with client_of(kind, says('{"a": [1, null]}'), user_agent="test/1") as (client, server):
        answer = await client.send(Post(wait=True, é=2, key="z"))
    assert answer == {"a": [1, None]}
    assert server.requests == ["POST /v1/x?wait=true"]
    assert server.bodies == ['{"é":2}'.encode()]
    for header in ("authorization: Bearer t", "user-agent: test/1", "content-type: application/json", "x-y: z"):
        assert f"\r\n{header}\r\n" in server.heads[0]


async def test_a_reply_is_of_its_declared_type_or_none_of_this_api(kind: Any) -> None:
    async with client_of(kind, says('{"at": 5}')) as (client, _):
        assert await client.send(Typed()) == Known(5)
    for answer in ('{"at": "five"}', "[]", "<html>", ""):
        async with client_of(kind, says(answer)) as (client, _):
            with pytest.raises(Unreachable, match="not one of this API") as caught:
                await client.send(Typed())
        assert "market" in caught.value.hint


async def test_the_headers_of_the_last_answer_are_kept_also_of_an_error(kind: Any) -> None:
    async with client_of(kind, says("{}", headers="Server-Timing: total;dur=1.5\r\n")) as (client, _):
        assert client.client.answer_headers == {}
        await client.send(Get())
        assert client.client.answer_headers["server-timing"] == "total;dur=1.5"
    async with client_of(kind, says("{}", "500 Oh", "x-y: z\r\n")) as (client, _):
        with pytest.raises(ApiError):
            await client.send(Get())
        assert client.client.answer_headers["x-y"] == "z"


@pytest.mark.parametrize(
    ("token", "header"),
    [("abc", "Bearer abc"), ("fm2_abc,fm2_d", "FlyV1 fm2_abc,fm2_d"), ("FlyV1 x", "FlyV1 x"), ("Bearer x", "Bearer x")],
)
async def test_a_token_goes_out_under_its_scheme(token: str, header: str) -> None:
    async with serving(says("1")) as server:
        with Client(f"http://127.0.0.1:{server.port}", token, timeout_s=LIMIT_S) as client:
            assert await asyncio.to_thread(client.send, Get()) == 1
    assert f"\r\nauthorization: {header}\r\n" in server.heads[0]


@pytest.mark.parametrize(("suffix", "target"), [("/", "/v1/x"), ("/v1", "/v1/x"), ("/market/v1/", "/market/v1/x")])
async def test_an_endpoint_may_be_written_with_or_without_the_version(kind: Any, suffix: str, target: str) -> None:
    async with client_of(kind, says("1"), suffix) as (client, server):
        await client.send(Get())
    assert server.requests == [f"GET {target}"]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4280", "ftp://x", "http://", "http://x:port", "http://u:p@x", ""])
def test_what_is_no_endpoint_is_refused_by_name(kind: Any, endpoint: str) -> None:
    with pytest.raises(Invalid, match="endpoint"):
        kind(endpoint, "t")


@pytest.mark.parametrize("token", ["", "a\r\nb: c", "é"])
def test_what_is_no_token_is_refused_and_not_shown(kind: Any, token: str) -> None:
    with pytest.raises(Invalid, match="token") as caught:
        kind("http://x", token)
    assert not token or token not in str(caught.value.details)


async def test_a_part_of_a_path_stays_one_part(kind: Any) -> None:
    async with client_of(kind, says("1")) as (client, server):
        await client.send(Get("../a b/c?d#e%"))
    assert server.requests == ["GET /v1/..%2Fa%20b%2Fc%3Fd%23e%25"]


async def test_a_proxy_of_the_environment_never_gets_a_token(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with client_of(kind, says("1")) as (client, _):
        assert await client.send(Get()) == 1


# --- connections -----------------------------------------------------------------------------------------------------


async def test_calls_share_a_connection(kind: Any) -> None:
    async with client_of(kind, says("1")) as (client, server):
        for _ in range(5):
            await client.send(Post())
        assert server.accepted == 1


async def test_a_connection_that_the_server_closed_in_between_is_replaced_without_a_word(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.reply("1")

    async with client_of(kind, script) as (client, server):
        for n in range(3):
            server.ended.clear()
            assert await client.send(Post(str(n))) == 1
            await server.ended.wait()  # closed, also as far as this machine is concerned
    assert server.requests == ["POST /v1/0", "POST /v1/1", "POST /v1/2"]


@pytest.mark.parametrize(
    ("request_", "times"), [(Get("x"), 2), (Repeat(), 2), (Post("x"), 1)], ids=["get", "so", "not"]
)
async def test_a_connection_that_closes_as_it_is_used_again_repeats_what_may_be(
    kind: Any, request_: Request[Any], times: int
) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.reply("1")
        await call.request()

    async with client_of(kind, script) as (client, server):
        await client.send(Get("first"))
        if times == 2:
            assert await client.send(request_) == 1
        else:
            with pytest.raises(Unreachable, match="closed the connection"):
                await client.send(request_)
    assert len(server.requests) == 1 + times


async def test_a_call_is_repeated_once_and_no_more(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.request()

    async with client_of(kind, script) as (client, server):
        with pytest.raises(Unreachable, match="closed the connection before it answered GET /v1/x"):
            await client.send(Get())
    assert server.requests == ["GET /v1/x"] * 2


async def test_after_an_answer_that_came_too_late_the_next_call_gets_its_own(kind: Any) -> None:
    async def script(call: Call) -> None:
        if (request := await call.request()) == "GET /v1/slow":
            await call.closed()
        await call.reply(f'"{request}"')
        await call.closed()

    async with client_of(kind, script) as (client, _):
        with pytest.raises(Unreachable, match=r"within 0\.05 s"):
            await client.send(Get("slow"), timeout_s=0.05)
        assert await client.send(Get("next")) == "GET /v1/next"


async def test_a_market_that_is_not_up_is_told_with_the_way_to_start_one(kind: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = kind(f"http://127.0.0.1:{free.getsockname()[1]}", "t")
        with pytest.raises(Unreachable, match="takes no connections") as caught:
            await Both(client).send(Get())
        await client.close() if isinstance(client, AsyncClient) else client.close()
    assert "hawker dev" in caught.value.hint


async def test_a_server_without_tls_is_told_from_one_that_is_down(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.reader.read(100)
        await call.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(script) as server:
        client = kind(f"https://127.0.0.1:{server.port}", "t", timeout_s=LIMIT_S)
        with pytest.raises(Unreachable, match="cannot be reached"):
            await Both(client).send(Get())
        await client.close() if isinstance(client, AsyncClient) else client.close()


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_an_error_of_the_api_keeps_everything_it_says(kind: Any) -> None:
    body = '{"error": "no room", "status": "insufficient_capacity", "details": {"refusals": [1], "hint": "try fra"}}'
    error = await error_of(kind, says(body, "409 Conflict", "fly-request-id: 01J-mad\r\n"), Post())
    assert (error.message, error.hint, error.details) == ("no room", "try fra", {"refusals": [1]})
    assert (error.status_code, error.word, error.request_id) == (409, "insufficient_capacity", "01J-mad")
    assert (error.method, error.path) == ("POST", "/v1/x")
    assert error.body() == {
        "error": "no room",
        "status": "insufficient_capacity",
        "details": {"refusals": [1], "hint": "try fra"},
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"status": "error", "message": "lease currently held by x", "code": "invalid"}', "lease currently held by x"),
        ("nothing here\n", "nothing here"),
        ("", "GET /v1/x: 404 Not Found"),
        ("{}", "GET /v1/x: 404 Not Found"),
        ('["a"]', '["a"]'),
        ('{"error": {"odd": 1}}', "GET /v1/x: 404 Not Found"),
        ("x" * 10000, "x" * 500),
    ],
)
async def test_an_error_in_any_form_has_a_sentence(kind: Any, body: str, message: str) -> None:
    error = await error_of(kind, says(body, "404 Not Found"), Get())
    assert (error.message, error.status_code) == (message, 404)


async def test_after_an_error_the_connection_is_used_on(kind: Any) -> None:
    async with client_of(kind, says('{"error": "no"}', "404 Not Found")) as (client, server):
        for _ in range(3):
            with pytest.raises(ApiError):
                await client.send(Get())
        assert server.accepted == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n[1",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n[1",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n[1]\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
async def test_a_broken_answer_is_never_taken_for_a_whole_one(kind: Any, raw: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)

    async with client_of(kind, script) as (client, _):
        with pytest.raises(Unreachable, match="/v1/x"):
            await client.send(Get())


async def test_an_answer_without_a_length_is_read_to_its_end(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\n[1,")
        await call.send(b"2]")

    async with client_of(kind, script) as (client, _):
        assert await client.send(Get()) == [1, 2]
        assert await client.send(Get()) == [1, 2]


# --- streams ---------------------------------------------------------------------------------------------------------

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def sends(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> Script:
    """A server that answers in these pieces."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(CHUNKED)
        for piece in pieces:
            await call.send(chunk(piece))
        await call.send(end)

    return script


async def test_parts_come_as_they_are_sent_whatever_their_pieces(kind: Any) -> None:
    read = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(CHUNKED + chunk(b'{"a":') + chunk(b"1}\n\n") + chunk(b'{"a":2}\n{"a'))
        for _ in range(2):
            await read.acquire()
        await call.send(chunk(b'":3}\n{"a":4}') + b"0\r\n\r\n")

    async with client_of(kind, script) as (client, _), client.stream(FollowLines()) as lines:
        seen = []
        async for line in lines:
            seen.append(line.a)
            read.release()
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_are_put_together_whatever_their_pieces(kind: Any, size: int) -> None:
    stream = (
        b'event: row\ndata: [1]\n\n: still here\n\nevent: end\nid: S/0\ndata: {"a":\ndata: 1}\n\n'
        b"event: unheard-of\ndata: 1\n\nevent: row\ndata: 3\n"
    )
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    async with client_of(kind, sends(*pieces)) as (client, _):
        assert await client.all_of(FollowEvents()) == [Event("row", "[1]"), Event("end", '{"a":\n1}', "S/0")]


@pytest.mark.parametrize("request_", [FollowLines(), FollowEvents()], ids=["lines", "events"])
async def test_a_part_that_is_not_json_is_told_as_not_the_api(kind: Any, request_: StreamRequest[Any]) -> None:
    async with client_of(kind, sends(b"event: row\ndata: hello\n\n")) as (client, _):
        with pytest.raises(Unreachable, match="not one of this API"):
            await client.all_of(request_)


async def test_a_stream_has_a_connection_of_its_own_and_closing_ends_it(kind: Any) -> None:
    async def script(call: Call) -> None:
        if (await call.request()).endswith("/lines"):
            await call.send(CHUNKED + chunk(b'{"a":1}\n'))
            assert await call.closed()
        else:
            await call.reply("1")
            await call.closed()

    async with client_of(kind, script) as (client, server):
        async with client.stream(FollowLines()) as lines:
            assert await anext(lines) == Line(1)
            assert await client.send(Get()) == 1
        await server.ended.wait()


async def test_parts_may_be_far_apart_and_the_head_may_not(kind: Any) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if call.number == 1:
            await call.request()
            await call.closed()
        else:
            await call.request()
            await call.send(CHUNKED)
            await go_on.wait()
            await call.send(chunk(b'{"a":1}\n') + b"0\r\n\r\n")

    async with client_of(kind, script) as (client, _):
        with pytest.raises(Unreachable, match=r"within 0\.1 s"):
            async with client.stream(FollowLines(), timeout_s=0.1):
                pass
        async with client.stream(FollowLines(), timeout_s=0.1) as lines:
            asyncio.get_running_loop().call_later(0.3, go_on.set)
            assert [line async for line in lines] == [Line(1)]


async def test_a_server_that_falls_silent_counts_as_gone_where_the_call_says_so(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(CHUNKED + chunk(b"one"))
        assert await call.closed()

    async with client_of(kind, script) as (client, _):
        with pytest.raises(Unreachable, match="broke off"):
            await client.all_of(FollowBytes())


async def test_a_refusal_is_raised_before_the_first_part(kind: Any) -> None:
    async with client_of(kind, says('{"error": "no such machine"}', "404 Not Found")) as (client, _):
        with pytest.raises(ApiError, match="no such machine"):
            await client.all_of(FollowLines())


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (CHUNKED + chunk(b'{"a":1}\n'), "broke off"),
        (CHUNKED + chunk(b'{"a":1}\n') + b"5\r\ntw", "broke off"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"a":1}\ntw', "broke off"),
        (CHUNKED + chunk(b'{"a":1}\n') + chunk(b"x" * (LINE_BYTES_MAX + 1)), "a line of more than"),
    ],
)
async def test_a_stream_that_breaks_off_gives_what_came_and_then_raises(kind: Any, raw: bytes, word: str) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)

    async with client_of(kind, script) as (client, _), client.stream(FollowLines()) as lines:
        assert await anext(lines) == Line(1)
        with pytest.raises(Unreachable, match=word):
            await anext(lines)


async def test_a_stream_without_a_length_ends_with_the_connection(kind: Any) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b'HTTP/1.1 200 OK\r\n\r\n{"a":1}\n{"a":2}\n')

    async with client_of(kind, script) as (client, _):
        assert await client.all_of(FollowLines()) == [Line(1), Line(2)]


async def test_a_reader_that_waits_is_woken_from_another_thread() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(CHUNKED + chunk(b'{"a":1}\n'))
        await call.closed()

    async with serving(script) as server:
        with Client(f"http://127.0.0.1:{server.port}", "t") as client:
            stream = await asyncio.to_thread(client.stream, FollowLines())
            assert await asyncio.to_thread(next, stream) == Line(1)
            waiting = asyncio.create_task(asyncio.to_thread(list, stream))
            stream.wake()
            with pytest.raises(Unreachable, match="broke off"):
                await waiting

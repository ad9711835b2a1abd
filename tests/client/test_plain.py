"""The plain client over real sockets: what a program gets, and what it is told when something is wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.client.servers import LIMIT_S, Call, Script, Server, chunk, serving

from hawker.client.lines import LINE_BYTES_MAX
from hawker.client.plain import ApiError, Transport, path_of
from hawker.errors import Invalid, Unreachable


@asynccontextmanager
async def client_of(script: Script, suffix: str = "", **options: Any) -> AsyncIterator[tuple[Transport, Server]]:
    """A client in this thread's place: its calls block, so tests make them through `asyncio.to_thread`."""
    async with serving(script) as server:
        options = {"timeout_s": LIMIT_S, **options}
        with Transport(f"http://127.0.0.1:{server.port}{suffix}", "t", **options) as client:
            yield client, server


def says(body: str, status: str = "200 OK", headers: str = "") -> Script:
    """A server that answers every request alike."""

    async def script(call: Call) -> None:
        while await call.request():
            await call.reply(body, status, headers)

    return script


async def error_of(script: Script, method: str = "GET") -> ApiError:
    async with client_of(script) as (client, _):
        with pytest.raises(ApiError) as caught:
            await asyncio.to_thread(client.call, method, "/v1/x")
    return caught.value


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_sends_json_and_gives_decoded_json() -> None:
    async with client_of(says('{"a": [1, null]}'), user_agent="test/1") as (client, server):
        answer = await asyncio.to_thread(
            client.post, "/v1/x", json={"é": 1}, query={"b": True, "n": None, "l": ["1", "2"]}, headers={"x-y": "z"}
        )
    assert answer == {"a": [1, None]}
    assert server.requests == ["POST /v1/x?b=true&l=1&l=2"]
    assert server.bodies == ['{"é":1}'.encode()]
    for header in ("authorization: Bearer t", "user-agent: test/1", "content-type: application/json", "x-y: z"):
        assert f"\r\n{header}\r\n" in server.heads[0]


async def test_the_headers_of_the_last_answer_are_kept_also_of_an_error() -> None:
    async with client_of(says("{}", headers="Server-Timing: total;dur=1.5\r\n")) as (client, _):
        assert client.answer_headers == {}
        await asyncio.to_thread(client.get, "/v1/x")
        assert client.answer_headers["server-timing"] == "total;dur=1.5"
    async with client_of(says("{}", "500 Oh", "x-y: z\r\n")) as (client, _):
        with pytest.raises(ApiError):
            await asyncio.to_thread(client.get, "/v1/x")
        assert client.answer_headers["x-y"] == "z"


@pytest.mark.parametrize("method", ["get", "post", "put", "patch", "delete"])
async def test_each_method_has_its_name_and_an_empty_answer_is_none(method: str) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        await call.closed()

    async with client_of(script) as (client, server):
        assert await asyncio.to_thread(getattr(client, method), "/v1/x") is None
    assert server.requests == [f"{method.upper()} /v1/x"]


@pytest.mark.parametrize(
    ("token", "header"),
    [("abc", "Bearer abc"), ("fm2_abc,fm2_d", "FlyV1 fm2_abc,fm2_d"), ("FlyV1 x", "FlyV1 x"), ("Bearer x", "Bearer x")],
)
async def test_a_token_goes_out_under_its_scheme(token: str, header: str) -> None:
    async with serving(says("1")) as server:
        with Transport(f"http://127.0.0.1:{server.port}", token, timeout_s=LIMIT_S) as client:
            assert await asyncio.to_thread(client.get, "/v1/x") == 1
    assert f"\r\nauthorization: {header}\r\n" in server.heads[0]


@pytest.mark.parametrize(("suffix", "target"), [("/", "/v1/x"), ("/v1", "/v1/x"), ("/market/v1/", "/market/v1/x")])
async def test_an_endpoint_may_be_written_with_or_without_the_version(suffix: str, target: str) -> None:
    async with client_of(says("1"), suffix) as (client, server):
        await asyncio.to_thread(client.get, "/v1/x")
    assert server.requests == [f"GET {target}"]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4280", "ftp://x", "http://", "http://x:port", "http://u:p@x", ""])
def test_what_is_no_endpoint_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(Invalid, match="endpoint"):
        Transport(endpoint, "t")


@pytest.mark.parametrize("token", ["", "a\r\nb: c", "é"])
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(Invalid, match="token") as caught:
        Transport("http://x", token)
    assert not token or token not in str(caught.value.details)


def test_a_part_of_a_path_stays_one_part() -> None:
    assert path_of("apps", "../a b/c?d#e%") == "/v1/apps/..%2Fa%20b%2Fc%3Fd%23e%25"


# --- connections -----------------------------------------------------------------------------------------------------


async def test_calls_share_a_connection() -> None:
    async with client_of(says("1")) as (client, server):
        for _ in range(5):
            await asyncio.to_thread(client.post, "/v1/x", json={})
        assert server.accepted == 1


async def test_a_connection_that_the_server_closed_in_between_is_replaced_without_a_word() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.reply("1")

    async with client_of(script) as (client, server):
        for n in range(3):
            server.ended.clear()
            assert await asyncio.to_thread(client.post, f"/v1/{n}") == 1
            await server.ended.wait()  # closed, also as far as this machine is concerned
    assert server.requests == ["POST /v1/0", "POST /v1/1", "POST /v1/2"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_connection_that_closes_as_it_is_used_again_repeats_a_get_only(method: str) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.reply("1")
        await call.request()

    async with client_of(script) as (client, server):
        await asyncio.to_thread(client.get, "/v1/first")
        if method == "GET":
            assert await asyncio.to_thread(client.call, method, "/v1/x") == 1
        else:
            with pytest.raises(Unreachable, match="closed the connection"):
                await asyncio.to_thread(client.call, method, "/v1/x")
    assert server.requests == ["GET /v1/first", *[f"{method} /v1/x"] * (2 if method == "GET" else 1)]


async def test_a_new_connection_that_closes_is_not_tried_again() -> None:
    async def script(call: Call) -> None:
        await call.request()

    async with client_of(script) as (client, server):
        with pytest.raises(Unreachable, match="closed the connection before it answered GET /v1/x"):
            await asyncio.to_thread(client.get, "/v1/x")
    assert server.requests == ["GET /v1/x"]


async def test_after_an_answer_that_came_too_late_the_next_call_gets_its_own() -> None:
    async def script(call: Call) -> None:
        if (request := await call.request()) == "GET /v1/slow":
            await call.closed()
        await call.reply(f'"{request}"')
        await call.closed()

    async with client_of(script) as (client, _):
        with pytest.raises(Unreachable, match=r"within 0\.05 s"):
            await asyncio.to_thread(client.get, "/v1/slow", timeout_s=0.05)
        assert await asyncio.to_thread(client.get, "/v1/next") == "GET /v1/next"


def test_a_market_that_is_not_up_is_told_with_the_way_to_start_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="takes no connections") as caught:
            Transport(f"http://127.0.0.1:{free.getsockname()[1]}", "t").get("/v1/x")
    assert "hawker dev" in caught.value.hint


async def test_a_server_without_tls_is_told_from_one_that_is_down() -> None:
    async def script(call: Call) -> None:
        await call.reader.read(100)
        await call.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(script) as server:
        client = Transport(f"https://127.0.0.1:{server.port}", "t", timeout_s=LIMIT_S)
        with pytest.raises(Unreachable, match="cannot be reached"):
            await asyncio.to_thread(client.get, "/v1/x")


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_an_error_of_the_api_keeps_everything_it_says() -> None:
    body = '{"error": "no room", "status": "insufficient_capacity", "details": {"refusals": [1], "hint": "try fra"}}'
    error = await error_of(says(body, "409 Conflict", "fly-request-id: 01J-mad\r\n"), "POST")
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
async def test_an_error_in_any_form_has_a_sentence(body: str, message: str) -> None:
    error = await error_of(says(body, "404 Not Found"))
    assert (error.message, error.status_code) == (message, 404)


async def test_after_an_error_the_connection_is_used_on() -> None:
    async with client_of(says('{"error": "no"}', "404 Not Found")) as (client, server):
        for _ in range(3):
            with pytest.raises(ApiError):
                await asyncio.to_thread(client.get, "/v1/x")
        assert server.accepted == 1


async def test_an_answer_that_is_not_json_is_not_taken_for_one() -> None:
    async with client_of(says("<html>")) as (client, _):
        with pytest.raises(Unreachable, match="not JSON") as caught:
            await asyncio.to_thread(client.get, "/v1/x")
    assert "market" in caught.value.hint


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
async def test_a_broken_answer_is_never_taken_for_a_whole_one(raw: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)

    async with client_of(script) as (client, _):
        with pytest.raises(Unreachable, match="/v1/x"):
            await asyncio.to_thread(client.get, "/v1/x")


async def test_an_answer_without_a_length_is_read_to_its_end() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\n[1,")
        await call.send(b"2]")

    async with client_of(script) as (client, _):
        assert await asyncio.to_thread(client.get, "/v1/x") == [1, 2]
        assert await asyncio.to_thread(client.get, "/v1/x") == [1, 2]


# --- lines -----------------------------------------------------------------------------------------------------------

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_lines_come_as_they_are_sent_whatever_their_pieces() -> None:
    read = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(CHUNKED + chunk(b'{"a":') + chunk(b"1}\n\n") + chunk(b"second\nthi"))
        for _ in range(3):
            await read.acquire()
        await call.send(chunk(b"rd\nlast") + b"0\r\n\r\n")

    async with client_of(script) as (client, server):
        lines = await asyncio.to_thread(client.lines, "/v1/logs", query={"follow": True})
        seen = []
        for _ in range(5):
            seen.append(await asyncio.to_thread(next, lines))
            read.release()
        assert seen == [b'{"a":1}', b"", b"second", b"third", b"last"]
        assert await asyncio.to_thread(list, lines) == []
    assert server.requests == ["GET /v1/logs?follow=true"]


async def test_lines_have_a_connection_of_their_own_and_closing_ends_it() -> None:
    async def script(call: Call) -> None:
        if (await call.request()).endswith("/logs"):
            await call.send(CHUNKED + chunk(b"one\n"))
            assert await call.closed()
        else:
            await call.reply("1")
            await call.closed()

    async with client_of(script) as (client, server):
        with await asyncio.to_thread(client.lines, "/v1/logs") as lines:
            assert await asyncio.to_thread(next, lines) == b"one"
            assert await asyncio.to_thread(client.get, "/v1/x") == 1
        await server.ended.wait()
        with pytest.raises(StopIteration):
            next(lines)


@pytest.mark.slow
async def test_lines_may_be_far_apart_and_the_head_may_not() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if (await call.request()).endswith("/head"):
            await call.closed()
        else:
            await call.send(CHUNKED)
            await go_on.wait()
            await call.send(chunk(b"late\n") + b"0\r\n\r\n")

    async with client_of(script, timeout_s=2.0) as (client, _):
        with pytest.raises(Unreachable, match=r"within 0\.1 s"):
            await asyncio.to_thread(client.lines, "/v1/head", timeout_s=0.1)
        lines = await asyncio.to_thread(client.lines, "/v1/logs")
        asyncio.get_running_loop().call_later(2.4, go_on.set)
        assert await asyncio.to_thread(list, lines) == [b"late"]


async def test_an_error_is_raised_before_the_first_line() -> None:
    async with client_of(says('{"error": "no such machine"}', "404 Not Found")) as (client, _):
        with pytest.raises(ApiError, match="no such machine"):
            await asyncio.to_thread(client.lines, "/v1/logs")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (CHUNKED + chunk(b"one\n"), "broke off"),
        (CHUNKED + chunk(b"one\n") + b"5\r\ntw", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\none\ntw", "broke off 4 bytes before its end"),
        (CHUNKED + chunk(b"one\n") + chunk(b"x" * (LINE_BYTES_MAX + 1)), "a line of more than"),
    ],
)
async def test_lines_that_break_off_give_what_came_and_then_raise(raw: bytes, word: str) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)

    async with client_of(script) as (client, _):
        lines = await asyncio.to_thread(client.lines, "/v1/logs")
        assert await asyncio.to_thread(next, lines) == b"one"
        with pytest.raises(Unreachable, match=word):
            await asyncio.to_thread(next, lines)


async def test_lines_without_a_length_end_with_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\none\ntwo\n")

    async with client_of(script) as (client, _):
        lines = await asyncio.to_thread(client.lines, "/v1/logs")
        assert await asyncio.to_thread(list, lines) == [b"one", b"two"]

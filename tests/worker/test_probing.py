"""One look of a health check at a real server on loopback: what passes, what does not, and what is said about it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.markets import free_port
from tests.kit.registry import write_tls

from hawker.core.checking import Outcome
from hawker.model.checks import Check
from hawker.worker.machine.inside.probing import (
    NOWHERE,
    OUTPUT_MOST,
    RECEIVED_MOST,
    SUCCESS,
    probe,
    request_of,
    short,
    tls_context,
)

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def http(port: int = 1, **fields: Any) -> Check:
    return Check(name="up", kind="service", type="http", port=port, **{"timeout_s": 5.0, **fields})


@asynccontextmanager
async def answering(
    *parts: bytes, asked: bool = True, stay: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server that says these bytes to whoever asks, or to everybody, then closes, or stays."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if asked:
                await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
            if stay:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def looked(check: Check, *parts: bytes, **options: Any) -> Outcome:
    async with answering(*parts, **options) as port:
        outcome, address = await probe(check, [("127.0.0.1", port)])
        assert address == ("127.0.0.1", port)
        return outcome


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", Outcome(True, "yes")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Outcome(True, "204 No Content")),
        (b"HTTP/1.0 200 OK\r\n\r\nold", Outcome(True, "old")),
        (b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", Outcome(True, "200 OK")),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n", Outcome(True, "ab")),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nno database\n",
         Outcome(False, "503 Service Unavailable: no database")),
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\ncontent-length: 0\r\n\r\n",
         Outcome(False, "302 Found, a redirect to /login")),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
         Outcome(False, "101 Switching Protocols")),
        (b"HTTP/1.1 299 Fine\r\ncontent-length: 0\r\n\r\n", Outcome(True, "299")),
        (b"", Outcome(False, "it closed the connection without an answer")),
        (b"HTTP/1.1 200", Outcome(False, "it closed the connection without an answer")),
    ],
)  # fmt: skip
async def test_200_to_299_is_good_and_nothing_else(answer: bytes, outcome: Outcome) -> None:
    assert await looked(http(), answer) == outcome


async def test_what_is_no_http_is_said() -> None:
    outcome = await looked(http(), b"SSH-2.0-OpenSSH_9.2\r\n")
    assert not outcome.good
    assert outcome.output.startswith("the answer is no HTTP/1.1: ")


async def test_a_body_that_never_ends_is_no_failure_and_headers_that_never_end_are() -> None:
    endless = [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 65536] * 16]
    outcome = await looked(http(), *endless, stay=True)
    assert outcome.good
    assert len(outcome.output) == OUTPUT_MOST
    quiet = await looked(http(timeout_s=0.2), b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", stay=True)
    assert quiet == Outcome(True, "half")
    headers = await looked(http(), b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 65536] * 4, stay=True)
    assert headers == Outcome(False, f"the first {RECEIVED_MOST} bytes of the answer have no end of headers")


async def test_no_answer_in_time_is_a_failure() -> None:
    assert await looked(http(timeout_s=0.1), stay=True) == Outcome(False, "no answer within 100ms")


async def test_an_answer_to_head_ends_with_its_headers() -> None:
    outcome = await looked(http(method="HEAD"), b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", stay=True)
    assert outcome == Outcome(True, "200 OK")


async def test_nobody_there_is_a_failure_and_a_connection_alone_is_enough_for_tcp() -> None:
    tcp = Check(name="up", kind="service", type="tcp", port=1)
    nobody = ("127.0.0.1", free_port())
    assert await probe(tcp, [nobody]) == (Outcome(False, "connect: connection refused"), None)
    assert await probe(http(), [nobody]) == (Outcome(False, "connect: connection refused"), None)
    assert await probe(tcp, []) == (Outcome(False, NOWHERE), None)
    async with answering() as port:
        assert await probe(tcp, [("127.0.0.1", port)]) == (Outcome(True, SUCCESS), ("127.0.0.1", port))


async def test_the_next_address_is_tried_where_nobody_listens() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n") as port:
        addresses = [("127.0.0.1", free_port()), ("127.0.0.1", port)]
        assert await probe(http(), addresses) == (Outcome(True, "200 OK"), addresses[1])


def test_the_request_has_the_configurations_headers_in_the_place_of_ours() -> None:
    plain = request_of(http(path="/up?a=b"), ("fdaa::1", 8080)).decode().split("\r\n")
    assert plain[:2] == ["GET /up?a=b HTTP/1.1", "Host: [fdaa::1]:8080"]
    check = http(
        method="POST", headers=(("host", "app.example"), ("X-Forwarded-Proto", "https"), ("X-Forwarded-Proto", "b"))
    )
    lines = request_of(check, ("127.0.0.1", 80)).decode().split("\r\n")
    assert [line for line in lines if line.lower().startswith("host")] == ["host: app.example"]
    assert [line for line in lines if line.startswith("X-F")] == ["X-Forwarded-Proto: https", "X-Forwarded-Proto: b"]
    assert "Content-Length: 0" in lines
    assert lines[-3:] == ["Connection: close", "", ""]


@given(st.text(max_size=2000))
def test_what_is_kept_of_an_answer_is_one_short_printable_line(text: str) -> None:
    kept = short(text)
    assert len(kept) <= OUTPUT_MOST
    assert kept.isprintable()


async def test_a_certificate_is_verified_unless_the_check_says_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_tls(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["certificate"], files["key"])
    answer, good = b"HTTP/1.1 200 OK\r\n\r\n", Outcome(True, "200 OK")
    assert await looked(http(tls=True), answer, tls=tls) == Outcome(False, "tls: self-signed certificate")
    assert await looked(http(tls=True, tls_verify=False), answer, tls=tls) == good
    monkeypatch.setenv("SSL_CERT_FILE", files["certificate"])  # the system's authorities, from now on
    tls_context.cache_clear()
    try:
        assert await looked(http(tls=True), answer, tls=tls) == good
        named = await looked(http(tls=True, tls_server_name="app.example"), answer, tls=tls)
        assert not named.good
        assert "app.example" in named.output
    finally:
        tls_context.cache_clear()


async def test_a_server_without_tls_is_told_from_one_that_has_it() -> None:
    outcome = await looked(http(tls=True), b"hello\r\n", asked=False)
    assert not outcome.good
    assert outcome.output.startswith("tls: ")

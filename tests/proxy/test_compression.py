"""Answers compressed on their way, where a public port's `compress` asks for it."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from tests.kit.raw_http import Behaviour, Visit, chunked, head, saying
from tests.proxy.conftest import Stage

TEXT = b"the same words again and again, " * 100
ASKED = "GET / | Accept-Encoding: br;q=1.0, gzip;q=0.8"


def text(*fields: str, kind: str = "text/html; charset=utf-8", body: bytes = TEXT, status: str = "200 OK") -> Behaviour:
    async def behaviour(visit: Visit) -> None:
        await visit.read()
        await visit.answer(b"" if visit.method == "HEAD" else body, status, f"Content-Type: {kind}", *fields)

    return behaviour


async def test_text_is_compressed_for_those_who_take_it(stage: Stage) -> None:
    stage.serves(compress=True)
    machine = await stage.machine(text('ETag: "a"', "Vary: Cookie"))
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask(ASKED)
        assert gzip.decompress(answer.body) == TEXT
        assert len(answer.body) < len(TEXT) / 10
        assert (answer["content-encoding"], answer["vary"], answer["etag"]) == (
            "gzip",
            "Cookie, accept-encoding",
            'W/"a"',
        )
        assert answer.all("content-length") == []
    assert machine.visits[0]["accept-encoding"] == "br;q=1.0, gzip;q=0.8"


async def test_chunked_text_is_compressed_and_comes_as_it_is_sent(stage: Stage) -> None:
    stage.serves(compress=True)
    go = asyncio.Event()

    async def slowly(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await visit.send(b"5\r\nfirst\r\n")
        await go.wait()
        await visit.send(b"6\r\nsecond\r\n0\r\n\r\n")

    await stage.machine(slowly)
    user = await stage.user()
    await user.send(head(ASKED))
    await user.head()
    inflate = zlib.decompressobj(wbits=31)
    got = b""
    while got != b"first":
        piece = await user.piece()
        assert isinstance(piece, bytes)
        got += inflate.decompress(piece)
    go.set()
    while isinstance(piece := await user.piece(), bytes):
        got += inflate.decompress(piece)
    assert got == b"firstsecond"


async def test_nothing_is_compressed_where_the_port_does_not_say_so(stage: Stage) -> None:
    await stage.machine(text())
    assert (await stage.ask(ASKED)).body == TEXT


LEFT: dict[str, tuple[str, Behaviour]] = {
    "not asked for": ("GET /", text()),
    "asked for with no weight": ("GET / | Accept-Encoding: br, gzip; q=0.000", text()),
    "compressed already": (ASKED, text("Content-Encoding: br")),
    "not to be changed": (ASKED, text("Cache-Control: public, No-Transform")),
    "a picture": (ASKED, text(kind="image/png")),
    "events": (
        ASKED,
        saying(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(TEXT)
        ),
    ),
    "short": (ASKED, text(body=TEXT[:500])),
    "a part": (ASKED, text("Content-Range: bytes 0-3199/9999", status="206 Partial Content")),
    "without a body": (ASKED.replace("GET", "HEAD"), text()),
}


@pytest.mark.parametrize("case", LEFT)
async def test_an_answer_that_does_not_gain_or_must_not_is_left_as_it_is(stage: Stage, case: str) -> None:
    stage.serves(compress=True)
    asked, behaviour = LEFT[case]
    await stage.machine(behaviour)
    answer = await stage.ask(asked)
    assert answer.all("content-encoding") in ([], ["br"])
    assert answer.body in (TEXT, TEXT[:500], b"")

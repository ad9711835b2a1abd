"""What a machine says before, or instead of, its answer has an end."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.http2 import Upstream2, Visit2
from tests.kit.raw_http import Visit
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

# HAProxy bounds by its own buffers what it reads first.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

HINTS = {"many": (100, 10), "large": (3, 15_000)}
"""How many, and of how many bytes."""


@pytest.mark.parametrize("case", HINTS)
@pytest.mark.parametrize("version", [1, 2])
async def test_interim_answers_have_an_end(stage: Stage, case: str, version: int) -> None:
    """They are passed on whether or not the user takes them."""
    count, size = HINTS[case]

    async def hinting(visit: Visit) -> None:
        await visit.read()
        for _ in range(count):
            await visit.send(b"HTTP/1.1 103 Early Hints\r\nLink: %b\r\n\r\n" % (b"x" * size))
        await visit.answer(b"never")

    async def hinting2(visit: Visit2) -> None:
        for _ in range(count):
            await visit.head(103, (b"link", b"x" * size))
        await visit.head(200, ended=True)

    upstream = Upstream2(hinting2)
    if version == 1:
        await stage.machine(hinting)
    else:
        stage.serves(h2_backend=True)
        await upstream.open()
        stage.web.machines.append(FakeMachine("m1", upstream.address))
    answer = await stage.ask("GET /")
    assert (answer.status, b"1xx" in answer.body) == (502, True)
    assert sum(len(value) for _, fields in answer.interim for _, value in fields) < 40_000
    await stage.close()
    if version == 2:
        await upstream.close()


async def test_a_replay_without_an_end_is_read_to_a_limit(stage: Stage) -> None:
    ended = asyncio.Event()

    async def endless(visit: Visit) -> None:
        await visit.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.fly.replay+json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            while True:
                await visit.send(b"1000\r\n" + b" " * 4096 + b"\r\n")
        finally:
            ended.set()

    await stage.machine(endless)
    answer = await stage.ask("GET /")
    assert (answer.status, b"PA03" in answer.body) == (502, True)
    await until(ended.is_set)
    assert stage.web.machines[0].in_flight == 0

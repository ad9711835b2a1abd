"""Users who say no more, and still listen: all that they have asked is answered."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.raw_http import LIMIT_S, Broken, User, Visit, chunked, head, silent
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

# To HAProxy a user who says no more has left.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

POST = head("POST / | Content-Length: 5") + b"hello"
CHUNKED = head("POST / | Transfer-Encoding: chunked") + chunked(b"hel", b"lo")


async def said(visit: Visit) -> None:
    await visit.answer(await visit.read() + visit.target.encode())


async def bodies(user: User, count: int) -> list[bytes]:
    return [(await user.answer()).body for _ in range(count)]


@pytest.mark.parametrize("waits", [True, False], ids=["held", "at once"])
async def test_what_was_asked_ahead_is_answered_after_the_end(stage: Stage, waits: bool) -> None:
    await stage.machine(said, awake=not waits)
    user = await stage.user()
    await user.send(head("GET /a") + POST + CHUNKED + head("GET /b") + head("GET /b") + b"\r\n")
    user.end()
    if waits:
        await until(lambda: stage.web.machines[0].waiting == 1)
        stage.web.machines[0].awake.set()
    assert await bodies(user, 5) == [b"/a", b"hello/", b"hello/", b"/b", b"/b"]
    assert await user.ended() == "closed"


@pytest.mark.parametrize("rest", [b"GET / HT", POST[:-1], CHUNKED[:-1], b"\r\n", b"GE\x00"])
async def test_what_was_not_said_to_its_end_is_not_waited_for(stage: Stage, rest: bytes) -> None:
    machine = await stage.machine(said)
    user = await stage.user()
    await user.send(head("GET /a") + head("GET /b") + rest)
    user.end()
    assert await bodies(user, 2) == [b"/a", b"/b"]
    await asyncio.wait_for(user.reader.read(), LIMIT_S)
    assert not any(visit.complete for visit in machine.visits[2:])
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_much_that_was_asked_ahead_is_answered_to_who_takes_it_slowly(stage: Stage) -> None:
    """More than the proxy keeps of answers and of requests: it goes on when the user takes some."""
    stage.settings["window_bytes"] = 4096

    async def long(visit: Visit) -> None:
        await visit.answer(b"x" * 300_000)

    await stage.machine(long)
    user = await stage.user()
    transport = user.writer.transport
    transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
    asked = 50
    await user.send((head("GET / | X-A: " + "b" * 400)) * asked)
    user.end()
    await until(lambda: stage.web.machines[0].taken > 0)
    transport.resume_reading()  # type: ignore[attr-defined]
    for body in await bodies(user, asked):
        assert len(body) == 300_000
    assert await user.ended() == "closed"


async def test_answers_that_do_not_come_soon_are_not_waited_for(stage: Stage) -> None:
    stage.settings["half_closed_s"] = 0.2
    await stage.machine(silent)
    user = await stage.user()
    await user.send(POST + POST)
    user.end()
    with pytest.raises(Broken):
        await user.answer()
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_an_upgrade_is_told_the_end_that_came_before_it(stage: Stage) -> None:
    heard = asyncio.Event()

    async def switching(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        visit.complete = True
        assert await visit.reader.read() == b"early"
        heard.set()
        await visit.send(b"bye")
        visit.close()

    await stage.machine(switching, awake=False)
    user = await stage.user()
    await user.send(head("GET / | Connection: Upgrade | Upgrade: x") + b"early")
    user.end()
    await until(lambda: stage.web.machines[0].waiting == 1)
    stage.web.machines[0].awake.set()
    assert (await user.head(upgrade=True)).status == 101
    await asyncio.wait_for(heard.wait(), LIMIT_S)
    assert await user.bytes(3) == b"bye"
    assert await user.ended() == "closed"

"""Trailers: taken as heads are, up to the same limits, and refused for the same names."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes
from tests.kit.http2 import Upstream2, User2, Visit2
from tests.kit.raw_http import Broken, chunked, echo, head, saying
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

# What HAProxy reads first it bounds by its own buffers.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

POST = head("POST / | Transfer-Encoding: chunked")
ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = bytes(1 << 20)
TOO_MUCH = {
    "many": b"".join(b"x-%d: y\r\n" % number for number in range(200)),
    "long": b"x-a: " + b"y" * 40_000 + b"\r\n",
    "longest": b"x-a: " + b"y" * 2_000_000 + b"\r\n",
    "all together": b"".join(b"x-%d: %b\r\n" % (number, b"y" * 1000) for number in range(50)),
}
NOT_THERE = [b"fly_region", b"hawker_app", b"transfer_encoding", b"content_length", b"x_forwarded_for", b"a(b"]


async def test_trailers_pass_up_to_what_a_head_may_have(stage: Stage) -> None:
    """However little there is of the body itself, and however they come."""
    trailers = [(b"x-%d" % number, b"y" * 230) for number in range(128)]
    wire = chunked(b"z", trailers=b"".join(b"%b: %b\r\n" % field for field in trailers))
    machine = await stage.machine(saying(ANSWER + wire))
    user = await stage.user()
    assert (await user.ask("POST / | Transfer-Encoding: chunked", wire)).trailers == trailers
    await user.send(POST)
    for at in range(0, len(wire), 1111):
        await user.send(wire[at : at + 1111])
        await asyncio.sleep(0)
    assert (await user.answer("POST")).trailers == trailers
    assert [visit.trailers for visit in machine.visits] == [trailers, trailers]


@pytest.mark.parametrize("much", TOO_MUCH)
async def test_a_large_body_wins_its_trailers_no_room(stage: Stage, much: str) -> None:
    machine = await stage.machine(echo)
    user = await stage.user()
    sending = asyncio.create_task(user.send(POST + chunked(LARGE, trailers=TOO_MUCH[much])))
    answer = await user.answer("POST")
    assert (answer.status, answer["connection"]) == (400, "close")
    assert not any(visit.complete for visit in machine.visits)
    await until(lambda: stage.web.machines[0].in_flight == 0)
    user.reset()
    await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("much", TOO_MUCH)
async def test_a_machine_has_no_more_room_for_them(stage: Stage, much: str) -> None:
    await stage.machine(saying(ANSWER + chunked(LARGE, trailers=TOO_MUCH[much])))
    with pytest.raises(Broken):
        await stage.ask("GET /")


@pytest.mark.parametrize("name", NOT_THERE)
async def test_a_name_that_no_head_may_have_is_no_trailers(stage: Stage, name: bytes) -> None:
    """Neither a user's nor a machine's: an app that reads `_` as `-` would take it for what a proxy says."""
    trailers = name + b": x\r\n"
    machine = await stage.machine(echo)
    answer = await stage.ask("POST / | Transfer-Encoding: chunked", chunked(b"y", trailers=trailers))
    assert (answer.status, answer["connection"]) == (400, "close")
    assert not any(visit.complete for visit in machine.visits)
    stage.web.machines.clear()
    await stage.machine(saying(ANSWER + chunked(b"y", trailers=trailers)))
    with pytest.raises(Broken):
        await stage.ask("GET /")


async def test_what_can_be_taken_for_a_trailer_that_is_left_out_is_left_out(stage: Stage) -> None:
    trailers = b"Cache_Control: no-store\r\nSet_Cookie: a=b\r\nX_Sum: 1\r\nProxy_Status: x\r\n"
    machine = await stage.machine(saying(ANSWER + chunked(b"x", trailers=trailers)))
    answer = await stage.ask("POST / | Transfer-Encoding: chunked", chunked(b"y", trailers=trailers))
    assert answer.trailers == machine.visits[0].trailers == [(b"x_sum", b"1")]


async def test_a_user_of_http2_has_no_more_room_for_them(stage: Stage) -> None:
    await stage.machine(echo)
    user = await User2.at((await stage.open()).http)
    stream = await user.begin("POST /", ended=False)
    await user.body(stream, b"body", trailers=[(b"x-%d" % number, b"y") for number in range(200)])
    await user.until(lambda: user.answers[stream].reset == ErrorCodes.PROTOCOL_ERROR)
    assert (await user.ask("GET /")).status == 200
    await user.close()


@pytest.mark.parametrize(
    "trailers",
    [[(b"x-%d" % number, b"y") for number in range(200)], [(b"fly_region", b"x")], [(b"a", b"b\x01")]],
    ids=["many", "a name", "a value"],
)
async def test_a_machine_of_http2_is_read_as_strictly(stage: Stage, trailers: list[tuple[bytes, bytes]]) -> None:
    async def trailing(visit: Visit2) -> None:
        await visit.head(200)
        await visit.send(b"x")
        await visit.end(*trailers)

    stage.serves(h2_backend=True)
    upstream = Upstream2(trailing)
    await upstream.open()
    stage.web.machines.append(FakeMachine("m1", upstream.address))
    with pytest.raises(Broken):
        await stage.ask("GET /")
    await stage.close()
    await upstream.close()

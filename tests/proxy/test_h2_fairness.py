"""HTTP/2 among many: nobody who takes little stops the others, nor keeps a place by it."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import (
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from tests.kit.http2 import Visit2, hello2
from tests.kit.raw_http import LIMIT_S, Visit, hello, silent
from tests.kit.waiting import until
from tests.proxy.conftest import Add, Connect, Stage

# HAProxy's own HTTP/2 is not ours to test; where it hands on, it is to this plane.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)


async def test_many_slow_readers_stop_nobody_else_at_their_machine(
    stage: Stage, connect: Connect, h2_machine: Add
) -> None:
    """Their answers share one connection to it, and may together be held up with far more than its first window."""

    async def long(visit: Visit2) -> None:
        if visit[":path"] == "/small":
            await hello2(visit)
        else:
            await visit.head()
            await visit.send(b"x" * 1_000_000, ended=True)

    upstream = await h2_machine(long)
    slow = [(user, await user.begin("GET /")) for user in [await connect(eager=False) for _ in range(12)]]
    other = await connect()
    await until(lambda: len(upstream.visits) == 12)
    h2 = upstream.visits[0]._link.h2
    await until(lambda: not any(h2.local_flow_control_window(visit.stream) for visit in upstream.visits))
    for _ in range(3):
        assert (await other.ask("GET /small")).body == b"hello"
    assert upstream.connections == 1
    for user, stream in slow:
        user.eager = True
        user.h2.increment_flow_control_window(1 << 24)
        user.h2.increment_flow_control_window(1 << 24, stream)
        await user.send()
    for user, stream in slow:
        assert len((await user.answer(stream)).body) == 1_000_000


async def test_a_user_who_takes_next_to_nothing_is_given_up(stage: Stage, connect: Connect) -> None:
    """A byte now and then is no reason to keep a place at a machine."""
    stage.settings |= {"idle_timeout_s": 0.5, "answer_least": 1e6}
    stage.serves(idle_timeout_s=0.5)

    async def long(visit: Visit) -> None:
        await visit.answer(b"x" * 1_000_000)

    await stage.machine(long)
    user = await connect(eager=False)
    user.h2.increment_flow_control_window(1 << 20)
    stream = await user.begin("GET /")
    answer = user.answers[stream]
    await user.until(lambda: len(answer.body) == 65_535 or answer.reset is not None)
    async with asyncio.timeout(LIMIT_S):
        while answer.reset is None:
            had = len(answer.body)
            user.h2.increment_flow_control_window(1, stream)
            await user.send()
            await user.until(lambda had=had: len(answer.body) > had or answer.reset is not None)  # type: ignore[misc]
    assert answer.reset == ErrorCodes.CANCEL
    await until(lambda: stage.web.machines[0].in_flight == 0)


# --- floods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        WindowUpdateFrame(0, 1),
        WindowUpdateFrame(1, 1),
        WindowUpdateFrame(3, 1),
        PingFrame(0, b"12345678", flags=["ACK"]),
        SettingsFrame(0, flags=["ACK"]),
        PriorityFrame(3),
        PriorityFrame(101),
        RstStreamFrame(3),
        GoAwayFrame(0),
        DataFrame(1, b"", flags=["PADDED"], pad_length=100),
        ExtensionFrame(0xBE, 0),
    ],
    ids=repr,
)
async def test_frames_that_ask_for_nothing_end_the_connection(stage: Stage, connect: Connect, frame: Frame) -> None:
    """Stream 1 is under way, stream 3 is over."""
    stage.settings |= {"h2_strikes": 100, "h2_strikes_per_s": 0}

    async def behaviour(visit: Visit) -> None:
        await (hello(visit) if visit.target == "/" else silent(visit))

    await stage.machine(behaviour)
    user = await connect()
    await user.begin("POST /silent", ended=False)
    assert (await user.ask("GET /")).status == 200
    await user.send(frame.serialize() * 5000)
    await user.until(lambda: user.closed)
    assert user.goodbye is not None
    assert user.goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_a_user_may_say_at_every_piece_that_it_was_taken(stage: Stage, connect: Connect) -> None:
    stage.settings |= {"h2_strikes": 5, "h2_strikes_per_s": 0}
    size = 2_000_000

    async def long(visit: Visit) -> None:
        await visit.answer(b"x" * size)

    await stage.machine(long)
    user = await connect(eager=False)
    stream = await user.begin("GET /")
    answer = user.answers[stream]
    told = 0
    while told < size:
        await user.until(lambda told=told: len(answer.body) > told or user.closed)  # type: ignore[misc]
        assert not user.closed, user.goodbye
        while told < len(answer.body):
            piece = min(1024, len(answer.body) - told)
            told += piece
            user.h2.increment_flow_control_window(piece)
            if not answer.complete:
                user.h2.increment_flow_control_window(piece, stream)
        await user.send()
    await user.answer(stream)
    assert (await user.ask("GET / | :authority: nobody.example")).status == 404

"""A proxy whose place is taken at once by another one, over the same listening sockets: nobody is turned away."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.kit.planes import Embedded
from tests.kit.raw_http import User, Visit, head, hello
from tests.kit.waiting import eventually, until
from tests.proxy.conftest import Stage
from tests.proxy.test_tunnels import ASKED, shouting

from hawker.client.deadline import within
from hawker.proxy.embedded.plane import PATIENCE_S, EmbeddedPlane

SOON_S = PATIENCE_S / 2
"""Sooner than for being silent."""


async def engine_of(stage: Stage) -> EmbeddedPlane:
    return cast(Embedded, await stage.open()).activator


async def test_a_kept_connection_has_its_next_request_answered_and_is_told_to_be_the_last(stage: Stage) -> None:
    """Its client may be sending in the very moment in which it would be closed."""
    await stage.machine()
    user = await stage.user()
    assert (await user.ask("GET /")).all("connection") == []
    retiring = asyncio.create_task((await engine_of(stage)).retire())
    await until(lambda: stage.plane.context.retiring)
    answer = await user.ask("POST / | Content-Length: 1", b"x")
    assert (answer.status, answer["connection"]) == (200, "close")
    async with within(SOON_S):
        await retiring


async def test_one_that_is_silent_is_closed_after_a_moment(stage: Stage) -> None:
    stage.settings["drain_s"] = 0.05
    await stage.machine()
    user = await stage.user()
    await user.ask("GET /")
    await (await engine_of(stage)).retire()
    assert await user.ended() == "closed"


async def test_new_connections_are_served_while_old_requests_have_their_time(stage: Stage) -> None:
    go = asyncio.Event()

    async def some_wait(visit: Visit) -> None:
        if visit.target == "/slow":
            await go.wait()
        await hello(visit)

    machine = await stage.machine(some_wait)
    slow = await stage.user()
    await slow.send(head("GET /slow"))
    await until(lambda: len(machine.visits) == 1)
    retiring = asyncio.create_task((await engine_of(stage)).retire())
    await until(lambda: stage.plane.context.retiring)
    answer = await stage.ask("GET /quick")
    assert (answer.body, answer["connection"]) == (b"hello", "close")
    assert not retiring.done()
    go.set()
    assert (await slow.answer()).body == b"hello"
    async with within(SOON_S):
        await retiring


async def test_who_was_let_in_last_is_answered_too(stage: Stage) -> None:
    """A connection was accepted, and its request is still on the way when no more are accepted."""
    await stage.machine()
    engine = await engine_of(stage)
    await engine.retire()
    late = await stage.user()
    await until(lambda: len(engine.context.connections) == 1)
    closing = asyncio.create_task(engine.close())

    async def refuses() -> bool:
        try:
            (await User.at(stage.plane.http)).reset()
        except ConnectionRefusedError:
            return True
        return False

    await eventually(refuses, "no more connections are taken")
    assert (await late.ask("GET /")).status == 200
    async with within(SOON_S):
        await closing


async def test_tunnels_have_their_time_before_and_none_after_that(stage: Stage) -> None:
    stage.settings.update(drain_s=0.05, pause_s=30.0)

    await stage.machine(shouting)
    user = await stage.user()
    await user.send(head(ASKED))
    assert (await user.head(upgrade=True)).status == 101
    engine = await engine_of(stage)
    await engine.retire()
    assert len(engine.context.tunnels) == 1
    async with within(SOON_S):
        await engine.close()

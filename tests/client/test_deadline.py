"""Time limits that do not count the time during which the loop stood still."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.kit.virtual_time import virtual_time

from hawker.client.deadline import EXTENSION_S, LATE_S, extension_s, within

WITHIN_S = 0.1


def test_a_limit_is_extended_only_if_it_is_noticed_late_and_never_by_more_than_itself() -> None:
    assert extension_s(0.0, 5.0) == extension_s(LATE_S, 5.0) == 0.0
    assert extension_s(2 * LATE_S, 5.0) == EXTENSION_S
    assert extension_s(2.0, 5.0) == 2.0
    assert extension_s(60.0, 5.0) == 5.0
    assert extension_s(60.0, WITHIN_S) == WITHIN_S


@virtual_time
async def test_what_does_not_come_in_time_is_given_up_at_the_limit() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with within(WITHIN_S):
            await asyncio.sleep(60)
    assert loop.time() == pytest.approx(WITHIN_S)


async def test_what_the_loop_finds_after_it_stood_still_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def some_turns_later(turns: int) -> None:
        if turns:
            loop.call_soon(some_turns_later, turns - 1)
        else:
            came.set_result("an answer")

    async with within(WITHIN_S):
        loop.call_soon(time.sleep, 5 * WITHIN_S)
        loop.call_soon(some_turns_later, 10)
        began = loop.time()
        assert await came == "an answer"
    assert loop.time() - began > WITHIN_S, "the limit had passed by then"


async def test_a_loop_that_is_late_each_time_gives_up_in_the_end() -> None:
    loop = asyncio.get_running_loop()
    standing: asyncio.Handle

    def stand_still() -> None:
        nonlocal standing
        time.sleep(2 * LATE_S)
        standing = loop.call_soon(stand_still)

    began = loop.time()
    standing = loop.call_soon(stand_still)
    with pytest.raises(TimeoutError):
        async with within(WITHIN_S):
            await asyncio.sleep(60)
    assert loop.time() - began >= WITHIN_S
    standing.cancel()

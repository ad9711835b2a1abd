"""Waiting for what something else brings about: looked at again and again, and a failure with its name when it does not
come in time. Three of them, as a condition is looked at without an event loop, on one, or awaited itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


async def until(condition: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    """For something that this event loop brings about, in the moment it does."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # the state of a plain object, which sets no event
            await asyncio.sleep(0.001)


async def eventually(condition: Callable[[], Awaitable[Any]], what: str, seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.01)


async def at_rest(number: Callable[[], int], seconds: float = 0.1) -> int:
    """Until a number that grows has not grown for so long: whoever makes it grow is held up. Returns it."""
    before, now = -1, number()
    while before != now:
        await asyncio.sleep(seconds)
        before, now = now, number()
    return now

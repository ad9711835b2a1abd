"""Time limits on others' answers, which do not count that the loop that waits stood still itself.

A loop that a long callback has held up, or whose process was stopped, finds the answers and the limits of that while
together. An answer takes some turns of the loop from its socket to whoever waits for it, its limit one: everybody would
be taken for silent at once. So a limit that is noticed late is put off for a while, as it is for what could not even be
asked meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_S = 0.05
"""A limit that is noticed so much later than it was: the loop stood still."""
PUT_OFF_S = 0.25
"""For so long at least, or once more for as long as it was."""
PUT_OFF_MOST = 3
"""Times in a row: one whose loop is always late must not wait for ever."""


def more_s(late_s: float, within_s: float) -> float:
    """How much longer to wait when a limit of `within_s` is noticed `late_s` after it. 0.0: no longer."""
    return min(within_s, max(late_s, PUT_OFF_S)) if late_s > LATE_S else 0.0


@asynccontextmanager
async def in_time(within_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`: raises `TimeoutError` when the answer that is waited for in it does not come in time."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + within_s
    put_off = 0
    timer: asyncio.TimerHandle

    def over() -> None:
        nonlocal limit, put_off, timer
        now = loop.time()
        more = more_s(now - limit, within_s) if put_off < PUT_OFF_MOST else 0.0
        if more:
            limit, put_off = now + more, put_off + 1
            timer = loop.call_at(limit, over)
        else:
            timeout.reschedule(now)

    timer = loop.call_at(limit, over)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        timer.cancel()

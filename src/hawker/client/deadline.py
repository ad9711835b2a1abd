"""Time limits on others' answers. The time during which our own event loop stood still does not count.

When a long callback has held up the loop, or its process was stopped, the loop finds the answers and the time limits of
that time all at once. An answer takes some turns of the loop from its socket to whoever waits for it, a time limit one:
every peer would be taken for silent at once. So a limit that is noticed late is extended. Peers need that time, too,
since the loop could not even send them its questions meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_S = 0.05
"""When a limit is noticed so much later than it was due, the loop stood still."""
EXTENSION_S = 0.25
"""A limit is extended by so long at least, and by its own length at most."""
EXTENSIONS_MOST = 3
"""How many times in a row a limit is extended: where the loop is always late, nobody must wait for ever."""


def extension_s(late_s: float, within_s: float) -> float:
    """How much longer to wait when a limit of `within_s` is noticed `late_s` too late; 0.0 is no longer."""
    return min(within_s, max(late_s, EXTENSION_S)) if late_s > LATE_S else 0.0


@asynccontextmanager
async def within(within_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`: raises `TimeoutError` when what is awaited inside takes longer."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + within_s
    extensions = 0
    timer: asyncio.TimerHandle

    def over() -> None:
        nonlocal limit, extensions, timer
        now = loop.time()
        more = extension_s(now - limit, within_s) if extensions < EXTENSIONS_MOST else 0.0
        if more:
            limit, extensions = now + more, extensions + 1
            timer = loop.call_at(limit, over)
        else:
            timeout.reschedule(now)

    timer = loop.call_at(limit, over)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        timer.cancel()

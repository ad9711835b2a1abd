"""The event loop that agents run on: uvloop's, with asyncio's clock and timers (decision 23)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import uvloop

_LEAST_S = 0.001
_SHORT_S = 0.005
_LATER_S = 0.0015


class Loop(uvloop.Loop):
    """uvloop's own clock stands still within a turn and counts whole milliseconds: too coarse to tell what a request
    waited for. Its timers are rounded to the nearest one and count from the last, so a time-out could come before its
    time, and whoever looks at the clock then would find nothing due. Waits of a few milliseconds are pauses between two
    looks; those may be shorter, but never nothing: uvloop gives what is due at once no timer with a `when()`."""

    time = staticmethod(time.monotonic)

    def call_later(  # type: ignore[override]  # this is how uvloop declares it, too
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """`call_at` comes here, too."""
        later = max(delay, _LEAST_S) if delay < _SHORT_S else delay + _LATER_S
        return super().call_later(later, callback, *args, context=context)

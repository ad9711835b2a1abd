"""Looking at the catalog again when it has changed.

    watch = Watch(replica, {"machines"}, 0.2, look)
    watch.begin()
    await watch.close()

Changes come in bursts, and one look serves them all: `look` runs a while after the first change, never twice at once,
and once more when something changed while it ran, or when a database did not let it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from hawker.catalog.view import View
from hawker.errors import StoreError
from hawker.telemetry import get_logger

AGAIN_S = 1.0
"""How long to wait after a look that a full or failing disk ended: nothing else may ever change."""


class Watch:
    """`look` first runs `delay_s` after `begin`, and runs again a while after it raised `StoreError`. It handles other
    errors itself."""

    def __init__(
        self, view: View, tables: Collection[str], delay_s: float, look: Callable[[], Awaitable[None]]
    ) -> None:
        self._view = view
        self._tables = frozenset(tables)
        self._delay_s = delay_s
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Future[None] | None = None
        self._again = False
        self._closed = False

    def begin(self) -> None:
        self._view.on_applied.append(self._changed)
        self._later()

    async def close(self) -> None:
        self._closed = True
        self._view.on_applied.remove(self._changed)
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _changed(self, tables: tuple[str, ...]) -> None:
        if not self._tables.isdisjoint(tables):
            self._later()

    def _later(self) -> None:
        if self._task is not None:
            self._again = True
        elif self._timer is None:
            self._look_in(self._delay_s)

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._task = asyncio.ensure_future(self._look())
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        self._task = None
        if self._closed:
            return
        again, self._again = self._again, False
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreError):
            _logger.warning("look.failed", tables=sorted(self._tables), error=error.message, cause="a change")
            self._look_in(max(self._delay_s, AGAIN_S))
        elif again:
            self._later()
        if error is not None and not isinstance(error, StoreError):
            raise error


_logger = get_logger()

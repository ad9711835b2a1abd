"""Looking at the catalog again when it has changed.

    watch = Watch(replica, {"machines"}, 0.2, look)
    watch.begin()
    await watch.close()

Changes come in bursts, and one look serves them all: `look` runs a while after the first change, never twice at once,
and once more when something changed while it ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from hawker.catalog.view import View


class Watch:
    """`look` handles its own errors. It first runs `delay_s` after `begin`."""

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

    def begin(self) -> None:
        self._view.on_applied.append(self._changed)
        self._later()

    async def close(self) -> None:
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
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._task = asyncio.ensure_future(self._look())
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()
            if self._again:
                self._again = False
                self._later()

"""Runs the same work once, however many ask for it. A caller that asks while it runs waits for that run. A waiter that
is cancelled leaves the others to it; when the last has left, the work is cancelled and its end waited for. All waiters
get what the work raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Run(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class Singleflight(Generic[T]):
    """Runs by key. `close` it when nothing is to be begun any more."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run[T]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    async def join(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of the run that is under way, or of a new one."""
        while (run := self._runs.get(key)) is not None and run.task.cancelling():
            await asyncio.wait([run.task])  # its last waiter left: it must be gone before the next begins
        if run is None:
            run = _Run(asyncio.get_running_loop().create_task(start(), name=f"{start.__qualname__} {key}"))
            self._runs[key] = run
            run.task.add_done_callback(lambda task: self._ended(key, task))
        run.waiting += 1
        try:
            return await asyncio.shield(run.task)
        finally:
            run.waiting -= 1
            if run.waiting == 0 and not run.task.done():
                run.task.cancel()
                await asyncio.wait([run.task])  # it undoes what is half done

    def _ended(self, key: str, task: asyncio.Task[T]) -> None:
        run = self._runs.get(key)
        if run is not None and run.task is task:
            del self._runs[key]
        if not task.cancelled():
            task.exception()  # taken note of, though its last waiter may have left

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Cancelled or not: whoever cleans up after it must not do so under a thread that still works."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # taken note of: nobody is told any more
        raise

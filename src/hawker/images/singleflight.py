"""One run of the same work, however many ask for it.

Whoever asks while it runs waits for that run. A waiter that is cancelled leaves the others to it; when the last has
left, the work is cancelled and its end waited for. What it raises, all of them get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class Singleflight(Generic[T]):
    """By key. `close` when nothing is to be begun any more."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    async def join(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of the run that is under way, or of a new one."""
        while (flight := self._flights.get(key)) is not None and flight.task.cancelling():
            await asyncio.wait([flight.task])  # its last waiter left: it must be gone before the next begins
        if flight is None:
            flight = _Flight(asyncio.get_running_loop().create_task(start(), name=f"{start.__qualname__} {key}"))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                flight.task.cancel()
                await asyncio.wait([flight.task])  # it undoes what is half done

    def _landed(self, key: str, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # taken note of, though its last waiter may have left

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        tasks = [flight.task for flight in self._flights.values()]
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

"""Collecting calls: many small requests made at the same time leave as one.

An item submitted while nothing is in flight goes out at the end of the same tick, so a lone one waits for nothing;
items that arrive while batches are in flight go together in the next. This is group commit for requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """`send` takes a list of items and gives one result for each, in order.

    At most `in_flight_max` batches of at most `batch_max` items are on their way at once. A batch that fails fails
    every item in it. A caller that is cancelled does not disturb the others.
    """

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, in_flight_max: int = 1, batch_max: int = 256
    ) -> None:
        self._send = send
        self._in_flight_max = in_flight_max
        self._batch_max = batch_max
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def submit(self, item: T) -> R:
        """The item's result, once its batch came back. Raises what `send` raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._batches) < self._in_flight_max:
            batch, self._waiting = self._waiting[: self._batch_max], self._waiting[self._batch_max :]
            if batch := [entry for entry in batch if not entry[1].done()]:
                task = asyncio.get_running_loop().create_task(self._carry(batch))
                self._batches.add(task)
                task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        self._flush()

    async def _carry(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._send([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items were sent and {len(results)} results came back")
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

"""Collecting calls: many small requests made at the same time leave as one.

An item submitted while nothing is in flight goes out in the loop's next round, together with everything else submitted
in this one, so a lone item waits for nothing; items that arrive while `in_flight_max` batches are on their way go
together in the next. It is group commit for requests: the busier it gets, the more each request carries.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from hawker.errors import Unreachable

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """`send` takes a list of items and gives one result for each, in order: a value, or an exception to raise to that
    item's caller alone.

    At most `in_flight_max` batches of at most `batch_max` items are on their way at once. A `send` that raises fails
    every item of its batch. A caller that is cancelled disturbs nobody: its item stays behind if it was not on its way,
    else its result is dropped. The queue is bounded by the callers, who wait: one item for each.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[Sequence[R | BaseException]]],
        *,
        in_flight_max: int = 1,
        batch_max: int = 256,
    ) -> None:
        self._send = send
        self._in_flight_max = in_flight_max
        self._batch_max = batch_max
        self._queue: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._carriers: set[asyncio.Task[None]] = set()
        self._starting = False  # a carrier is created and has not taken its first batch
        self._closed = False
        # A batch belongs to no caller: without this its logs would carry the fields of whoever came first.
        self._context = contextvars.copy_context()

    def submit(self, item: T) -> asyncio.Future[R]:
        """The item's result, once its batch is back, or what `send` raises, or gives, for it.

        Set no time-out shorter than that of `send` unless the outcome may stay in doubt.
        """
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if self._closed:
            result.set_exception(Unreachable("closed here; nothing was sent"))
        else:
            self._queue.append((item, result))
            self._start_carrier()
        return result

    async def close(self) -> None:
        """Fail what waits and what is on its way, and wait until that is done. May be called again."""
        self._closed = True
        _fail([self._queue.popleft() for _ in range(len(self._queue))], Unreachable("closed here; nothing was sent"))
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    def _start_carrier(self) -> None:
        if self._queue and not self._starting and len(self._carriers) < self._in_flight_max:
            self._starting = True
            carrier = asyncio.get_running_loop().create_task(self._carry(), context=self._context.copy())
            self._carriers.add(carrier)
            carrier.add_done_callback(self._landed)

    def _landed(self, carrier: asyncio.Task[None]) -> None:
        self._carriers.discard(carrier)
        if not self._closed:
            self._start_carrier()  # for what came between the last look at the queue and this call

    async def _carry(self) -> None:
        """Send batch after batch until nothing waits."""
        self._starting = False
        while batch := self._take():
            self._start_carrier()  # what did not fit
            try:
                results = await self._send([item for item, _ in batch])
                if len(results) != len(batch):
                    raise RuntimeError(f"{len(batch)} items were sent and {len(results)} results came back")
            except asyncio.CancelledError:
                _fail(batch, Unreachable("closed here; whether the peer acted is not known"))
                raise
            except Exception as error:
                _fail(batch, error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if future.done():
                        continue
                    if isinstance(result, BaseException):
                        future.set_exception(result)
                    else:
                        future.set_result(result)

    def _take(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        while self._queue and len(batch) < self._batch_max:
            entry = self._queue.popleft()
            if not entry[1].done():  # else its caller was cancelled
                batch.append(entry)
        return batch


def _fail(batch: list[tuple[T, asyncio.Future[R]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

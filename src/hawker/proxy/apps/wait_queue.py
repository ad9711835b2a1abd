"""Requests that wait for room at the machines of a group, first come, first served.

    turn = room.join("")                    # the last in the queue of those that any machine will do for
    await turn.wait(until)                  # until there may be room, or then
    ...                                     # none after all: wait once more, in the same place
    turn.leave()                            # with `called` emptied if it took the room

A request that must go to one machine waits in that one's queue, and is in nobody's way: it may be full, or fail its
checks, while the others have room.
"""

from __future__ import annotations

import asyncio
from itertools import count


class WaitQueue:
    """`queues` by the machine that its requests must have, "" for those that any will do for; none is empty. `count` is
    how many wait in all of them."""

    __slots__ = ("_numbers", "count", "queues")

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.count = 0
        self._numbers = count()

    def join(self, machine: str) -> Waiter:
        """Queue up. The caller waits, and calls `leave` in the end."""
        queue = self.queues.get(machine)
        if queue is None:
            queue = self.queues[machine] = Queue()
        waiter = Waiter(self, queue, machine, next(self._numbers))
        queue.waiters[waiter.number] = waiter
        self.count += 1
        return waiter

    def before(self, machine: str) -> bool:
        """Whether others were there before one that comes now, and wait for the same."""
        queue = self.queues.get(machine)
        return queue is not None and queue.idle > 0

    def idle(self, machine: str) -> int:
        """How many requests wait that could use room at this machine."""
        return sum(queue.idle for name in (machine, "") if (queue := self.queues.get(name)))

    def one(self, machine: str, after: int = -1) -> None:
        """There is room for one more request at this machine: call the first that can use it. `after`: only those
        behind that number are called."""
        found = None
        for name in (machine, ""):
            queue = self.queues.get(name)
            waiter = queue.first(after) if queue is not None and queue.idle else None
            if waiter is not None and (found is None or waiter.number < found.number):
                found = waiter
        if found is not None:
            found.call(machine)

    def all(self) -> None:
        """Something is different: each waiter may look again."""
        for queue in self.queues.values():
            if queue.idle:
                for waiter in queue.waiters.values():
                    waiter.call("")


class Queue:
    """`waiters` by number, in order; `idle` of them were not called since they last looked."""

    __slots__ = ("idle", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter] = {}
        self.idle = 0

    def first(self, after: int) -> Waiter | None:
        return next((waiter for waiter in self.waiters.values() if waiter.number > after and waiter.idle), None)


class Waiter:
    """A request's place in a queue. `called`: a machine has room for it, "" when it only looks again."""

    __slots__ = ("_future", "_machine", "_queue", "called", "number", "wait_queue")

    def __init__(self, wait_queue: WaitQueue, queue: Queue, machine: str, number: int) -> None:
        self.wait_queue = wait_queue
        self.number = number
        self.called = ""
        self._queue = queue
        self._machine = machine
        self._future: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        return self._future is not None and not self._future.done()

    def call(self, machine: str) -> None:
        future = self._future
        if future is not None and not future.done():
            self._future = None
            self._queue.idle -= 1
            self.called = machine
            future.set_result(None)

    async def wait(self, until: float) -> None:
        """Wait until this waiter is called, at most until then (of the loop's clock)."""
        loop = asyncio.get_running_loop()
        self.called = ""
        future = self._future = loop.create_future()
        self._queue.idle += 1
        timer = loop.call_at(until, self.call, "")
        try:
            await future
        finally:
            timer.cancel()
            if self._future is not None:  # it was cancelled
                self._future = None
                self._queue.idle -= 1

    def leave(self) -> None:
        """Leave the queue. If it was called and has not taken the room (`called` is not ""), the next waiter is
        called."""
        queue = self._queue
        del queue.waiters[self.number]
        self.wait_queue.count -= 1
        if not queue.waiters:
            del self.wait_queue.queues[self._machine]
        if self.called:
            self.wait_queue.one(self.called)

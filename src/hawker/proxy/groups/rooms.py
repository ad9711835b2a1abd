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


class Room:
    """`queues` by the machine that its requests must have, "" for those that any will do for; none is empty. `count` is
    how many wait in all of them."""

    __slots__ = ("_numbers", "count", "queues")

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.count = 0
        self._numbers = count()

    def join(self, machine: str) -> Turn:
        """`leave` it in the end."""
        queue = self.queues.get(machine)
        if queue is None:
            queue = self.queues[machine] = Queue()
        turn = Turn(self, queue, machine, next(self._numbers))
        queue.turns[turn.number] = turn
        self.count += 1
        return turn

    def before(self, machine: str) -> bool:
        """Whether others were there before one that comes now, and wait for the same."""
        queue = self.queues.get(machine)
        return queue is not None and queue.idle > 0

    def idle(self, machine: str) -> int:
        """How many wait that room at this machine is of use to."""
        return sum(queue.idle for name in (machine, "") if (queue := self.queues.get(name)))

    def one(self, machine: str, after: int = -1) -> None:
        """There is room for one more at this machine. `after`: only those behind that number are told."""
        found = None
        for name in (machine, ""):
            queue = self.queues.get(name)
            turn = queue.first(after) if queue is not None and queue.idle else None
            if turn is not None and (found is None or turn.number < found.number):
                found = turn
        if found is not None:
            found.call(machine)

    def all(self) -> None:
        """Something is different: each may look again."""
        for queue in self.queues.values():
            if queue.idle:
                for turn in queue.turns.values():
                    turn.call("")


class Queue:
    """`turns` by number, in order; `idle` of them were not called since they last looked."""

    __slots__ = ("idle", "turns")

    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}
        self.idle = 0

    def first(self, after: int) -> Turn | None:
        return next((turn for turn in self.turns.values() if turn.number > after and turn.idle), None)


class Turn:
    """A request's place in a queue. `called`: a machine has room for it, "" when it only looks again."""

    __slots__ = ("_machine", "_queue", "_waiter", "called", "number", "room")

    def __init__(self, room: Room, queue: Queue, machine: str, number: int) -> None:
        self.room = room
        self.number = number
        self.called = ""
        self._queue = queue
        self._machine = machine
        self._waiter: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def call(self, machine: str) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._waiter = None
            self._queue.idle -= 1
            self.called = machine
            waiter.set_result(None)

    async def wait(self, until: float) -> None:
        """Until it is called, at most until then (of the loop's clock)."""
        loop = asyncio.get_running_loop()
        self.called = ""
        waiter = self._waiter = loop.create_future()
        self._queue.idle += 1
        timer = loop.call_at(until, self.call, "")
        try:
            await waiter
        finally:
            timer.cancel()
            if self._waiter is not None:  # it was cancelled
                self._waiter = None
                self._queue.idle -= 1

    def leave(self) -> None:
        """It is for the next one, if it was called and has not taken the room: then `called` is not ""."""
        queue = self._queue
        del queue.turns[self.number]
        self.room.count -= 1
        if not queue.turns:
            del self.room.queues[self._machine]
        if self.called:
            self.room.one(self.called)

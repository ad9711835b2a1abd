"""Who waits for the programs of runs: a request that wakes a machine is answered before the start is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.model.rows import RunRow
from hawker.worker.drivers.driver import StartRelease
from hawker.worker.flows.runner import Runner

FIRST_S = 0.003
"""After releasing a program, delay asking its driver and the start's commit by this long, so that the request waiting
for it is sent first: a commit and what follows from it take a millisecond or two of this process's time."""


class Launches:
    """Tells whoever waits that a run has its program (`hawker.worker.machine.flows.Waiters`)."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[asyncio.Future[RunRow | str], Callable[[str], None]]]] = {}
        self._released: dict[str, str] = {}  # instances by run, while they are told

    async def released(self, run: str, instance: str, release: StartRelease) -> None:
        self._released[run] = instance
        try:
            for _, released in self._waiting.get(run, ()):
                released(instance)
            await asyncio.sleep(0)  # who has begun the run comes to wait for it now
            if release == "now" and run in self._waiting:
                await asyncio.sleep(FIRST_S)
        finally:
            del self._released[run]

    def launched(self, run: str, instance: str) -> float:
        waiting = self._waiting.pop(run, None)
        if waiting is None:
            return 0.0
        for waiter, _ in waiting:
            if not waiter.done():
                waiter.set_result(instance)
        return asyncio.get_running_loop().time() + FIRST_S

    async def wait(self, run: str, runner: Runner, released: Callable[[str], None]) -> RunRow | str:
        """The instance once it runs, or the run once it has ended without one, or had one before this was asked.
        `released` is told of the instance when it was released, before that."""
        waiter: asyncio.Future[RunRow | str] = asyncio.get_running_loop().create_future()
        mine = waiter, released
        self._waiting.setdefault(run, []).append(mine)
        if instance := self._released.get(run):
            released(instance)
        ended = runner.ending(run)

        def over(ended: asyncio.Future[RunRow]) -> None:
            if not waiter.done() and not ended.cancelled():
                if error := ended.exception():
                    waiter.set_exception(error)
                else:
                    waiter.set_result(ended.result())

        ended.add_done_callback(over)
        try:
            return await waiter
        finally:
            ended.cancel()
            waiting = self._waiting.get(run)
            if waiting and mine in waiting:
                waiting.remove(mine)
                if not waiting:
                    del self._waiting[run]

"""What drivers tell their worker without being asked: a program has ended, or a driver is there only now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from hawker.worker.drivers.base import Exit, Instance

OnExit = Callable[[Exit], None]
OnLate = Callable[[str, Sequence[Instance]], Awaitable[None]]


class DriverNews:
    """The worker opens its drivers before it knows what to do about an exit: what they tell until `listen` waits."""

    def __init__(self) -> None:
        self._early: list[Exit] = []
        self._listener: asyncio.Future[tuple[OnExit, OnLate]] = asyncio.get_running_loop().create_future()

    def exited(self, ended: Exit) -> None:
        if self._listener.done():
            self._listener.result()[0](ended)
        else:
            self._early.append(ended)

    async def came_late(self, name: str, instances: Sequence[Instance]) -> None:
        await (await asyncio.shield(self._listener))[1](name, instances)

    def listen(self, on_exit: OnExit, on_late: OnLate) -> None:
        self._listener.set_result((on_exit, on_late))
        for ended in self._early:
            on_exit(ended)

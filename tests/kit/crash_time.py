"""An event loop whose clock jumps: when nothing is ready, time moves to the next timer at once.

Sockets and threads still work, so real SQLite in its real store runs on it; only waiting costs nothing.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from hawker.host import Host

T = TypeVar("T")

START_S = 1_800_000_000.0


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for the time-out, hands it to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and only moves when nothing is ready."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # inline: the clock must not jump while a thread works
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _, context: None)  # tasks that a crash ended have nobody to tell
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def host(seed: int) -> Host:
    """A host whose wall clock follows the running loop and whose randomness comes from a seed."""
    return Host(wall_s=lambda: START_S + asyncio.get_running_loop().time(), rng=Random(seed))

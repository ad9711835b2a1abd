"""An event loop whose clock jumps to the next timer instead of waiting for it, and a `Host` that reads that clock.

Everything of asyncio runs on it unchanged but what comes from outside the process: sockets, child processes, threads.
`run_in_executor` calls its function at once, so a run has one order of events.
"""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from hawker.host import Host

T = TypeVar("T")
P = ParamSpec("P")

EPOCH_S = 1_700_000_000.0
"""The wall clock when a loop begins."""


class Stalled(RuntimeError):
    """Every task waits and no timer is due: nothing can ever happen again."""


class _Jump(selectors.SelectSelector):
    """Where a loop would wait for its sockets, the clock moves on by as long as it was ready to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("every task waits and no timer is due")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # the stubs write the variadic form of 3.11 with TypeVarTuple
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_in_virtual_time(test(*args, **kwargs))

    return run


def virtual_host(seed: int = 1) -> Host:
    """A host on the running loop's clock."""
    loop = asyncio.get_running_loop()
    return Host(lambda: EPOCH_S + loop.time(), random.Random(seed))

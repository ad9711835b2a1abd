"""Tests in virtual time: they run on the simulator's loop, where waiting takes no time."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from hawker.host import Host
from hawker.sim.platform.loop import SimLoop

T = TypeVar("T")
P = ParamSpec("P")

EPOCH_S = 1_700_000_000.0
"""The wall clock when a loop begins."""


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_in_virtual_time(test(*args, **kwargs))

    return run


class SetClock:
    """A wall clock that somebody sets: `ahead_s` of what virtual time says."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self._now = asyncio.get_running_loop().time

    def wall_s(self) -> float:
        return EPOCH_S + self._now() + self.ahead_s

    def host(self, seed: int = 1) -> Host:
        """Of a process that begins now."""
        began_s = self.wall_s() - self._now()
        return Host(self.wall_s, random.Random(seed), steady_s=lambda: began_s + self._now())


def virtual_host(seed: int = 1) -> Host:
    """A host on the running loop's clock."""
    loop = asyncio.get_running_loop()
    return Host(lambda: EPOCH_S + loop.time(), random.Random(seed))

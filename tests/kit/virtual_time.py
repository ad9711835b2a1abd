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


def virtual_host(seed: int = 1) -> Host:
    """A host on the running loop's clock."""
    loop = asyncio.get_running_loop()
    return Host(lambda: EPOCH_S + loop.time(), random.Random(seed))

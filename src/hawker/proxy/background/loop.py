"""Runs something now and then for as long as a proxy is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hawker.core.beats import until_beat
from hawker.errors import HawkerError
from hawker.telemetry import get_logger


class BackgroundLoop:
    """`begin`, then `close`. In between it calls `look` about every `pause_s`, for the first time after `first_s`,
    whatever goes wrong in one of them. `name` is what the log calls it. `random` gives numbers from 0 to below 1:
    proxies do not all look in the same moment."""

    def __init__(
        self, name: str, pause_s: float, random: Callable[[], float] = lambda: 0.5, *, first_s: float | None = None
    ) -> None:
        self._name = name
        self._pause_s = pause_s
        self._first_s = pause_s if first_s is None else first_s
        self._random = random
        self._task: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """What is done each time."""
        raise NotImplementedError

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause_s = self._first_s
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(until_beat(now(), pause_s * (0.8 + 0.4 * self._random())))
            pause_s = self._pause_s
            try:
                await self.look()
            except HawkerError as error:
                _logger.warning(f"{self._name}.failed", error=error.message, cause=f"local rule: {self._name}")
            except Exception:
                _logger.exception(f"{self._name}.fault", cause="a fault of ours")


_logger = get_logger()

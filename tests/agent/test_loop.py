"""The event loop that agents run on: what its timers promise."""

from __future__ import annotations

import asyncio

from tests.kit.loops import AgentLoop


def test_every_timer_knows_its_time_and_none_but_short_ones_come_early() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        came: dict[float, float] = {}
        done = asyncio.Event()
        began = loop.time()
        waits = (0.0, 0.0003, 0.001, 0.0051, 0.0098, 0.02)

        def fire(wait: float) -> None:
            came[wait] = loop.time() - began
            if len(came) == len(waits):
                done.set()

        timers = [loop.call_later(wait, fire, wait) for wait in waits]
        assert all(timer.when() >= began for timer in timers)
        await done.wait()
        assert [wait for wait in waits if wait >= 0.005 and came[wait] < wait] == []

    with asyncio.Runner(loop_factory=AgentLoop) as runner:
        runner.run(main())

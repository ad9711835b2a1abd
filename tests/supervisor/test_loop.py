"""The supervisor's timers."""

from __future__ import annotations

import gc
import weakref

from tests.kit.waiting import eventually

from hawker.supervisor.loop import Loop


async def test_a_call_comes_at_its_time_and_one_that_was_cancelled_does_not() -> None:
    loop, came = Loop(), list[str]()
    loop.later(0.01, lambda: came.append("second"))
    loop.later(0.0, lambda: came.append("first"))
    loop.later(0.0, lambda: came.append("never")).cancel()

    async def both() -> bool:
        loop.turn()
        return len(came) == 2

    await eventually(both, "both calls come")
    assert came == ["first", "second"]


def test_a_call_that_was_cancelled_holds_nothing_until_its_time() -> None:
    class Request:
        def late(self) -> None: ...

    loop, request = Loop(), Request()
    timer = loop.later(60, request.late)
    held = weakref.ref(request)
    del request
    gc.collect()
    assert held() is not None
    timer.cancel()
    gc.collect()
    assert held() is None

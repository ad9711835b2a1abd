"""The loop on virtual time: what time does, what order things have, and what killed and paused processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from hawker.sim.platform.loop import SimLoop, Stalled, run
from hawker.sim.platform.processes import Process


def test_a_day_takes_no_time() -> None:
    async def main(loop: SimLoop) -> float:
        await asyncio.sleep(24 * 3600)
        return loop.time()

    assert run(main) == 24 * 3600


def test_timeouts_task_groups_and_queues_of_asyncio_run_unchanged() -> None:
    async def main(loop: SimLoop) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        got = []

        async def put() -> None:
            for n in range(3):
                await queue.put(n)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put())
            for _ in range(3):
                got.append(await queue.get())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        assert loop.time() == 8
        return got

    assert run(main) == [0, 1, 2]


@pytest.mark.parametrize("alive", [0, 3, 7, 20])
def test_tasks_of_a_group_are_cancelled_in_the_order_of_their_birth(alive: int) -> None:
    """asyncio's own order is that of addresses in memory: unrelated objects change it."""

    async def main(loop: SimLoop) -> list[int]:
        keep = [loop.create_future() for _ in range(alive)]
        order: list[int] = []

        async def child(number: int) -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                order.append(number)
                raise

        async def fail() -> None:
            await asyncio.sleep(1)
            raise RuntimeError

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(8):
                    tasks.create_task(child(number))
                tasks.create_task(fail())

        with pytest.raises(ExceptionGroup):
            await group()
        assert len(keep) == alive
        return order

    assert run(main) == list(range(8))


def test_a_killed_process_never_runs_again_not_even_its_finally() -> None:
    seen: list[str] = []

    async def life() -> None:
        try:
            await asyncio.sleep(10)
            seen.append("woke")
        finally:
            seen.append("finally")

    async def main(loop: SimLoop) -> list[str]:
        process = Process("victim")
        loop.run_in(process, life())
        await asyncio.sleep(5)
        loop.kill(process)
        await asyncio.sleep(20)
        return list(seen)

    assert run(main) == []


def test_what_a_process_starts_dies_with_it() -> None:
    seen: list[str] = []

    async def child() -> None:
        await asyncio.sleep(10)
        seen.append("child")

    async def life() -> None:
        asyncio.get_running_loop().call_later(10, seen.append, "timer")
        await asyncio.gather(child(), child())

    async def main(loop: SimLoop) -> None:
        victim, other = Process("victim"), Process("other")
        loop.run_in(victim, life())
        loop.run_in(other, child())
        await asyncio.sleep(5)
        loop.kill(victim)
        await asyncio.sleep(20)

    run(main)
    assert seen == ["child"]


def test_what_is_due_for_a_paused_process_waits_until_it_goes_on() -> None:
    seen: list[tuple[float, str]] = []

    async def main(loop: SimLoop) -> None:
        process = Process("sleeper")

        async def life() -> None:
            for name in ("one", "two", "three"):
                await asyncio.sleep(1)
                seen.append((loop.time(), name))

        loop.run_in(process, life())
        await asyncio.sleep(1.5)
        loop.pause(process)
        await asyncio.sleep(3.5)
        loop.resume(process)
        await asyncio.sleep(5)

    run(main)
    assert seen == [(1, "one"), (5, "two"), (6, "three")]


def test_a_function_given_to_an_executor_runs_at_once() -> None:
    async def main(loop: SimLoop) -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run(main) == 7


def test_a_program_that_waits_for_nothing_that_can_come_is_stopped() -> None:
    async def main(loop: SimLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stalled):
        run(main)


def test_an_error_that_nobody_catches_is_kept_with_its_process() -> None:
    async def main(loop: SimLoop) -> list[tuple[str, str]]:
        process = Process("careless")

        async def life() -> None:
            loop.call_soon(_fail)
            await asyncio.sleep(1)

        await loop.run_in(process, life())
        return [(found.process, repr(found.error)) for found in loop.unhandled]

    def _fail() -> None:
        raise RuntimeError("oops")

    assert run(main) == [("careless", "RuntimeError('oops')")]


def test_what_is_left_at_the_end_is_taken_apart_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    """Coroutines that await in a `finally` would make Python complain."""

    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            try:
                await asyncio.sleep(1)
            finally:
                await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2))

    async def outer(inner: Coroutine[Any, Any, None]) -> None:
        await inner

    async def main(loop: SimLoop) -> None:
        loop.run_in(Process("left"), outer(stubborn()))
        await asyncio.sleep(1)

    run(main)
    assert not recwarn.list

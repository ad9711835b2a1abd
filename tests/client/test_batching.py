"""Many calls made one: what is sent together, what waits, and who learns of what."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence

import pytest

from hawker.client.batching import Batcher
from hawker.errors import Unreachable


class Peer:
    """The other side: notes each batch and answers it when the test says so."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.in_flight = 0
        self.in_flight_most = 0

    async def send(self, items: list[int]) -> Sequence[str | BaseException]:
        self.batches.append(items)
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        try:
            await self.open.wait()
        finally:
            self.in_flight -= 1
        return [f"r{item}" for item in items]


def submit_all(batcher: Batcher[int, str], items: Sequence[int]) -> list[asyncio.Future[str]]:
    return [batcher.submit(item) for item in items]


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_items_of_one_tick_go_together_and_each_gets_its_own_result() -> None:
    peer = Peer()
    peer.open.set()
    batcher = Batcher(peer.send)
    assert await asyncio.gather(*submit_all(batcher, range(5))) == ["r0", "r1", "r2", "r3", "r4"]
    assert peer.batches == [[0, 1, 2, 3, 4]]


async def test_a_lone_item_leaves_in_the_next_round_of_the_loop() -> None:
    peer = Peer()
    batcher = Batcher(peer.send)
    result = batcher.submit(1)
    assert peer.batches == []
    await ticks(1)
    assert peer.batches == [[1]]
    peer.open.set()
    assert await result == "r1"


async def test_items_that_come_while_a_batch_is_on_its_way_go_together_in_the_next() -> None:
    peer = Peer()
    batcher = Batcher(peer.send)
    tasks = submit_all(batcher, [0])
    await ticks(3)
    for item in (1, 2, 3):
        tasks += submit_all(batcher, [item])
        await ticks(3)
    assert peer.batches == [[0]]
    peer.open.set()
    assert await asyncio.gather(*tasks) == ["r0", "r1", "r2", "r3"]
    assert peer.batches == [[0], [1, 2, 3]]


async def test_no_more_batches_are_on_their_way_than_allowed_and_none_is_larger() -> None:
    peer = Peer()
    batcher = Batcher(peer.send, in_flight_max=2, batch_max=3)
    tasks = submit_all(batcher, range(10))
    await ticks(5)
    assert peer.batches == [[0, 1, 2], [3, 4, 5]]
    peer.open.set()
    assert await asyncio.gather(*tasks) == [f"r{n}" for n in range(10)]
    assert peer.in_flight_most == 2
    assert sorted(map(len, peer.batches)) == [1, 3, 3, 3]


async def test_a_send_that_fails_fails_every_item_of_its_batch_and_no_other() -> None:
    async def send(items: list[int]) -> list[str]:
        if 0 in items:
            raise Unreachable("no answer")
        return ["ok"] * len(items)

    batcher: Batcher[int, str] = Batcher(send, batch_max=2)
    results = await asyncio.gather(*submit_all(batcher, range(4)), return_exceptions=True)
    assert [type(r) for r in results] == [Unreachable, Unreachable, str, str]
    assert await batcher.submit(5) == "ok"


async def test_an_exception_in_the_place_of_a_result_is_raised_to_that_caller_alone() -> None:
    async def send(items: list[int]) -> list[str | BaseException]:
        return [ValueError("odd") if item % 2 else "even" for item in items]

    results = await asyncio.gather(*submit_all(Batcher(send), range(3)), return_exceptions=True)
    assert [results[0], type(results[1]), results[2]] == ["even", ValueError, "even"]


async def test_results_of_the_wrong_number_are_an_error_and_never_someone_elses() -> None:
    async def send(items: list[int]) -> list[str]:
        return ["one"]

    results = await asyncio.gather(*submit_all(Batcher(send), range(2)), return_exceptions=True)
    assert [str(r) for r in results] == ["2 items were sent and 1 results came back"] * 2


async def test_a_cancelled_caller_disturbs_no_other() -> None:
    peer = Peer()
    batcher = Batcher(peer.send)
    flying = submit_all(batcher, [0, 1])
    await ticks(3)
    waiting = submit_all(batcher, [2, 3])
    await ticks(3)
    flying[0].cancel()
    waiting[0].cancel()
    peer.open.set()
    results = await asyncio.gather(*flying, *waiting, return_exceptions=True)
    assert [type(r) for r in results] == [asyncio.CancelledError, str, asyncio.CancelledError, str]
    assert peer.batches == [[0, 1], [3]]  # what was not on its way stayed behind


async def test_a_batch_carries_the_context_of_no_caller() -> None:
    caller = contextvars.ContextVar("caller", default="nobody")
    seen: list[str] = []

    async def send(items: list[int]) -> list[str]:
        seen.append(caller.get())
        return ["ok"] * len(items)

    batcher: Batcher[int, str] = Batcher(send)
    caller.set("first")
    assert await batcher.submit(1) == "ok"
    assert seen == ["nobody"]


async def test_closing_fails_what_waits_and_what_is_on_its_way() -> None:
    peer = Peer()
    batcher = Batcher(peer.send)
    tasks = submit_all(batcher, [0])
    await ticks(3)
    tasks += submit_all(batcher, [1])
    await ticks(3)
    await batcher.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [Unreachable, Unreachable]
    assert ["not known" in str(results[0]), "nothing was sent" in str(results[1])] == [True, True]
    assert peer.in_flight == 0
    with pytest.raises(Unreachable, match="closed here"):
        await batcher.submit(2)

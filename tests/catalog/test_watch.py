"""One look serves a burst of changes, looks never overlap, and no change goes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tests.kit.virtual_time import virtual_time

from hawker.catalog.read.watch import Watch
from hawker.errors import StoreError


class Changing:
    """A view whose changes the test tells."""

    def __init__(self) -> None:
        self.on_applied: list[Callable[[tuple[str, ...]], None]] = []

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return []

    def change(self, *tables: str) -> None:
        for told in self.on_applied:
            told(tables)


@virtual_time
async def test_a_burst_of_changes_is_looked_at_once_a_while_after_the_first() -> None:
    view, looks = Changing(), []
    loop = asyncio.get_running_loop()

    async def look() -> None:
        looks.append(loop.time())

    watch = Watch(view, {"machines"}, 0.2, look)
    watch.begin()
    await asyncio.sleep(1)
    for _ in range(10):
        view.change("machines", "apps")
        await asyncio.sleep(0.01)
    view.change("apps")
    await asyncio.sleep(1)
    assert [round(at, 3) for at in looks] == [0.2, 1.2]
    await watch.close()
    assert view.on_applied == []


@virtual_time
async def test_a_change_during_a_look_is_looked_at_after_it() -> None:
    view = Changing()
    running = seen = most = 0

    async def look() -> None:
        nonlocal running, seen, most
        running += 1
        seen += 1
        most = max(most, running)
        await asyncio.sleep(0.5)
        running -= 1

    watch = Watch(view, {"machines"}, 0.1, look)
    watch.begin()
    await asyncio.sleep(0.3)
    view.change("machines")
    view.change("machines")
    await asyncio.sleep(3)
    assert (seen, most) == (2, 1)
    view.change("machines")
    await asyncio.sleep(0.2)
    await watch.close()  # in the middle of a look
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_a_look_that_a_database_did_not_let_is_repeated_though_nothing_changes() -> None:
    view, looks = Changing(), 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise StoreError("the disk is full")

    watch = Watch(view, {"machines"}, 0.2, look)
    watch.begin()
    await asyncio.sleep(1)
    assert looks == 1
    await asyncio.sleep(10)
    assert looks == 3
    await watch.close()

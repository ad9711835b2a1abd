"""What every part of a worker may need: its settings, and what it holds of the world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hawker.catalog.view import RowView
from hawker.host import Host
from hawker.images.base import ImageSource
from hawker.network.base import HostNetwork
from hawker.store.db import Store
from hawker.telemetry import Metrics
from hawker.worker.drivers.base import Exit, Instance
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.runner import Runner
from hawker.worker.settings import WorkerSettings

OnExit = Callable[[Exit], None]
OnLate = Callable[[str, Sequence[Instance]], Awaitable[None]]


class DriverNews:
    """The worker opens its drivers before it knows what to do about an exit: what they tell until `listen` waits."""

    def __init__(self) -> None:
        self._early: list[Exit] = []
        self._listener: asyncio.Future[tuple[OnExit, OnLate]] = asyncio.get_running_loop().create_future()

    def exited(self, ended: Exit) -> None:
        if self._listener.done():
            self._listener.result()[0](ended)
        else:
            self._early.append(ended)

    async def came_late(self, name: str, instances: Sequence[Instance]) -> None:
        await (await asyncio.shield(self._listener))[1](name, instances)

    def listen(self, on_exit: OnExit, on_late: OnLate) -> None:
        self._listener.set_result((on_exit, on_late))
        for ended in self._early:
            on_exit(ended)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """`news` is what the drivers tell. `images` is None where machines have none, `network` where they have no network
    of their own, and `catalog` in a worker that is no member of one. `token` is what agents know each other by."""

    settings: WorkerSettings
    host: Host
    store: Store
    drivers: DriverSet
    news: DriverNews
    runner: Runner
    metrics: Metrics
    images: ImageSource | None = None
    network: HostNetwork | None = None
    catalog: RowView | None = None
    token: str = ""

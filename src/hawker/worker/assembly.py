"""A worker's services, in the order in which they are opened; they are closed in reverse.

Whatever compares rows with what is there comes before the runner, which takes up the runs; whatever serves comes after
it. The simulator and the tests start the same list.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from hawker.services import Service
from hawker.worker.api.market import MarketApi
from hawker.worker.api.runs import RunsApi
from hawker.worker.app_copies import AppCopies
from hawker.worker.context import WorkerContext
from hawker.worker.flows.flow import Flow
from hawker.worker.images.shelving import Shelving
from hawker.worker.kinds import Kind, Parts
from hawker.worker.machine.kind import MACHINE
from hawker.worker.machine.parts import MachineParts
from hawker.worker.market import Market
from hawker.worker.upkeep import Upkeep

Forget = Callable[[str, str], Awaitable[None]]
"""Tells the catalog to forget a worker that is gone, and why."""


class Assembly:
    """`others` are the kinds beside machines. `alter` is given every flow before the runner gets it: crash tests cut
    there. `services` is the whole list."""

    def __init__(
        self,
        context: WorkerContext,
        machine: Kind[MachineParts] = MACHINE,
        others: Sequence[Kind[Parts]] = (),
        *,
        forget: Forget | None = None,
        alter: Callable[[Flow], Flow] = lambda flow: flow,
    ) -> None:
        settings, store = context.settings, context.store
        self.runner = runner = context.runner
        self.images = images = Shelving(context)
        self.machine = mine = machine.parts(context)
        self.parts: dict[str, Parts] = {machine.name: mine, **{kind.name: kind.parts(context) for kind in others}}
        for parts in self.parts.values():
            runner.add(alter(flow) for flow in parts.flows)
        self.market = market = Market(context, mine.writer, images.stock)
        self.upkeep = Upkeep(context, (machine, *others), market)
        self.market_api = MarketApi(context, market, mine, forget)
        self.services: Sequence[Service] = [
            images,
            market,
            *(service for parts in self.parts.values() for service in parts.recovery),
            _CollectImages(images),
            runner,
            *(service for parts in self.parts.values() for service in parts.services),
            *([AppCopies(settings.name, context.catalog, store)] if context.catalog else []),
            RunsApi(store, runner, settings.name),
            self.market_api,
            self.upkeep,
        ]


class _CollectImages(Service):
    """Whatever reservations and things need is held by now: the worker may remove other images."""

    def __init__(self, images: Shelving) -> None:
        self._images = images

    async def open(self) -> None:
        self._images.all_held()

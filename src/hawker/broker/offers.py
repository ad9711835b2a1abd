"""Collecting offers for an order, and correcting them by what this broker's other orders are about to book."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from hawker.broker.fleet import WorkerLink
from hawker.client.deadline import within
from hawker.errors import Unreachable
from hawker.host import clock_s
from hawker.model.guest import Resources, smaller
from hawker.model.market import OFFERS_S, Ask, Failed, Offer, Order, Refusal, Reservation

GRACE_S = 0.005
"""How long to wait for a worker whose last offer did not come: as long as one takes."""


async def book(links: Sequence[WorkerLink], ask: Ask) -> list[Offer | Refusal]:
    """Ask all workers at once, with one deadline. A worker whose last offer did not come is asked, too, but is hardly
    waited for longer than the others take: one that is cut off costs one order its deadline, not every order."""
    asked = [(link, link.collect(ask)) for link in links]
    prompt = [answer for link, answer in asked if not link.missed]
    late = [answer for link, answer in asked if link.missed]
    try:
        with suppress(TimeoutError):
            async with within(OFFERS_S):
                if first := prompt or late:
                    await asyncio.wait(first)
        if prompt and late:
            await asyncio.wait(late, timeout=GRACE_S)
    finally:
        for _, answer in asked:
            if not answer.cancel():
                answer.exception()  # asyncio complains of one that nobody has looked at
    answers = []
    for link, answer in asked:
        if answer.cancelled() or isinstance(answer.exception(), Unreachable):
            link.missed = True
        elif answer.exception() is None and not isinstance(found := answer.result(), Failed):
            answers.append(found)
    return answers


class Bookings:
    """What this broker's orders are about to book on each worker, and have just booked there, so that a herd of orders
    does not choose the same worker. These are hints of this moment; the worker decides."""

    def __init__(self) -> None:
        self._in_flight: dict[str, Resources] = {}
        self._last_left: dict[str, tuple[float, Resources]] = {}  # what a worker said it had left, and when

    async def reserve(self, link: WorkerLink, order: Order) -> Reservation | Refusal | Failed:
        self._in_flight[link.name] = self._in_flight.get(link.name, Resources()) + order.resources
        try:
            answer = await link.send(order)
        finally:
            self._in_flight[link.name] -= order.resources
        if isinstance(answer, Reservation):
            self._last_left[link.name] = clock_s(), answer.free
        return answer

    def correct(self, answer: Offer | Refusal, asked_s: float) -> Offer | Refusal:
        """An offer as it stands now: other orders may have booked there since it was asked for, or are about to."""
        if isinstance(answer, Refusal):
            return answer
        heard_s, left = self._last_left.get(answer.worker, (0.0, answer.free))
        free = smaller(answer.free, left) if heard_s > asked_s else answer.free
        return replace(answer, image_parts=None, free=free, in_flight=self._in_flight.get(answer.worker, Resources()))

"""Placing an order: the broker carries out what the auction says. Fill or kill, within one round of offers.

The broker keeps nothing: an order lives in the task that handles its request. If the broker dies, a reservation
lapses by the worker's clock. When a call's outcome is in doubt, the order is released on that worker until that is
acknowledged (`broker.releases`), and the client is told; nothing is left half done. The release also destroys a machine
that was made, unless the order has an idempotency key: such a machine is its client's, who finds it by asking again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random

import msgspec
from msgspec.structs import replace

from hawker.broker.apps import Apps
from hawker.broker.claims import Claims
from hawker.broker.fleet import Fleet, WorkerLink
from hawker.broker.image_hints import ImageHints
from hawker.broker.offers import Bookings, book
from hawker.broker.order_errors import in_doubt, no_capacity, not_claimed, not_taken
from hawker.broker.releases import Releases
from hawker.client.wire import PeerUnreachable
from hawker.core.auction import (
    FANOUT,
    Answer,
    Auction,
    Claim,
    Confirm,
    Instruction,
    Outcome,
    Release,
    Reserve,
)
from hawker.core.ranking import Policy
from hawker.errors import Conflict, HawkerError, Unreachable
from hawker.host import Host, clock_s
from hawker.model.config import Config
from hawker.model.market import Ask, ConfirmOrder, Failed, Offer, Order, Refusal
from hawker.model.regions import expand
from hawker.model.rows import AppRow
from hawker.telemetry import Metrics, exemplar, get_logger

START_S = 60.0
"""How long to wait for the answer to a confirmation that waits for the machine's start."""
LAPSED = "lapsed"
"""The worker's word for a reservation that it holds no more."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the client wrote it, checked. The auction gives `order` its key and its region. `key` is the client's
    idempotency key, "" for none, which belongs to `claimant`. With `wait` the client waits for the machine's start.

    `replaces` is the machine whose place it is to take; `silent`, the worker that has that machine, is what
    `broker.replacement` has found out.
    """

    order: Order
    config: Config
    key: str = ""
    claimant: str = ""
    wait: bool = False
    replaces: str = ""
    silent: str = ""


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """A filled order: the machine in the API's JSON, and what each phase took."""

    machine: bytes
    worker: str
    timings_ms: Mapping[str, float]


class Orders:
    """Places orders over a fleet under one policy."""

    def __init__(
        self,
        fleet: Fleet,
        host: Host,
        policy: Policy,
        metrics: Metrics,
        apps: Apps | None = None,
        hints: ImageHints | None = None,
    ) -> None:
        self._fleet = fleet
        self._host = host
        self._policy = policy
        self._metrics = metrics
        self._apps = apps or Apps(fleet, host)
        self._hints = hints or ImageHints()
        self._claims = Claims(fleet, host)
        self._bookings = Bookings()
        self.releases = Releases(fleet)

    async def place(self, wanted: Wanted) -> Fill:
        """Fill the order in the first of its regions that has room.

        Raises `NoCapacity` with a reason per worker, `NotFound` for an unknown app, `Unreachable` when a worker stopped
        answering or failed in the middle: the order is then undone there as soon as it answers again, or with a key
        found there by asking again.
        """
        began_s = clock_s()
        replaces = ""
        if wanted.key:
            known = await self._claims.look(wanted.claimant, wanted.order.app, wanted.key, without=wanted.silent)
            if known.machine:
                return Fill(machine=known.machine, worker=known.worker, timings_ms={})
            replaces = known.order
        refusals: list[Refusal] = []
        offered = False
        regions = expand(wanted.order.region, self._fleet.regions())
        for region in regions:
            seed = self._host.rng.getrandbits(32)
            auction = Auction(
                wanted.order.app,
                region,
                wanted.order.resources,
                self._policy,
                seed=seed,
                rng=Random(seed),
                new_order=self._host.ulid,
                keyed=bool(wanted.key),
                began_s=began_s,
            )
            fill = await self._fill(auction, wanted, replaces)
            outcome = "filled" if fill else "refused"
            self._metrics.orders.labels(region, outcome).inc(exemplar=exemplar(auction.order, wanted.order.request))
            self._metrics.order_seconds.labels(region, outcome).observe(clock_s() - began_s)
            if fill:
                return fill
            offered = offered or bool(auction.offers)
            refusals += auction.refusals()
        if (error := not_taken(refusals)) is not None:
            raise error
        if not offered and newest_app([], self._apps.known(wanted.order.app)) is None:
            # An app that is not there is the first thing to tell.
            with suppress(Unreachable):
                await self._apps.get(wanted.order.app)
        raise no_capacity(wanted.order.region, wanted.config.guest, regions, refusals)

    async def _fill(self, auction: Auction, wanted: Wanted, replaces: str) -> Fill | None:
        """Ask for offers, all at once with one deadline, and carry out what the auction says until it is over. None:
        nobody of the region filled the order."""
        links = {link.name: link for link in self._fleet.in_region(auction.region)}
        image, hints = wanted.config.image, self._hints
        holders = hints.holders(auction.region, image) if len(links) > FANOUT else ()
        ask = Ask(
            app=wanted.order.app,
            region=auction.region,
            image=image,
            resources=wanted.order.resources,
            runtime=wanted.config.runtime,
            parts=hints.parts(image),
        )
        asked = auction.ask(sorted(links), holders, asked_s := clock_s())
        answers = await book([links[name] for name in asked], ask)
        hints.heard(image, [answer for answer in answers if isinstance(answer, Offer)])
        todo = auction.answered([self._bookings.correct(answer, asked_s) for answer in answers], clock_s())
        app = newest_app(auction.offers, self._apps.known(wanted.order.app))
        if auction.offers and app is None:
            # The app was made a moment ago and may not be in this catalog yet. The worker that decides its name knows.
            app = (await self._apps.get(wanted.order.app)).row
        return await self._carry_out(auction, todo, wanted, app, replaces)

    async def _carry_out(
        self, auction: Auction, todo: Sequence[Instruction], wanted: Wanted, app: AppRow | None, replaces: str
    ) -> Fill | None:
        """`app` is known when there is an offer. `replaces` is the order whose claim of the client's key came to
        nothing."""
        link: WorkerLink | None = None
        try:
            while todo:
                for step in todo:
                    match step:
                        case Reserve():
                            link = self._fleet.links.get(step.worker)
                            todo = await self._reserve(auction, step, link, wanted)
                        case Claim():
                            todo = await self._claim(auction, step, wanted, replaces)
                        case Confirm():
                            assert link
                            assert app
                            todo = await self._confirm(auction, step, link, app, wait=wanted.wait)
                        case Release():
                            assert link
                            self.releases.begin(link, step)
                        case Answer():
                            return _answer(step, wanted)
        except BaseException:
            for step in auction.abandoned():
                if isinstance(step, Release) and link:
                    self.releases.begin(link, step)
            raise
        raise AssertionError("an auction says what to do next, or answers")

    async def _reserve(
        self, auction: Auction, step: Reserve, link: WorkerLink | None, wanted: Wanted
    ) -> list[Instruction]:
        if link is None:  # the catalog has dropped it since it made its offer
            return auction.unanswered(step, clock_s(), sent=False)
        order = replace(wanted.order, key=step.order, region=auction.region)
        try:
            answer = await self._bookings.reserve(link, order)
        except HawkerError as error:
            if sent := not isinstance(error, PeerUnreachable) or error.sent:
                _logger.warning("reserve.failed", worker=step.worker, order=step.order, error=error.message)
            return auction.unanswered(step, clock_s(), sent=sent)
        match answer:
            case Refusal():
                return auction.refused(step, answer, clock_s())
            case Failed():
                _logger.warning("reserve.failed", worker=step.worker, order=step.order, error=answer.error)
                return auction.unanswered(step, clock_s(), sent=True)
        return auction.reserved(step, clock_s())

    async def _claim(self, auction: Auction, step: Claim, wanted: Wanted, replaces: str) -> list[Instruction]:
        """With a client's key, only the order that holds the claim may be confirmed."""
        key = wanted.claimant, wanted.order.app, wanted.key
        ours = await self._claims.take(*key, step.worker, step.order, replaces, without=wanted.silent)
        return auction.claimed(step, clock_s()) if ours else auction.not_claimed(step)

    async def _confirm(
        self, auction: Auction, step: Confirm, link: WorkerLink, app: AppRow, *, wait: bool
    ) -> list[Instruction]:
        request = ConfirmOrder(key=step.order, app=app, decision=step.decision, wait=wait)
        try:
            confirmed = await link.send(request, START_S if wait else None)
        except Unreachable:
            return auction.unconfirmed(step, "stopped answering")
        except HawkerError as error:
            return auction.unconfirmed(step, f"failed ({error.message})")
        if (problem := confirmed.error) is None:
            return auction.confirmed(step, bytes(confirmed.machine), clock_s())
        if problem.get("status") == LAPSED:
            return auction.lapsed(step, str(problem.get("error")))
        return auction.unconfirmed(step, f"failed ({problem.get('error')})")


def newest_app(offers: Sequence[Offer], known: AppRow | None = None) -> AppRow | None:
    """The app's newest row among the offers and in the catalog; None when nobody knows it or it was deleted."""
    rows = filter(None, [*(offer.app for offer in offers), known])
    newest = max(rows, key=lambda row: row.stamp_ms, default=None)
    return None if newest is None or newest.deleted else newest


def _answer(answer: Answer, wanted: Wanted) -> Fill | None:
    """None when nobody of the region filled the order. Raises what else came of it."""
    if answer.outcome is Outcome.filled:
        return Fill(machine=answer.machine, worker=answer.worker, timings_ms=answer.timings_ms)
    if answer.outcome is Outcome.refused:
        return None
    again = "ask again with the same key" if wanted.key else "order again"
    if wanted.replaces:
        again = "ask again"
    if answer.outcome is Outcome.in_doubt:
        raise in_doubt(answer.worker, answer.problem, keyed=bool(wanted.key), again=again)
    if answer.outcome is Outcome.lapsed:
        raise Conflict(f"the reservation was lost before it was confirmed: {answer.problem}", hint=again)
    raise not_claimed(wanted.replaces, again=again)


_logger = get_logger()

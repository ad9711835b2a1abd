"""Placing an order: offers, ranking, reserve, confirm. Fill or kill, within one round of offers.

The broker keeps nothing: an order lives in the task that handles its request. If the broker dies, a reservation
lapses by the worker's clock. When a call's outcome is in doubt, the order is released on that worker until that is
acknowledged, and the client is told; nothing is left half done. The release also destroys a machine that was made,
unless the order has an idempotency key: such a machine is its client's, who finds it by asking again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.broker.apps import Apps
from hawker.broker.claims import Claimed, Claims
from hawker.broker.fleet import OFFERS_S, Confirmation, Fleet, WorkerLink
from hawker.broker.hints import ImageHints
from hawker.client.in_time import in_time
from hawker.client.wire import PeerUnreachable
from hawker.core.auction import FANOUT, Auction, candidates
from hawker.core.capacity import setting_of
from hawker.core.ranking import Policy
from hawker.errors import Conflict, HawkerError, NoCapacity, Refused, Unreachable
from hawker.host import Host
from hawker.http.app import clock_s, timed_ms
from hawker.model.config import Config
from hawker.model.guest import Resources, smaller
from hawker.model.market import LEASE_S, Ask, Offer, Order, Reason, Refusal, Reservation
from hawker.model.regions import expand
from hawker.model.rows import AppRow
from hawker.telemetry import Metrics, exemplar, get_logger

RELEASE_RETRY_S = 0.5
START_S = 60.0
GRACE_S = 0.005  # for a worker whose last offer did not come: as long as one takes
LAPSED = "lapsed"  # the worker's word for a reservation that it holds no more
_AT_ITS_DISK = {Reason.disk_full: "make room on the disk", Reason.disk_failed: "look at the disk"}


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the client wrote it, checked. `key` is its idempotency key, "" for none, which belongs to `claimant`.

    `replaces` is the machine it is to take the place of. `machine`, `generation` and `silent`, the worker that has it,
    are what `broker.replacing` made of that.
    """

    app: str
    name: str
    region: str
    config: Config
    skip_launch: bool
    cordoned: bool
    lease_ttl_s: int
    owner: str
    request: str
    trace: str
    key: str = ""
    claimant: str = ""
    wait: bool = False
    replaces: str = ""
    machine: str = ""
    generation: int = 1
    silent: str = ""
    image_timeout_s: int = 0


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """A filled order: the machine in the API's JSON, and what each phase took."""

    machine: bytes
    worker: str
    timings_ms: dict[str, float]


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
        # By worker, so that a herd of orders does not choose the same one: what is being asked of it, and what it said
        # it had left, when. Hints of this moment; the worker decides.
        self._in_flight: dict[str, Resources] = {}
        self._last_left: dict[str, tuple[float, Resources]] = {}
        self._releases: dict[asyncio.Task[None], None] = {}  # in order, so that closing has one, too

    async def place(self, wanted: Wanted) -> Fill:
        """Fill the order in the first of its regions that has room.

        Raises `NoCapacity` with a reason per worker, `NotFound` for an unknown app, `Unreachable` when a worker stopped
        answering or failed in the middle: the order is then undone there as soon as it answers again, or with a key
        found there by asking again.
        """
        started = clock_s()
        replaces = ""
        if wanted.key:
            known = await self._claims.look(wanted.claimant, wanted.app, wanted.key, without=wanted.silent)
            if known.machine:
                return Fill(machine=known.machine, worker=known.worker, timings_ms={})
            replaces = known.order
        refusals: list[Refusal] = []
        app_known = False
        regions = expand(wanted.region, self._fleet.regions())
        for region in regions:
            auction = await self._auction(wanted, region)
            app_known |= auction.app is not None
            fill = await self._try_fill(wanted, auction, region, replaces, started)
            outcome = "filled" if fill else "refused"
            self._metrics.orders.labels(region, outcome).inc(exemplar=exemplar(auction.order, wanted.request))
            self._metrics.order_seconds.labels(region, outcome).observe(clock_s() - started)
            if fill:
                return fill
            refusals += auction.refusals()
        if (error := _not_taken(refusals)) is not None:
            raise error
        if not app_known:  # an app that is not there is the first thing to tell
            with suppress(Unreachable):
                await self._apps.get(wanted.app)
        raise no_capacity(wanted, regions, refusals)

    async def close(self) -> None:
        for task in list(self._releases):
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _auction(self, wanted: Wanted, region: str) -> Auction:
        """Ask for offers, all at once with one deadline, and rank them."""
        seed = self._host.rng.getrandbits(32)
        rng = Random(seed)
        resources = wanted.config.resources()
        auction = Auction(self._host.ulid(), wanted.app, region, resources, self._policy, seed)
        links = {link.name: link for link in self._fleet.in_region(region)}
        image, hints = wanted.config.image, self._hints
        asked = candidates(sorted(links), rng, holders=hints.holders(region, image) if len(links) > FANOUT else ())
        ask = Ask(
            app=wanted.app,
            region=region,
            image=image,
            resources=resources,
            runtime=wanted.config.runtime,
            parts=hints.parts(image),
        )
        began = clock_s()
        answers = await book([links[name] for name in asked], ask)
        hints.heard(image, [answer for answer in answers if isinstance(answer, Offer)])
        found = [self._counted(answer, began) for answer in answers]
        auction.answered(asked, found, rng, timed_ms(began))
        auction.app = newest_app(auction.offers, self._apps.known(wanted.app))
        return auction

    async def _try_fill(
        self, wanted: Wanted, auction: Auction, region: str, replaces: str, started: float
    ) -> Fill | None:
        if auction.offers and auction.app is None:
            # Made a moment ago, it may not have come as far as here: who decided its name knows.
            auction.app = (await self._apps.get(wanted.app)).row
        while (name := auction.next_worker()) is not None:
            began = clock_s()
            link = self._fleet.links.get(name)
            if link is None:  # the catalog has dropped it since it made its offer
                auction.refused(Refusal(worker=name, region=region, reason=Reason.no_answer), timed_ms(began))
                continue
            order = self._order(wanted, auction.order, region)
            try:
                answer = await self._reserve(link, order)
            except HawkerError as error:
                if isinstance(error, PeerUnreachable) and not error.sent:  # nothing happened there
                    auction.refused(Refusal(worker=name, region=region, reason=Reason.no_answer), timed_ms(began))
                    continue
                _logger.warning("reserve.failed", worker=name, order=auction.order, error=error.message)
                self._give_up(link, wanted, auction.order)
                auction.doubted(name, timed_ms(began))
                auction.order = self._host.ulid()  # the doubtful one must never fill on another worker, too
                continue
            if isinstance(answer, Refusal):
                auction.refused(answer, timed_ms(began))
                continue
            auction.filled(name, reserve_ms := timed_ms(began))
            return await self._confirm(wanted, auction, link, answer, replaces, started, reserve_ms)
        return None

    async def _confirm(
        self,
        wanted: Wanted,
        auction: Auction,
        link: WorkerLink,
        reservation: Reservation,
        replaces: str,
        started: float,
        reserve_ms: float,
    ) -> Fill:
        began = clock_s()
        if wanted.key:
            await self._claim(wanted, link, reservation.key, replaces)
        assert auction.app is not None  # checked before reserving
        decision = auction.decision(timed_ms(started))
        item = Confirmation(key=reservation.key, app=auction.app, decision=decision, wait=wanted.wait)
        try:
            confirmed = await link.confirm(item, timeout_s=START_S if wanted.wait else RELEASE_RETRY_S * 10)
        except HawkerError as error:
            self._give_up(link, wanted, reservation.key)
            problem = "stopped answering" if isinstance(error, Unreachable) else f"failed ({error.message})"
            raise _in_doubt(link, wanted, problem) from error
        except asyncio.CancelledError:
            self._give_up(link, wanted, reservation.key)
            raise
        if (lost := confirmed.error) is not None:
            if lost.get("status") == LAPSED:
                text = f"the reservation was lost before it was confirmed: {lost.get('error')}"
                raise Conflict(text, hint=_again(wanted))
            self._give_up(link, wanted, reservation.key)
            raise _in_doubt(link, wanted, f"failed ({lost.get('error')})")
        timings = {
            "offers": decision.offers_ms,
            "reserve": reserve_ms,
            "confirm": timed_ms(began),
            "total": timed_ms(started),
        }
        return Fill(machine=bytes(confirmed.machine), worker=link.name, timings_ms=timings)

    async def _claim(self, wanted: Wanted, link: WorkerLink, order: str, replaces: str) -> None:
        """With a client's key: only the order that holds the claim may be confirmed."""
        key = wanted.claimant, wanted.app, wanted.key
        try:
            claimed = await self._claims.take(*key, link.name, order, replaces, without=wanted.silent)
        except BaseException:
            self._give_up(link, wanted, order)
            raise
        if claimed is not Claimed.ours:
            self._give_up(link, wanted, order)
            what = f"that replaces machine {wanted.replaces}" if wanted.replaces else "with this idempotency key"
            raise Conflict(f"another order {what} is being filled", hint=_again(wanted))

    async def _reserve(self, link: WorkerLink, order: Order) -> Reservation | Refusal:
        self._in_flight[link.name] = self._in_flight.get(link.name, Resources()) + order.resources
        try:
            answer = await link.reserve(order)
        finally:
            self._in_flight[link.name] -= order.resources
        if isinstance(answer, Reservation):
            self._last_left[link.name] = clock_s(), answer.free
        return answer

    def _counted(self, answer: Offer | Refusal, asked_at: float) -> Offer | Refusal:
        """An offer as it stands now: other orders of this broker may have booked there since it was asked for, or are
        about to."""
        if isinstance(answer, Refusal):
            return answer
        heard_at, left = self._last_left.get(answer.worker, (0.0, answer.free))
        free = smaller(answer.free, left) if heard_at > asked_at else answer.free
        return replace(answer, image_parts=None, free=free, in_flight=self._in_flight.get(answer.worker, Resources()))

    def _order(self, wanted: Wanted, key: str, region: str) -> Order:
        config = wanted.config
        return Order(
            key=key,
            app=wanted.app,
            region=region,
            name=wanted.name,
            config=config.raw,
            resources=config.resources(),
            skip_launch=wanted.skip_launch,
            cordoned=wanted.cordoned,
            lease_ttl_s=wanted.lease_ttl_s,
            owner=wanted.owner,
            request=wanted.request,
            trace=wanted.trace,
            machine=wanted.machine,
            generation=wanted.generation,
            image_timeout_s=wanted.image_timeout_s,
        )

    def _give_up(self, link: WorkerLink, wanted: Wanted, key: str) -> None:
        """Release an order in the background until the worker acknowledges it.

        A fill is undone only for a client without a key of its own. With one, asking again may have given the machine
        to the client already.
        """
        release = self._release(link, key, undo=not wanted.key)
        task = asyncio.get_running_loop().create_task(release, name=f"release {key}")
        self._releases[task] = None
        task.add_done_callback(lambda done: self._releases.pop(done, None))

    async def _release(self, link: WorkerLink, key: str, *, undo: bool) -> None:
        """Bounded by twice the lease: an unconfirmed reservation is gone by then, acknowledged or not. A worker that
        has moved meanwhile is asked where it is now."""
        deadline = asyncio.get_running_loop().time() + 2 * LEASE_S
        body = {"key": key, "cause": "the broker gave the order up", "undo": undo}
        while asyncio.get_running_loop().time() < deadline:
            try:
                there = self._fleet.links.get(link.name, link)
                await there.call("POST", "/v1/market/release", dict[str, Any], body)
            except HawkerError:
                await asyncio.sleep(RELEASE_RETRY_S)
            else:
                return
        _logger.error("release.unacknowledged", worker=link.name, order=key, cause="the broker gave the order up")


def newest_app(offers: list[Offer], known: AppRow | None = None) -> AppRow | None:
    """The app's newest row among the offers and in the catalog; None when nobody knows it or it was deleted."""
    rows = [msgspec.convert(o.app, AppRow) for o in offers if o.app is not None]
    rows += [known] if known else []
    newest = max(rows, key=lambda row: row.stamp_ms, default=None)
    return None if newest is None or newest.deleted else newest


def _not_taken(refusals: list[Refusal]) -> Refused | None:
    """The error of a worker that does not take what the order says, though this broker did: it is of another version.
    None when there was room nowhere, and no more."""
    refusal = next((r for r in refusals if r.error is not None), None)
    if refusal is None or refusal.error is None:
        return None
    details = {**(refusal.error.get("details") or {}), "refusals": msgspec.to_builtins(refusals)}
    error = Refused(f"{refusal.worker}: {refusal.error.get('error')}", details=details)
    error.status = refusal.status
    error.code = str(refusal.error.get("status", error.code))
    return error


def no_capacity(wanted: Wanted, regions: list[str], refusals: list[Refusal]) -> NoCapacity:
    """The error for an order that nobody filled: one sentence, and a reason with true figures per worker."""
    where = ", ".join(regions) or wanted.region
    guest = wanted.config.guest
    if not refusals:
        text, hint = f"no worker is in region {where}", "hawker regions shows the ones there are"
    elif all(r.reason is Reason.no_driver for r in refusals):
        names = ", ".join(dict.fromkeys(r.driver for r in refusals if r.driver)) or "such"
        reasons = "; ".join(r.sentence() for r in refusals)
        text = f"no worker in {where} can run {names} machines ({reasons})"
        hint = "hawker doctor, on a worker's host, tells what it lacks"
    else:
        asked = f"{guest.cpus} {guest.cpu_kind} cpus and {guest.memory_mb} MiB"
        reasons = "; ".join(r.sentence() for r in refusals)
        text = f"insufficient resources available to fulfill request: {asked} in {where} ({reasons})"
        hint = "hawker workers shows what is free; try a smaller guest or another region"
        if short := sorted({r.resource for r in refusals if r.reason is Reason.full}):
            hint += f"; {' and '.join(map(setting_of, short))} of the workers' configuration may be raised"
        for reason, remedy in _AT_ITS_DISK.items():
            if workers := [r.worker for r in refusals if r.reason is reason]:
                hint += f"; {remedy} of {', '.join(workers)}"
    return NoCapacity(text, hint=hint, details={"refusals": msgspec.to_builtins(refusals)})


async def book(links: list[WorkerLink], ask: Ask) -> list[Offer | Refusal]:
    """Ask all at once, with one deadline. Whose last offer did not come is asked, too, but hardly waited for longer
    than the others take: a worker that is cut off costs one order its deadline, not every order."""
    loop = asyncio.get_running_loop()
    offers = {link.name: loop.create_task(_offer(link, ask), name=f"offer of {link.name}") for link in links}
    prompt = [offers[link.name] for link in links if not link.missed]
    late = [offers[link.name] for link in links if link.missed]
    try:
        if prompt:
            await asyncio.wait(prompt)
        if late:
            await asyncio.wait(late, timeout=GRACE_S if prompt else None)
    finally:
        for offer in offers.values():
            offer.cancel()  # of those that are done nothing
    answers = [offer.result() for offer in offers.values() if offer.done() and not offer.cancelled()]
    return [answer for answer in answers if answer is not None]


async def _offer(link: WorkerLink, ask: Ask) -> Offer | Refusal | None:
    """None: no answer by the deadline, or an error in its place."""
    try:
        async with in_time(OFFERS_S):
            return await link.offer(ask)
    except (TimeoutError, Unreachable):
        link.missed = True
    except HawkerError:
        pass
    return None


def _in_doubt(link: WorkerLink, wanted: Wanted, problem: str) -> Unreachable:
    """The error for an order that may have been filled."""
    state = "the order may be filled" if wanted.key else "the order is being undone there"
    return Unreachable(f"{link.name} {problem} while it filled the order; {state}", hint=_again(wanted))


def _again(wanted: Wanted) -> str:
    if wanted.replaces:
        return "ask again"
    return "ask again with the same key" if wanted.key else "order again"


_logger = get_logger()

"""The worker's side of the market: offers, reservations with a lease, and confirming one into a machine.

The worker alone decides. A reservation checks and books in one commit; one that is not confirmed in time lapses by
the worker's own clock, so a broker that dies leaves nothing behind. A key names one order: asked again, the answer is
the same reservation, the machine it became, or a refusal because it was released (`worker.upkeep`: for how long).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.core import capacity
from hawker.core.life import wishes
from hawker.core.life.wishes import Plan
from hawker.errors import Conflict, DiskFull, Refused, Unreachable
from hawker.model.config import known_config, usual_runtime
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import Ask, Decision, Offer, Order, Reason, Refusal, Reservation
from hawker.model.rows import (
    AppRow,
    DecisionRow,
    FillRow,
    LeaseRow,
    MachineRow,
    ReservationRow,
    RunRow,
    TallyRow,
    VersionRow,
    WorkerRow,
)
from hawker.model.values import is_host_image
from hawker.network.addresses import machine_address
from hawker.services import Service
from hawker.store.tx import Reads, Tx
from hawker.worker import ledger, ports
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import Fingerprint
from hawker.worker.images.stock import NOTHING, Stock
from hawker.worker.machine import leases, tally
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import Request

LOOK_S = 15.0
"""How often the drivers are asked what they can do: since the last time one may have got, or lost, what it needs."""


class Lapsed(Conflict):
    """The reservation is not there any more: its time ran out or it was released. Nothing is held."""

    code = "lapsed"


class Market(Service):
    """Offers and orders of one worker. `drivers` is what each of its drivers found on this host, by name (`look`).
    `stock` is the worker's images; without one it runs none."""

    def __init__(self, context: WorkerContext, writer: MachineWriter, stock: Stock | None = None) -> None:
        self._context = context
        self._store, self._host = context.store, context.host
        self._name, self._region = context.settings.name, context.settings.region
        self._writer = writer
        self.drivers: Mapping[str, Fingerprint] = {}
        self._looked_s = 0.0
        self.stock = stock

    async def open(self) -> None:
        self.hold_images()
        await self.look()

    async def look(self) -> None:
        """Ask the drivers again what they can do on this host."""
        self._looked_s = asyncio.get_running_loop().time()
        self.drivers = await self._context.drivers.fingerprints()

    def hold_images(self) -> None:
        """At a start: keep the images of the reservations that are still there."""
        for row in self._store.read.select(ReservationRow):
            self._hold_image(row.id, row.order["config"])

    def offer(self, ask: Ask) -> Offer | Refusal:
        """What this worker has for an ask, now. Reads only; nothing is held."""
        reads = self._store.read.ahead(ledger.ROW, (WorkerRow, "worker"), (AppRow, ask.app), (TallyRow, ask.app))
        held = ledger.held(reads)
        if unfit := self._unfit(reads, ask.region, ask.runtime or usual_runtime(ask.image), ask.image):
            return unfit
        if short := capacity.shortfall(self._writer.capacity, held, ask.resources):
            return self._refusal(Reason.full, short)
        lack = self.stock.lack(ask.image, ask.parts) if self.stock else NOTHING
        tally = reads.get(TallyRow, ask.app)
        return Offer(
            worker=self._name,
            region=self._region,
            capacity=self._writer.capacity,
            free=capacity.free(self._writer.capacity, held),
            app_machines=tally.machines if tally else 0,
            image_missing_bytes=lack.bytes,
            image_known=lack.known,
            image_transfer_ms=lack.transfer_ms,
            image_parts=lack.parts,
            app=reads.get(AppRow, ask.app),
        )

    async def reserve(self, order: Order) -> Reservation | Refusal:
        """Check and book in one commit. Repeating it with the same key gives the same reservation."""

        def change(tx: Tx) -> Reservation | Refusal:
            if done := tx.get(FillRow, order.key):
                if not done.machine:
                    return self._refusal(Reason.in_doubt)  # released: this order was given up
                return self._reservation(tx, order.key, done.machine)
            there = tx.get(ReservationRow, order.key)
            if there and there.expires_at_ms > tx.steady_ms:
                return self._reservation(tx, there.id, there.machine, there.expires_at_ms)
            self._lapse(tx)
            if there:
                return self._refusal(Reason.in_doubt)  # its time ran out: this order was given up
            config = known_config(order.config)  # the broker that took it may be older or newer than this worker
            if unfit := self._unfit(tx, order.region, runtime_of(order.config), order.config["image"]):
                return unfit
            if order.machine and tx.get(MachineRow, order.machine):
                return self._refusal(Reason.known_machine)
            if config.services and (short := ports.shortfall(tx, self._writer.ports, config)):
                return self._refusal(Reason.full, short)
            row = ReservationRow(
                id=order.key,
                machine=order.machine or self._host.machine_id(),
                order=msgspec.to_builtins(order),
                resources=order.resources,
                created_at_ms=tx.steady_ms,
                expires_at_ms=tx.steady_ms + int(order.hold_s * 1000),
            )
            tx.record("reservation.held", order.key, cause=_cause(order), trace=order.trace)
            try:
                ledger.adjust(tx, self._writer.capacity, Resources(), order.resources)
            except ledger.Full as full:
                raise _Refused(self._refusal(Reason.full, full.short)) from full
            tx.put(row)
            tx.after_commit(lambda: self._hold_image(order.key, order.config))
            return self._reservation(tx, row.id, row.machine, row.expires_at_ms)

        try:
            return await self._store.submit(change)
        except _Refused as refused:
            return refused.refusal
        except DiskFull:
            return self._refusal(Reason.disk_full)
        except Refused as error:
            return self.invalid(error)

    def invalid(self, error: Refused) -> Refusal:
        """The answer to an order, or an ask, that is not valid here."""
        return replace(self._refusal(Reason.invalid), error=error.body(), status=error.status)

    async def confirm(
        self, key: str, app: AppRow, decision: Decision | None
    ) -> tuple[MachineRow, LeaseRow | None, str]:
        """Turn a reservation into its machine: the fill. Returns the machine as created, its lease if the order
        asked for one, and the run that launches it.

        Repeating gives the same machine and an empty run. Raises `Lapsed` when the reservation is gone.
        """

        def change(tx: Tx) -> tuple[MachineRow, LeaseRow | None, str]:
            done = tx.get(FillRow, key)
            if done and done.machine:
                row = get_machine(tx, done.machine)
                return row, leases.current(tx, row.id, tx.steady_ms), ""
            there = tx.get(ReservationRow, key)
            if there is None or there.expires_at_ms <= tx.steady_ms:
                raise Lapsed(
                    f"the reservation of order {key} on {self._name} has lapsed", details={"worker": self._name}
                )
            order = msgspec.convert(there.order, Order)
            request = Request(id=order.request, owner=order.owner, trace=order.trace)
            plan = wishes.create(of_host=is_host_image(order.config["image"]), skip_launch=order.skip_launch)
            row = self._machine(tx, there, order, app, plan)

            def writes(tx: Tx, run: RunRow) -> None:
                tx.delete(ReservationRow, key)
                tx.put(FillRow(id=key, machine=row.id, at_ms=tx.now_ms))
                if not app.deployed:
                    tx.put(replace(app, deployed=True, stamp_ms=max(app.stamp_ms + 1, tx.now_ms)))
                elif tx.get(AppRow, app.name) is None:
                    tx.put(app)
                tx.put(VersionRow(id=row.version, machine=row.id, config=order.config, created_at_ms=tx.now_ms))
                if decision:
                    tx.put(DecisionRow(machine=row.id, decision=msgspec.to_builtins(decision)))
                tally.count(tx, row.app, 1)
                tx.after_commit(lambda: self._hand_over(key, row))
                placed = row
                if row.config.get("services"):
                    config = known_config(row.config)
                    given = ports.assign(tx, self._writer.ports, row.id, config, holder=self._writer.holder)
                    placed = replace(row, ports=given)
                tx.put(placed)  # it takes over what the reservation held: the ledger stays as it is
                self._writer.event(tx, placed, plan.event, plan.status, run)

            run = self._context.runner.begin(
                tx,
                plan.flow,
                row.id,
                steps=plan.steps,
                cause=request.cause,
                trace=order.trace,
                args={"image_timeout_s": order.image_timeout_s} if order.image_timeout_s else {},
                writes=writes,
                free=True,  # it is new
            )
            after = get_machine(tx, row.id)
            lease = leases.acquire(tx, self._host, after, request, order.lease_ttl_s) if order.lease_ttl_s else None
            return after, lease, "" if run.status != "active" else run.id

        return await self._store.submit(change)

    async def release(self, key: str, cause: str) -> str:
        """Give up an order for good, whatever became of it: a reservation is given back, one that arrives later is
        refused, a machine that was confirmed is destroyed. Returns the id of that machine, or "". Repeating is
        harmless."""

        def change(tx: Tx) -> str:
            done = tx.get(FillRow, key)
            if done:
                return done.machine
            tx.record("reservation.released", key, cause=cause)
            if there := tx.get(ReservationRow, key):
                tx.delete(ReservationRow, key)
                tx.after_commit(lambda: self._let_image_go(key))
                ledger.adjust(tx, self._writer.capacity, there.resources, Resources())
            tx.put(FillRow(id=key, machine="", at_ms=tx.now_ms))
            return ""

        return await self._store.submit(change)

    def fate(self, key: str) -> str:
        """What became of an order: "held", "released", "unknown", or the id of its machine."""
        if done := self._store.read.get(FillRow, key):
            return done.machine or "released"
        there = self._store.read.get(ReservationRow, key)
        if there is None:
            return "unknown"
        return "held" if there.expires_at_ms > self._host.steady_ms() else "released"

    async def sweep(self) -> int:
        """Lapse reservations whose time ran out. Returns how many. Also asks the drivers again now and then."""
        lapsed = await self._store.submit(self._lapse)
        if asyncio.get_running_loop().time() - self._looked_s >= LOOK_S:
            with suppress(Unreachable):
                await self.look()
        return lapsed

    def _lapse(self, tx: Tx) -> int:
        expired = tx.select(ReservationRow, "expires_at_ms <= ?", (tx.steady_ms,))
        for row in expired:
            tx.record("reservation.lapsed", row.id, cause="local rule: not confirmed in time")
            tx.delete(ReservationRow, row.id)
            tx.after_commit(partial(self._let_image_go, row.id))
            tx.put(FillRow(id=row.id, machine="", at_ms=tx.now_ms))
            ledger.adjust(tx, self._writer.capacity, row.resources, Resources())
        return len(expired)

    def _hold_image(self, key: str, config: dict[str, Any]) -> None:
        if self.stock:
            self.stock.hold(f"reservation {key}", config["image"])

    def _let_image_go(self, key: str) -> None:
        if self.stock:
            self.stock.release(f"reservation {key}")

    def _hand_over(self, key: str, row: MachineRow) -> None:
        """Keep for the machine the image that was kept for its reservation. If it is not there yet, the machine's first
        run fetches it, also when the machine is not to start."""
        if self.stock:
            self.stock.hold(row.id, row.config["image"])
            self._let_image_go(key)

    def _unfit(self, reads: Reads, region: str, runtime: str, image: str) -> Refusal | None:
        """Why this worker takes no order at all for this region and runtime, whatever its size."""
        if region != self._region:
            return self._refusal(Reason.wrong_region)
        driver = self.drivers.get(runtime)
        if driver is None or not driver.healthy:
            problem = driver.problem if driver else ""
            return replace(self._refusal(Reason.no_driver), driver=runtime, problem=problem)
        if not is_host_image(image) and not driver.capabilities.images:
            problem = "it runs no images here"
            return replace(self._refusal(Reason.no_driver), driver=runtime, problem=problem)
        if self._store.failed:
            return replace(self._refusal(Reason.disk_failed), problem=self._store.failed)
        if not self._store.takes_orders:
            return self._refusal(Reason.disk_full)
        me = reads.get(WorkerRow, "worker")
        return self._refusal(Reason.cordoned) if me and me.cordoned else None

    def _refusal(self, reason: Reason, short: capacity.Shortfall | None = None) -> Refusal:
        figures = {"resource": short.resource, "wanted": short.wanted, "free": short.free} if short else {}
        return Refusal(worker=self._name, region=self._region, reason=reason, **figures)  # type: ignore[arg-type]

    def _reservation(self, reads: Reads, key: str, machine: str, expires_at_ms: int = 0) -> Reservation:
        """One that does not expire has been confirmed."""
        return Reservation(
            key=key,
            worker=self._name,
            region=self._region,
            machine=machine,
            expires_at_ms=expires_at_ms,
            free=capacity.free(self._writer.capacity, ledger.held(reads)),
            state="held" if expires_at_ms else "confirmed",
        )

    def _machine(self, tx: Tx, reservation: ReservationRow, order: Order, app: AppRow, plan: Plan) -> MachineRow:
        return MachineRow(
            id=reservation.machine,
            app=order.app,
            name=order.name,
            region=self._region,
            state=State.created,
            desired=plan.desired or "started",
            version=self._host.ulid(),
            config=order.config,
            resources=order.resources,
            created_at_ms=tx.now_ms,
            updated_at_ms=tx.now_ms,
            cause=_cause(order),
            private_ip=machine_address(app.number, self._name, reservation.machine),
            order=order.key,
            generation=order.generation,
            cordoned=order.cordoned,
            driver=runtime_of(order.config),
        )


class _Refused(Exception):
    """Raised inside a change, so that nothing of the change is kept."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence())
        self.refusal = refusal


def runtime_of(config: Mapping[str, Any]) -> str:
    """The driver that a stored configuration names, or the one that is usual for its image."""
    return config.get("runtime") or usual_runtime(config["image"])


def _cause(order: Order) -> str:
    return Request(id=order.request or "unknown", owner=order.owner).cause

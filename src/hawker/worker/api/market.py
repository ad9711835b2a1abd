"""The worker's handlers for brokers: lists of asks, orders and confirmations in one request, one answer for each.

Brokers collect what arrives in one tick, so that 64 orders at once cost two requests and two commits. Only agents reach
these paths. Every call may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from hawker import __version__
from hawker.errors import HawkerError, Invalid, NotFound
from hawker.http.call import Call
from hawker.http.handlers import Route, on, on_each
from hawker.model.market import (
    AppKept,
    Ask,
    ClaimKey,
    Confirmed,
    ConfirmOrder,
    DescribeWorker,
    Done,
    Failed,
    Fate,
    FindFate,
    KeepApp,
    ListAppsKept,
    Located,
    LocateMachine,
    Offer,
    Order,
    Query,
    Refusal,
    Released,
    ReleaseOrder,
    Reservation,
    Rows,
    SeekMachine,
    Seen,
    SetCordon,
    TellGone,
    WorkerStatus,
)
from hawker.model.rows import UNENDED, AppRow, ClaimRow, MachineRow, TallyRow, WorkerRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.sql import run_query
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker import ledger
from hawker.worker.context import WorkerContext
from hawker.worker.machine.parts import MachineParts
from hawker.worker.market import Market
from hawker.worker.request import Request, request_of


async def claim(store: Store, request: ClaimKey) -> ClaimRow:
    """The arbiter's side of a client's idempotency key: which order, on which worker, may fill it (decision 6). The
    first claim wins; a later one only when it names the order it replaces. Returns the claim in force."""

    def change(tx: Tx) -> ClaimRow:
        there = tx.get(ClaimRow, request.id)
        if there and there.order != request.replaces:
            return there
        tx.record("claim.taken", request.id, cause=f"order {request.order}")
        row = ClaimRow(id=request.id, worker=request.worker, order=request.order, at_ms=tx.now_ms)
        tx.put(row)
        return row

    return await store.submit(change)


START_WAIT_S = 40.0
"""So long a confirmation waits for its machine to start. Less than a broker waits for the confirmation, which takes an
order for one in doubt after that, and undoes it."""


class MarketApi(Service):
    """What a broker asks of a worker."""

    def __init__(
        self,
        context: WorkerContext,
        market: Market,
        machine: MachineParts,
        forget: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._context, self._store = context, context.store
        self._market = market
        self._machine = machine
        self._forget = forget

    def routes(self) -> tuple[Route, ...]:
        return (
            on_each(Ask, self.offers),
            on_each(Order, self.reserve),
            on_each(ConfirmOrder, self.confirm),
            on(ReleaseOrder, self.release),
            on(FindFate, self.fate),
            on(ClaimKey, self.claim),
            on(ListAppsKept, self.apps),
            on(KeepApp, self.keep_app),
            on(LocateMachine, self.locate),
            on(SeekMachine, self.seen),
            on(DescribeWorker, self.worker),
            on(SetCordon, self.cordon),
            on(TellGone, self.forget),
            on(Query, self.sql),
        )

    async def offers(self, call: Call, asks: Sequence[Ask | Invalid]) -> list[Offer | Refusal | Failed]:
        return [self._offer(ask) for ask in asks]

    def _offer(self, ask: Ask | Invalid) -> Offer | Refusal | Failed:
        if isinstance(ask, Invalid):
            return self._market.invalid(ask)
        try:
            return self._market.offer(ask)
        except Exception as error:
            return Failed(error=_told("offer", error))

    async def reserve(self, call: Call, orders: Sequence[Order | Invalid]) -> list[Reservation | Refusal | Failed]:
        return await asyncio.gather(*(self._reserve(order) for order in orders))

    async def _reserve(self, order: Order | Invalid) -> Reservation | Refusal | Failed:
        if isinstance(order, Invalid):
            return self._market.invalid(order)
        try:
            return await self._market.reserve(order)
        except Exception as error:
            return Failed(error=_told("reserve", error))

    async def confirm(self, call: Call, items: Sequence[ConfirmOrder | Invalid]) -> list[Confirmed]:
        return await asyncio.gather(*(self._confirm(item) for item in items))

    async def _confirm(self, item: ConfirmOrder | Invalid) -> Confirmed:
        if isinstance(item, Invalid):
            return Confirmed(status=item.status, error=item.body())
        try:
            row, lease, run_id = await self._market.confirm(item.key, item.app, item.decision)
            if item.wait and run_id:
                with suppress(TimeoutError):  # an image may take longer than whoever ordered waits
                    async with asyncio.timeout(START_WAIT_S):
                        await self._machine.machines.wait_ended(run_id)
                row = self._store.read.get(MachineRow, row.id) or row
            machine = self._machine.api.view(row, nonce=lease.nonce if lease else "")
        except HawkerError as error:
            return Confirmed(status=error.status, error=error.body())
        except Exception as error:
            told = HawkerError(_told("confirm", error))
            return Confirmed(status=told.status, error=told.body())
        return Confirmed(machine=msgspec.Raw(msgspec.json.encode(machine)))

    async def release(self, call: Call, request: ReleaseOrder) -> Released:
        machine = await self._market.release(request.key, request.cause)
        if machine and request.undo:
            row = self._store.read.get(MachineRow, machine)
            if row:
                by = Request(id=call.id, owner=request.cause)
                await self._machine.machines.destroy(row.app, row.id, by, force=True)
        return Released(machine=machine)

    async def fate(self, call: Call, request: FindFate) -> Fate:
        return Fate(fate=self._market.fate(request.key))

    async def claim(self, call: Call, request: ClaimKey) -> ClaimRow | None:
        if not request.order:
            return self._store.read.get(ClaimRow, request.id)
        return await claim(self._store, request)

    async def apps(self, call: Call, request: ListAppsKept) -> list[AppKept]:
        reads = self._store.read
        rows = reads.select(AppRow, "id = ?", (request.name,)) if request.name else reads.select(AppRow)
        tallies = {row.name: reads.get(TallyRow, row.name) for row in rows}
        return [AppKept(app=row, machines=tally.machines if (tally := tallies[row.name]) else 0) for row in rows]

    async def keep_app(self, call: Call, request: KeepApp) -> AppRow:
        def change(tx: Tx) -> AppRow:
            there = tx.get(AppRow, request.app.name)
            if there and (there.stamp_ms >= request.app.stamp_ms or (request.if_absent and not there.deleted)):
                return there
            tx.record("app.kept", request.app.name, cause=request_of(call).cause, trace=call.trace)
            tx.put(request.app)
            return request.app

        return await self._store.submit(change)

    async def locate(self, call: Call, request: LocateMachine) -> Located:
        row = self._store.read.get(MachineRow, request.machine_id)
        if row is None:
            raise NotFound(f"machine not found: {request.machine_id}")
        return Located(app=row.app, generation=row.generation)

    async def seen(self, call: Call, request: SeekMachine) -> Seen:
        sql = f"select {', '.join(Seen.__struct_fields__)} from machines where id = ?"
        catalog = self._context.catalog
        found = catalog.rows(sql, (request.machine_id,)) if catalog else []
        return Seen(**dict(zip(Seen.__struct_fields__, found[0], strict=True))) if found else Seen()

    async def worker(self, call: Call, request: DescribeWorker) -> WorkerStatus:
        me = self._store.read.get(WorkerRow, "worker")
        assert me is not None  # written before the worker serves
        machines = self._store.read.query("select state, count(*) from machine group by state")
        parked = self._store.read.query(f"select count(*) from run where {UNENDED} and status = 'parked'")
        return WorkerStatus(
            name=me.name,
            region=me.region,
            version=__version__,
            cordoned=me.cordoned,
            disk_full=not self._store.takes_orders and not self._store.failed,
            disk_failed=bool(self._store.failed),
            capacity=self._machine.writer.capacity,
            held=ledger.held(self._store.read),
            machines=dict(machines),
            driver=await self._context.drivers.fingerprint(),
            parked_runs=parked[0][0],
        )

    async def cordon(self, call: Call, request: SetCordon) -> WorkerRow:
        def change(tx: Tx) -> WorkerRow:
            me = tx.get(WorkerRow, "worker")
            assert me is not None
            kind = "worker.cordoned" if request.cordoned else "worker.uncordoned"
            tx.record(kind, me.name, cause=request_of(call).cause, trace=call.trace)
            me = replace(me, cordoned=request.cordoned)
            tx.put(me)
            return me

        return await self._store.submit(change)

    async def forget(self, call: Call, request: TellGone) -> Done:
        if self._forget is None:
            raise NotFound("this worker is no member of a catalog")
        await self._forget(request.name, request_of(call).cause)
        return Done()

    async def sql(self, call: Call, request: Query) -> Rows:
        if not request.query.strip():
            raise Invalid("query", request.query, "give a select statement")
        loop = asyncio.get_running_loop()
        path = str(self._context.settings.directory / "worker.db")
        columns, rows = await loop.run_in_executor(None, run_query, path, request.query)
        return Rows(columns=columns, rows=rows)


def _told(what: str, error: Exception) -> str:
    """What a broker is told of an error with one of those that came together. One that is none of ours is a fault here:
    it is written down, and its neighbours are answered."""
    if isinstance(error, HawkerError):
        return error.message
    _logger.error("market.failed", call=what, exc_info=error)
    return f"internal error: {type(error).__name__}"


_logger = get_logger()

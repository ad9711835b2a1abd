"""The worker's handlers for brokers: lists of asks, orders and confirmations in one request, one answer for each.

Brokers collect what arrives in one tick, so that 64 orders at once cost one request and one commit. Only agents reach
these paths. Every call may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker import __version__
from hawker.catalog.view import View
from hawker.errors import HawkerError, Invalid, NotFound
from hawker.http.app import Handler
from hawker.http.call import Call
from hawker.model.market import Ask, Decision, Failed, Offer, Order, Refusal, Reservation
from hawker.model.rows import UNENDED, AppRow, ClaimRow, MachineRow, TallyRow, WorkerRow
from hawker.store.db import Store
from hawker.store.sql import run_query
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker import ledger
from hawker.worker.claims import claim
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.machine.api.machines import MachineApi
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.writer import MachineWriter
from hawker.worker.market import Market
from hawker.worker.request import Request, request_of


class Confirm(msgspec.Struct, kw_only=True):
    """`wait`: answer only once the machine has started or failed to."""

    key: str
    app: AppRow
    decision: Decision | None = None
    wait: bool = False


class Confirmed(msgspec.Struct, kw_only=True):
    """A machine in the API's form, or an error in the API's form with its status."""

    status: int = 200
    machine: Any = None
    error: dict[str, Any] | None = None


class Release(msgspec.Struct, kw_only=True):
    key: str
    cause: str
    undo: bool = False  # also destroy the machine if the order was confirmed


class Key(msgspec.Struct, kw_only=True):
    key: str


START_WAIT_S = 40.0
"""So long a confirmation waits for its machine to start. Less than a broker waits for the confirmation, which takes an
order for one in doubt after that, and undoes it."""


class Claim(msgspec.Struct, kw_only=True):
    """Without `order`: only look."""

    id: str
    worker: str = ""
    order: str = ""
    replaces: str = ""


class PutApp(msgspec.Struct, kw_only=True):
    """With `if_absent`, an app of this name that is there stays as it is."""

    app: AppRow
    if_absent: bool = False


class Cordon(msgspec.Struct, kw_only=True):
    cordoned: bool


class Forget(msgspec.Struct, kw_only=True):
    name: str


class Query(msgspec.Struct, kw_only=True):
    query: str


class MarketApi:
    """Handlers by (method, path) in `routes()`."""

    def __init__(
        self,
        store: Store,
        drivers: DriverSet,
        log: MachineWriter,
        market: Market,
        machines: Machines,
        machine_api: MachineApi,
        path: str,
        catalog: View | None = None,
        forget: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._drivers = drivers
        self._log = log
        self._market = market
        self._machines = machines
        self._machine_api = machine_api
        self._path = path
        self._catalog = catalog
        self._forget = forget

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/v1/market/offers"): self.offers,
            ("POST", "/v1/market/reserve"): self.reserve,
            ("POST", "/v1/market/confirm"): self.confirm,
            ("POST", "/v1/market/release"): self.release,
            ("POST", "/v1/market/fate"): self.fate,
            ("POST", "/v1/market/claim"): self.claim,
            ("GET", "/v1/market/apps"): self.apps,
            ("POST", "/v1/market/apps"): self.put_app,
            ("GET", "/v1/market/machines/{machine_id}"): self.locate,
            ("GET", "/v1/market/seen/{machine_id}"): self.seen,
            ("GET", "/v1/market/worker"): self.worker,
            ("POST", "/v1/market/cordon"): self.cordon,
            ("POST", "/v1/market/forget"): self.forget,
            ("POST", "/v1/market/sql"): self.sql,
        }

    async def offers(self, call: Call) -> Any:
        return [self._offer(ask) for ask in call.read_each(Ask)]

    def _offer(self, ask: Ask | Invalid) -> Offer | Refusal | Failed:
        if isinstance(ask, Invalid):
            return self._market.invalid(ask)
        try:
            return self._market.offer(ask)
        except Exception as error:
            return Failed(error=_told("offer", error))

    async def reserve(self, call: Call) -> Any:
        return await asyncio.gather(*(self._reserve(order) for order in call.read_each(Order)))

    async def _reserve(self, order: Order | Invalid) -> Reservation | Refusal | Failed:
        if isinstance(order, Invalid):
            return self._market.invalid(order)
        try:
            return await self._market.reserve(order)
        except Exception as error:
            return Failed(error=_told("reserve", error))

    async def confirm(self, call: Call) -> Any:
        return await asyncio.gather(*(self._confirm(item) for item in call.read_each(Confirm)))

    async def _confirm(self, item: Confirm | Invalid) -> Confirmed:
        if isinstance(item, Invalid):
            return Confirmed(status=item.status, error=item.body())
        try:
            row, lease, run_id = await self._market.confirm(item.key, item.app, item.decision)
            if item.wait and run_id:
                with suppress(TimeoutError):  # an image may take longer than whoever ordered waits
                    async with asyncio.timeout(START_WAIT_S):
                        await self._machines.wait_ended(run_id)
                row = self._store.read.get(MachineRow, row.id) or row
            machine = self._machine_api.view(row, nonce=lease.nonce if lease else "")
        except HawkerError as error:
            return Confirmed(status=error.status, error=error.body())
        except Exception as error:
            told = HawkerError(_told("confirm", error))
            return Confirmed(status=told.status, error=told.body())
        return Confirmed(machine=machine)

    async def release(self, call: Call) -> Any:
        item = call.read(Release)
        machine = await self._market.release(item.key, item.cause)
        if machine and item.undo:
            row = self._store.read.get(MachineRow, machine)
            if row:
                await self._machines.destroy(row.app, row.id, Request(id=call.id, owner=item.cause), force=True)
        return {"released": True, "machine": machine}

    async def fate(self, call: Call) -> Any:
        return {"fate": self._market.fate(call.read(Key).key)}

    async def claim(self, call: Call) -> Any:
        item = call.read(Claim)
        if not item.order:
            return self._store.read.get(ClaimRow, item.id)
        return await claim(self._store, item.id, item.worker, item.order, item.replaces)

    async def apps(self, call: Call) -> Any:
        name = call.request.query_params.get("name", "")
        rows = self._store.read.select(AppRow, "id = ?", (name,)) if name else self._store.read.select(AppRow)
        tallies = {row.name: self._store.read.get(TallyRow, row.name) for row in rows}
        return [{"app": row, "machines": tally.machines if (tally := tallies[row.name]) else 0} for row in rows]

    async def put_app(self, call: Call) -> Any:
        """Keep an app's row if its stamp is newer than the one that is here. Returns the row that is here
        afterwards."""
        item = call.read(PutApp)

        def change(tx: Tx) -> AppRow:
            there = tx.get(AppRow, item.app.name)
            if there and (there.stamp_ms >= item.app.stamp_ms or (item.if_absent and not there.deleted)):
                return there
            tx.record("app.kept", item.app.name, cause=request_of(call).cause, trace=call.trace)
            tx.put(item.app)
            return item.app

        return await self._store.submit(change)

    async def locate(self, call: Call) -> Any:
        row = self._store.read.get(MachineRow, call.path("machine_id"))
        if row is None:
            raise NotFound(f"machine not found: {call.path('machine_id')}")
        return {"app": row.app, "generation": row.generation}

    async def seen(self, call: Call) -> Any:
        """Which worker of the region has a machine, as far as the catalog knows: of use when that one is silent."""
        columns = ("worker", "app", "name", "region", "generation")
        sql = f"select {', '.join(columns)} from machines where id = ?"
        found = self._catalog.rows(sql, (call.path("machine_id"),)) if self._catalog else []
        return dict(zip(columns, found[0], strict=True)) if found else {}

    async def worker(self, call: Call) -> Any:
        me = self._store.read.get(WorkerRow, "worker")
        assert me is not None  # written before the worker serves
        machines = self._store.read.query("select state, count(*) from machine group by state")
        parked = self._store.read.query(f"select count(*) from run where {UNENDED} and status = 'parked'")
        return {
            "name": me.name,
            "region": me.region,
            "version": __version__,
            "cordoned": me.cordoned,
            "disk_full": not self._store.takes_orders and not self._store.failed,
            "disk_failed": bool(self._store.failed),
            "capacity": self._log.capacity,
            "held": ledger.held(self._store.read),
            "machines": dict(machines),
            "driver": await self._drivers.fingerprint(),
            "parked_runs": parked[0][0],
        }

    async def cordon(self, call: Call) -> Any:
        cordoned = call.read(Cordon).cordoned

        def change(tx: Tx) -> WorkerRow:
            me = tx.get(WorkerRow, "worker")
            assert me is not None
            kind = "worker.cordoned" if cordoned else "worker.uncordoned"
            tx.record(kind, me.name, cause=request_of(call).cause, trace=call.trace)
            me = replace(me, cordoned=cordoned)
            tx.put(me)
            return me

        return await self._store.submit(change)

    async def forget(self, call: Call) -> Any:
        """Tell the catalog that another worker is gone for good."""
        if self._forget is None:
            raise NotFound("this worker is no member of a catalog")
        await self._forget(call.read(Forget).name, request_of(call).cause)
        return {}

    async def sql(self, call: Call) -> Any:
        query = call.read(Query).query
        if not query.strip():
            raise Invalid("query", query, "give a select statement")
        loop = asyncio.get_running_loop()
        columns, rows = await loop.run_in_executor(None, run_query, self._path, query)
        return {"columns": columns, "rows": rows}


def _told(what: str, error: Exception) -> str:
    """What a broker is told of an error with one of those that came together. One that is none of ours is a fault here:
    it is written down, and its neighbours are answered."""
    if isinstance(error, HawkerError):
        return error.message
    _logger.error("market.failed", call=what, exc_info=error)
    return f"internal error: {type(error).__name__}"


_logger = get_logger()

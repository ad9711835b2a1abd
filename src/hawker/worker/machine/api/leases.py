"""The worker's handlers for machines' leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hawker.errors import NotFound
from hawker.host import Host
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import api, views
from hawker.model import machine_calls as calls
from hawker.model.call_bases import AnyOfMachine
from hawker.model.rows import LeaseRow, MachineRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.machine import leases
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import request_of


class LeaseApi(Service):
    """`row` is a request's machine."""

    def __init__(self, store: Store, host: Host, row: Callable[[AnyOfMachine], MachineRow]) -> None:
        self._store = store
        self._host = host
        self._row = row

    def routes(self) -> tuple[Route, ...]:
        return (
            on(calls.ShowLease, self.show),
            on(calls.AcquireLease, self.create),
            on(calls.ReleaseLease, self.release),
        )

    async def show(self, call: Call, request: calls.ShowLease) -> Any:
        row = self._row(request)
        lease = leases.current(self._store.read, row.id, self._host.steady_ms())
        if lease is None:
            raise NotFound(f"lease not found for machine {row.id}")
        return api.LeaseReply(status="success", data=views.lease_view(lease, row))

    async def create(self, call: Call, request: calls.AcquireLease) -> Any:
        row = self._row(request)
        ttl = leases.TTL_S_DEFAULT if request.ttl is None else request.ttl
        asker = request_of(call)

        def change(tx: Tx) -> tuple[LeaseRow, MachineRow]:
            now = get_machine(tx, row.id)  # an update may be in the same commit, before this
            return leases.acquire(tx, self._host, now, asker, ttl, request.description or ""), now

        lease, leased = await self._store.submit(change)
        return api.LeaseReply(status="success", data=views.lease_view(lease, leased))

    async def release(self, call: Call, request: calls.ReleaseLease) -> Any:
        row, asker = self._row(request), request_of(call)
        await self._store.submit(lambda tx: leases.release(tx, row, asker))
        return api.OkData()

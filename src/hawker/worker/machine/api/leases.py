"""The worker's handlers for machines' leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hawker.errors import NotFound
from hawker.host import Host
from hawker.http.app import Handler
from hawker.http.call import Call
from hawker.model import api, views
from hawker.model.rows import LeaseRow, MachineRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.machine import leases
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import request_of


class LeaseApi:
    """Handlers by operation in `handlers()`. `row` is a request's machine."""

    def __init__(self, store: Store, host: Host, row: Callable[[Call], MachineRow]) -> None:
        self._store = store
        self._host = host
        self._row = row

    def handlers(self) -> dict[str, Handler]:
        return {
            "Machines_show_lease": self.show,
            "Machines_create_lease": self.create,
            "Machines_release_lease": self.release,
        }

    async def show(self, call: Call) -> Any:
        row = self._row(call)
        lease = leases.current(self._store.read, row.id, self._host.steady_ms())
        if lease is None:
            raise NotFound(f"lease not found for machine {row.id}")
        return api.LeaseReply(status="success", data=views.lease_view(lease, row))

    async def create(self, call: Call) -> Any:
        row = self._row(call)
        body = call.read(api.AcquireLease)
        ttl = body.ttl if body.ttl is not None else call.number("ttl", leases.TTL_S_DEFAULT, 1, leases.TTL_S_MAX)
        request = request_of(call)

        def change(tx: Tx) -> tuple[LeaseRow, MachineRow]:
            now = get_machine(tx, row.id)  # an update may be in the same commit, before this
            return leases.acquire(tx, self._host, now, request, ttl, body.description or ""), now

        lease, leased = await self._store.submit(change)
        return api.LeaseReply(status="success", data=views.lease_view(lease, leased))

    async def release(self, call: Call) -> Any:
        row, request = self._row(call), request_of(call)
        await self._store.submit(lambda tx: leases.release(tx, row, request))
        return api.OkData()

"""Delegates the machines whose doors this proxy has to a program that carries requests past it."""

from __future__ import annotations

import asyncio

from hawker.core.pool_entries import PoolEntry
from hawker.core.routing import delegable
from hawker.errors import StoreError
from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.apps.routed_app import EndpointGroup
from hawker.proxy.catalog_view.index import App, Machine
from hawker.proxy.delegation import Delegate, DelegatedMachine, Delegation
from hawker.proxy.machines.door import RUNNING, Door


class AppDelegator:
    """A `hawker.proxy.delegation.Delegator` for the apps of this proxy."""

    def __init__(self, app_table: AppTable) -> None:
        self._app_table = app_table
        app_table.index.on_machine.append(self._machine)
        app_table.index.on_app.append(self._app)
        app_table.on_door.append(self._door)

    def delegate_to(self, delegate: Delegate | None) -> None:
        self._app_table.delegate_to(delegate)

    def delegation(self, app: str, port: int) -> Delegation | None:
        try:
            routed = self._app_table.load(app)
        except StoreError:
            return None
        found = routed.at(port) if routed else None
        if found is None:
            return None
        group, service = found
        machines: dict[str, DelegatedMachine] = {}
        if not group.wait_queue.before(""):  # requests that wait here came before those that the delegate would get
            for machine, entry in group.pool.entries.items():
                endpoint: Endpoint = entry.data
                slots = _slots(entry)
                if slots <= 0 or group.wait_queue.before(machine):
                    continue
                if isinstance(endpoint.owner, Door) and not endpoint.owner.closing:
                    machines[machine] = DelegatedMachine(endpoint.address, slots)
        return Delegation(service, machines)

    def filled(self, app: str, port: int, machine: str, slots: int, now: int, moved: bool) -> None:
        group = self._group(app, port)
        entry = group.pool.entries.get(machine) if group else None
        if group is None or entry is None:
            return
        before = entry.others
        if (slots, now) != (entry.delegated, before):
            group.pool.delegate(entry, slots, now)
            for _ in range(before - now):
                group.wait_queue.one(machine)
        if (moved or now) and isinstance(entry.data.owner, Door):
            entry.data.owner.used_at = asyncio.get_running_loop().time()

    def refused(self, app: str, port: int, machine: str) -> None:
        group = self._group(app, port)
        entry = group.pool.entries.get(machine) if group else None
        if entry is not None:
            entry.data.owner.failed(entry.data, "refused")

    def _group(self, app: str, port: int) -> EndpointGroup | None:
        try:
            routed = self._app_table.find(app)
        except StoreError:
            return None
        found = routed.at(port) if routed else None
        return found[0] if found else None

    def _machine(self, app: App, before: Machine | None, now: Machine | None) -> None:
        self._changed(app.name)

    def _app(self, app: App) -> None:
        self._changed(app.name)

    def _door(self, door: Door) -> None:
        self._changed(door.machine.app)

    def _changed(self, app: str) -> None:
        if self._app_table.delegate is not None:
            self._app_table.delegate.changed(app)


def _slots(entry: PoolEntry) -> int:
    """How many slots of a machine may be delegated, beside those that requests from here have."""
    row = entry.row
    if entry.home is None or row.state != RUNNING or not row.healthy:
        return 0
    if row.cordoned or entry.closing or entry.waking or entry.rests_until:
        return 0
    most = delegable(row.soft, row.hard)
    return most if entry.delegated == most or not row.hard else min(most, row.hard - entry.own)

"""The worker's handlers for runs: to see what is under way or parked, try a parked step again, give a run up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hawker.errors import Conflict, Invalid, NotFound
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import api, fleet_calls, views
from hawker.model.rows import UNENDED, RunRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.worker.flows.runner import Runner
from hawker.worker.request import request_of

STATUSES = ("active", "parked", "done", "failed", "cancelled")
SETTLE_S = 5.0
"""How long an answer waits to tell what became of a run that goes on."""


class RunsApi(Service):
    """`name` is the worker's."""

    def __init__(self, store: Store, runner: Runner, name: str) -> None:
        self._store = store
        self._runner = runner
        self._name = name

    def routes(self) -> tuple[Route, ...]:
        return (
            on(fleet_calls.ListRuns, self.runs),
            on(fleet_calls.ShowRun, self.run),
            on(fleet_calls.RetryRun, self.retry),
            on(fleet_calls.CancelRun, self.cancel),
        )

    async def runs(self, call: Call, request: fleet_calls.ListRuns) -> list[api.Run]:
        """Newest first; those that have not ended, unless states are named."""
        statuses = request.status or ("active", "parked")
        for status in statuses:
            if status not in STATUSES:
                raise Invalid("status", status, f"use {', '.join(STATUSES)}")
        where, values = f"status in ({', '.join('?' * len(statuses))})", tuple(statuses)
        if {"active", "parked"} >= set(statuses):
            where = f"{UNENDED} and {where}"
        if machine := request.machine:
            where, values = f"resource = ? and {where}", (machine, *values)
        rows = self._store.read.select(RunRow, f"{where} order by id desc limit {request.limit}", values)
        return [views.run_view(row, self._name) for row in rows]

    async def run(self, call: Call, request: fleet_calls.ShowRun) -> api.Run:
        return views.run_view(self._row(request.run_id), self._name)

    async def retry(self, call: Call, request: fleet_calls.RetryRun) -> api.Run:
        """One that is not parked stays as it is: repeating is harmless."""
        row = self._row(request.run_id)
        with suppress(Conflict):
            await self._runner.unpark(row.id, request_of(call).cause)
        return await self._settled(row.id)

    async def cancel(self, call: Call, request: fleet_calls.CancelRun) -> api.Run:
        """One that has ended, or is at its final step, stays as it is."""
        row = self._row(request.run_id)
        await self._runner.cancel(row.id, f"cancelled by {request_of(call).cause}")
        return await self._settled(row.id)

    async def _settled(self, run: str) -> api.Run:
        """The run once it has ended or is parked again, or as it is after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._runner.wait_ended(run)
        row = self._store.read.get(RunRow, run)
        assert row is not None  # runs are not deleted
        return views.run_view(row, self._name)

    def _row(self, run: str) -> RunRow:
        row = self._store.read.get(RunRow, run)
        if row is None:
            raise NotFound(f"run not found: {run}", hint="hawker workers runs")
        return row

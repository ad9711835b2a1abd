"""A kind of thing besides machines: lights. All that a worker needs of them is in this directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace
from tests.worker.kinds.light.lamps import Lamps
from tests.worker.kinds.light.life import BEGINS, State, page
from tests.worker.kinds.light.rows import LightRow

from hawker.catalog.publish.outbox import Projected, Projection
from hawker.errors import NotFound
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model.catalog import Change
from hawker.model.op import Op, Request
from hawker.model.rows import Row, RunRow
from hawker.services import Service
from hawker.store.schema import Schema
from hawker.store.tx import Reads, Tx
from hawker.worker import ledger
from hawker.worker.context import WorkerContext
from hawker.worker.flows.flow import Done, Flow, Step, StepContext
from hawker.worker.flows.runner import Busy, active_run
from hawker.worker.kinds import Kind
from hawker.worker.request import request_of


class Shown(msgspec.Struct):
    id: str
    state: str


class Switch(Request[Shown]):
    """Switch a light on or off."""

    op = Op("Lights_switch", "POST", "/v1/lights/{light_id}/switch", refuses=(409,))

    light_id: str
    wish: State


class LightParts:
    """See `hawker.worker.kinds.Parts`."""

    def __init__(self, context: WorkerContext, lamps: Lamps) -> None:
        self._context = context
        self._lamps = lamps
        settle = Step("settle", act=self.undo, commit=self._settle)
        steps = [Step("power", act=self._power), Step("tell", commit=self._tell)]
        self.flows = [Flow("light.switch", 1, settle, steps)]
        self.recovery: Sequence[Service] = [_Relight(context, lamps)]
        self.services: Sequence[Service] = [_Calls(self)]

    async def switch(self, light: str, wish: State, cause: str) -> str:
        """Begin to switch a light, which is made when it is asked for first. Asked again, it joins the run that does
        so. Returns the run, "" for none. Raises `ledger.Full`, and `Busy` while it is switched the other way."""

        def change(tx: Tx) -> str:
            row = tx.get(LightRow, light) or LightRow(id=light)
            if holder := active_run(tx, light):
                if holder.args["wish"] == wish:
                    return holder.id
                raise Busy(holder)
            steps = BEGINS[row.state, wish]
            if not steps:
                return ""

            def writes(tx: Tx, run: RunRow) -> None:
                self._put(tx, replace(row, booked=row.booked or wish == "on"))

            args = {"wish": wish, "was": row.state}
            return self._context.runner.begin(
                tx, "light.switch", light, steps=steps, cause=cause, args=args, writes=writes, free=True
            ).id

        return await self._context.store.submit(change)

    def _put(self, tx: Tx, row: LightRow) -> None:
        """Write a row, and let the ledger follow."""
        before = tx.get(LightRow, row.id)
        held = before.held() if before else LightRow(id="").held()
        ledger.adjust(tx, self._context.settings.capacity, held, row.held())
        tx.put(row)

    async def _power(self, context: StepContext) -> Done:
        await self._lamps.turn(context.run.resource, context.run.args["wish"] == "on")
        return Done()

    def _tell(self, tx: Tx, run: RunRow) -> None:
        state: State = run.args["wish"]
        self._put(tx, LightRow(id=run.resource, state=state, booked=state == "on"))

    async def undo(self, context: StepContext) -> Done:
        await self._lamps.turn(context.run.resource, context.run.args["was"] == "on")
        return Done(self._settle)

    def _settle(self, tx: Tx, run: RunRow) -> None:
        if run.ending:
            was: State = run.args["was"]
            self._put(tx, LightRow(id=run.resource, state=was, booked=was == "on"))


class _Relight(Service):
    """When the worker begins: every lamp that no run is about to switch burns, or not, as its row says."""

    def __init__(self, context: WorkerContext, lamps: Lamps) -> None:
        self._context = context
        self._lamps = lamps

    async def open(self) -> None:
        reads = self._context.store.read
        wanted = {row.id for row in reads.select(LightRow) if row.state == "on"}
        for light in sorted(wanted ^ self._lamps.lit):
            if active_run(reads, light) is None:
                await self._lamps.turn(light, light in wanted)


class _Calls(Service):
    def __init__(self, parts: LightParts) -> None:
        self._parts = parts

    def routes(self) -> list[Route]:
        return [on(Switch, self._switch)]

    async def _switch(self, call: Call, request: Switch) -> Shown:
        context = self._parts._context
        run = await self._parts.switch(request.light_id, request.wish, request_of(call).cause)
        if run:
            await context.runner.wait_ended(run)
        row = context.store.read.get(LightRow, request.light_id)
        if row is None:
            raise NotFound(f"light not found: {request.light_id}")
        return Shown(row.id, row.state)


def _projections(reads: Reads) -> Mapping[type[Row], Projection]:
    def light(reads: Reads, key: str, row: LightRow | None) -> list[Projected]:
        return [("region", Change("lights", key, {"state": row.state} if row else None), True)]

    return {LightRow: light}


def _broken(tx: Tx, row: Row) -> list[str]:
    if isinstance(row, LightRow) and active_run(tx, row.id) is None and row.booked != (row.state == "on"):
        return [f"light {row.id} is {row.state}, and holds {row.held()}"]
    return []


def light(lamps: Lamps, make: type[LightParts] = LightParts) -> Kind[LightParts]:
    return Kind(
        schema=Schema(
            "light",
            (LightRow,),
            ("alter table light add column state text generated always as (body ->> '$.state') virtual",),
        ),
        parts=partial(make, lamps=lamps),
        holds={LightRow: LightRow.held},
        projections=_projections,
        broken=_broken,
        life=page,
    )

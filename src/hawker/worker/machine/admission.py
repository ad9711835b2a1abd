"""How a request takes hold of its machine: its lease, and the run that is in the way.

What a wish does about a run is decided in `hawker.core.life.wishes`; here it is done. Whoever waits for a run waits for
a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from hawker.core.life.phases import FETCHES, Phase, phase_of
from hawker.core.life.wishes import MEETS, Plan, Way, Wish
from hawker.errors import Conflict, NotFound, Refused
from hawker.model.config import known_config
from hawker.model.rows import MachineRow, RunRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.flows.runner import Busy, Runner, active_run
from hawker.worker.machine import leases
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import Request

T = TypeVar("T")

BUSY_WAIT_S = 60.0
LOOK_S = 0.05
"""How often a wish looks whether the run that it waits for has come to another phase."""
FETCH_S = 0.5
"""How long a wish waits for an image before it takes it for one that is on its way."""


@dataclass(frozen=True)
class Admitted:
    """A machine that a wish has taken hold of. `joined`: the run that does what is wished. `replaced`: the run that
    waited, and gave way; the machine is in the state that it waited in."""

    row: MachineRow
    joined: RunRow | None = None
    replaced: RunRow | None = None


class Admission:
    """Takes hold of a machine for a wish: all operations on machines begin so."""

    def __init__(self, store: Store, writer: MachineWriter, runner: Runner) -> None:
        self._store = store
        self._writer = writer
        self._runner = runner

    def leased(self, tx: Tx, app: str, machine_id: str, request: Request) -> MachineRow:
        row = get_machine(tx, machine_id, app)
        if not request.rule:
            leases.check(tx, row.id, request)
        return row

    def admit(self, tx: Tx, wish: Wish, app: str, machine_id: str, request: Request) -> Admitted:
        """Raises `Busy` when a run holds the machine that the wish neither joins nor replaces."""
        row = self.leased(tx, app, machine_id, request)
        run = active_run(tx, row.id)
        if run is None:
            return Admitted(row)
        match MEETS[wish][phase_of(run)]:
            case Way.join:
                return Admitted(row, joined=run)
            case Way.replace:
                self._runner.end_waiting(tx, run, f"{request.cause} took its place")
                return Admitted(row, replaced=run)
        raise Busy(run)

    def begin(
        self,
        tx: Tx,
        row: MachineRow,
        plan: Plan,
        request: Request,
        args: dict[str, Any],
        *,
        changes: Callable[[Tx], Mapping[str, Any]] = lambda tx: {},
        run_id: str = "",
    ) -> RunRow:
        """Begin what was planned for a machine that nothing holds. `changes` are other fields of its row."""

        def writes(tx: Tx, run: RunRow) -> None:
            fields = dict(changes(tx))
            if plan.desired:
                fields["desired"] = plan.desired
            if plan.forgets_restarts:
                fields["restarts"] = 0
            after = self._writer.move(tx, row, *plan.path, cause=run.cause, **fields)
            self._writer.event(tx, after, plan.event, plan.status or after.state, run)

        return self._runner.begin(
            tx,
            plan.flow,
            row.id,
            steps=plan.steps,
            cause=request.cause,
            source="flyd" if request.rule or request.why else "user",
            trace=request.trace,
            args=args,
            writes=writes,
            free=True,
            run_id=run_id,
        )

    async def submit(self, wish: Wish, change: Callable[[Tx], T]) -> T:
        """Submit a change that admits a wish, again when the run in its way has gone on. Raises `Busy` where the wish
        does not wait for it."""
        try:
            async with asyncio.timeout(BUSY_WAIT_S):
                while True:
                    try:
                        return await self._store.submit(change)
                    except Busy as busy:
                        try:
                            await self._make_way(wish, busy)
                        except NotFound:  # the commit that began that run is still on its way, or has failed
                            await self._store.submit(lambda tx: None)  # after it
        except TimeoutError:
            raise Conflict(f"the machine was still busy after {BUSY_WAIT_S:g} s; try again later") from None

    async def _make_way(self, wish: Wish, busy: Busy) -> None:
        run = busy.run
        phase = phase_of(run)
        if phase in FETCHES:
            await self._ended_within(run.id, FETCH_S)
            if self._phase(run.id) is not phase:
                return
        match MEETS[wish][phase]:
            case Way.refuse:
                busy.hint = _HINTS[phase](run)
                raise busy
            case Way.cancel:
                await self._runner.cancel(run.id, "a later request took its place")
                await self._runner.wait_ended(run.id)
            case Way.wait:
                while self._phase(run.id) is phase:
                    await self._ended_within(run.id, LOOK_S)

    async def _ended_within(self, run: str, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._runner.wait_ended(run)

    def _phase(self, run_id: str) -> Phase:
        run = self._store.read.get(RunRow, run_id)
        return phase_of(run if run and run.status in ("active", "parked") else None)


class Parked(Conflict):
    """What was asked for has begun and waits for a person."""

    code = "parked"

    def __init__(self, run: RunRow) -> None:
        step = run.steps[run.next]
        super().__init__(
            f"{run.resource}: {run.flow} is parked at step {step}: {run.error}",
            details={"run": run.id, "flow": run.flow, "step": step, "status": run.status},
            hint=parked_hint(run),
        )


class StartRefused(Refused):
    """The program could not be started; the machine is there, in state failed."""

    status = 422
    code = "start_failed"


def parked_hint(run: RunRow) -> str:
    """What a person can do about a parked run."""
    return f"hawker workers retry {run.id} tries the step again, hawker workers cancel {run.id} gives the run up"


def _fetching_hint(run: RunRow) -> str:
    return "its image is on its way: ask again when it is there, or stop the machine"


_HINTS: Mapping[Phase, Callable[[RunRow], str]] = {
    Phase.parked: parked_hint,
    **dict.fromkeys(FETCHES, _fetching_hint),
}


def stop_args(row: MachineRow, signal: int | None = None, timeout_s: float | None = None) -> dict[str, Any]:
    """How to stop the present instance, fixed when the run begins: an update may change the configuration after it."""
    stop = known_config(row.config).stop
    stop = replace(
        stop,
        signal=stop.signal if signal is None else signal,
        timeout_s=stop.timeout_s if timeout_s is None else timeout_s,
    )
    return {"instance": row.instance, "driver": row.driver, "signal": stop.signal, "grace_s": stop.timeout_s}

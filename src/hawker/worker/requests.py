"""How a request takes hold of its machine: lease, state, and whatever run is in its way.

A request that meets another run on its machine waits for it, for a bounded time. A restart that is only waiting out its
backoff is no reason to wait: stop and destroy cancel it; start, restart and update take its place in the commit that
accepts them, so that one that is refused leaves it as it was.

Nor is an image that is on its way, which may take long: stop and destroy cancel its run; a start or a restart that the
run will do anyway is content with it; an update takes its place; all others are refused, and told so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from hawker.errors import Conflict, NotFound, PreconditionFailed
from hawker.model.config import known_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker import leases
from hawker.worker.flows.runner import Busy, Runner, active_run
from hawker.worker.machine_log import get_machine
from hawker.worker.request import Request

T = TypeVar("T")

BUSY_WAIT_S = 60.0
CLEARING_LOOK_S = 0.1  # how often to look whether a restart has come to its backoff
PREPARING_LOOK_S = 0.5  # how long a request waits for the image of a start before it takes it for one on its way

IN_BACKOFF = State.starting
"""A machine's state while it waits to be restarted. No other machine that is free of runs is in it."""


def in_backoff(run: RunRow) -> bool:
    return _is_at(run, "backoff")


def fetching(run: RunRow) -> bool:
    return _is_at(run, "prepare")


def only_waits(run: RunRow) -> bool:
    """Nothing that it does now has to be put right."""
    return in_backoff(run) or fetching(run)


def runs_on(run: RunRow) -> bool:
    """Whether it is an update that fetches its image while the old program runs."""
    return fetching(run) and "before" in run.args


class Requests:
    """What all operations on machines begin with."""

    def __init__(self, store: Store, runner: Runner) -> None:
        self._store = store
        self._runner = runner

    def _leased(self, tx: Tx, app: str, machine_id: str, request: Request) -> MachineRow:
        row = get_machine(tx, machine_id, app)
        if not request.rule:
            leases.check(tx, row.id, request)
        return row

    def _free(self, tx: Tx, app: str, machine_id: str, request: Request) -> MachineRow:
        """The machine, at rest: while a run holds it, its state is on the way to another one and decides nothing.
        Raises `Busy`."""
        row = self._leased(tx, app, machine_id, request)
        if holder := active_run(tx, row.id):
            raise Busy(holder)
        return row

    def _freed(
        self, tx: Tx, app: str, machine_id: str, request: Request, *, of: Callable[[RunRow], bool] = in_backoff
    ) -> tuple[MachineRow, RunRow | None]:
        """As `_free`, but a run that only waits, as `of` says, is ended as part of this change, and given too. The
        machine is left in the state that it waited in: `IN_BACKOFF` after a backoff."""
        row = self._leased(tx, app, machine_id, request)
        holder = active_run(tx, row.id)
        if holder:
            if not of(holder):
                raise Busy(holder)
            self._runner.end_waiting(tx, holder, f"{request.cause} took its place")
        return row, holder

    def _on_its_way(self, tx: Tx, row: MachineRow) -> RunRow | None:
        """The run that will start the machine when its image is there, if it has no program now."""
        holder = active_run(tx, row.id)
        return holder if holder and fetching(holder) and "launch" in holder.steps and not runs_on(holder) else None

    def _begin(
        self,
        tx: Tx,
        flow: str,
        row: MachineRow,
        steps: list[str],
        request: Request,
        writes: Callable[[Tx, RunRow], None],
        args: dict[str, Any],
        run_id: str = "",
    ) -> RunRow:
        """Of a machine that is `_free`, or was `_freed`."""
        return self._runner.begin(
            tx,
            flow,
            row.id,
            steps=steps,
            cause=request.cause,
            source="flyd" if request.rule or request.why else "user",
            trace=request.trace,
            args=args,
            writes=writes,
            free=True,
            run_id=run_id,
        )

    async def _when_free(self, change: Callable[[Tx], T], *, force: bool = False, ends_backoff: bool = False) -> T:
        """Submit a change that begins a run; while another run holds the machine, wait for its end and try again.

        With `ends_backoff` a restart in its backoff is cancelled first, and so is a run that waits for an image: only
        for what ends with the machine stopped.
        """
        try:
            async with asyncio.timeout(BUSY_WAIT_S):
                while True:
                    try:
                        return await self._store.submit(change)
                    except Busy as busy:
                        try:
                            await self._make_way(busy, force, ends_backoff)
                        except NotFound:  # the commit that began that run is still on its way, or has failed
                            await self._store.submit(lambda tx: None)  # after it
        except TimeoutError:
            raise Conflict(f"the machine was still busy after {BUSY_WAIT_S:g} s; try again later") from None

    async def _make_way(self, busy: Busy, force: bool, ends_backoff: bool) -> None:
        run = busy.run
        if (ends_backoff and in_backoff(run)) or (force and run.flow != "machine.destroy"):
            await self._runner.cancel(run.id, "a later request took its place")
        elif run.status == "parked":
            busy.hint = parked_hint(run)
            raise busy
        elif "backoff" in run.steps[run.next + 1 :]:  # it may be over in a moment, the backoff after it is not
            with suppress(TimeoutError):
                async with asyncio.timeout(CLEARING_LOOK_S):
                    await self._runner.wait_ended(run.id)
            return
        elif "prepare" in run.steps[run.next :]:  # mostly the image is here, and this soon over
            with suppress(TimeoutError):
                async with asyncio.timeout(PREPARING_LOOK_S):
                    await self._runner.wait_ended(run.id)
            now = self._store.read.get(RunRow, run.id)
            if now is None or not fetching(now):
                return
            if not ends_backoff:
                busy.hint = "its image is on its way: ask again when it is there, or stop the machine"
                raise busy
            await self._runner.cancel(run.id, "a later request took its place")
        await self._runner.wait_ended(run.id)


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


def _is_at(run: RunRow, step: str) -> bool:
    return run.status == "active" and run.next < len(run.steps) and run.steps[run.next] == step


def parked_hint(run: RunRow) -> str:
    """What a person can do about a parked run."""
    return f"hawker workers retry {run.id} tries the step again, hawker workers cancel {run.id} gives the run up"


def require(row: MachineRow, verb: str, *states: State, hint: str = "") -> None:
    if row.state not in states:
        raise PreconditionFailed(
            f"failed_precondition: unable to {verb} machine from current state: '{row.state}'",
            details={"machine": row.id, "state": row.state, "allowed": list(states)},
            hint=hint,
        )


def stop_args(row: MachineRow, signal: int | None, timeout_s: float | None) -> dict[str, Any]:
    """How to stop the present instance, fixed when the run begins: an update may change the configuration after it."""
    stop = known_config(row.config).stop
    stop = replace(
        stop,
        signal=stop.signal if signal is None else signal,
        timeout_s=stop.timeout_s if timeout_s is None else timeout_s,
    )
    return {"instance": row.instance, "driver": row.driver, "signal": stop.signal, "grace_s": stop.timeout_s}

"""Runs flows: performs what `core.journal` decides, and stores each outcome before the next step begins.

`begin` records a run inside the caller's change, so acceptance and the first domain writes are one commit. From then on
one task drives the run: act, then one commit with the step's event, its domain writes and the steps after it that are
commits only. A killed worker resumes every active run at the step whose outcome is not stored. Shutting down is not
cancelling: the tasks end, the runs stay active.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Literal

from hawker.core import journal
from hawker.errors import Abort, Broken, Conflict, HawkerError, NotFound, Retry, StoreError
from hawker.host import Host
from hawker.model.rows import UNENDED, Row, RunRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.tx import Reads, Tx
from hawker.telemetry import Metrics, exemplar, get_logger, heeded
from hawker.worker.flows.flow import Done, Flow, StepContext

STORE_RETRY_S = 1.0
"""How long an outcome waits before it is offered to a full or failing disk again. The act is not repeated."""


class Busy(Conflict):
    """Another run holds the resource. `run` is its row."""

    code = "busy"

    def __init__(self, run: RunRow) -> None:
        at = run.steps[run.next] if run.next < len(run.steps) else "its end"
        super().__init__(
            f"{run.resource} is busy: {run.flow} is at step {at} ({run.status})",
            details={"run": run.id, "flow": run.flow, "step": at, "status": run.status},
        )
        self.run = run


class Runner(Service):
    """Owns every active run of one worker. `on_end` are told the resource of each exclusive run that ended. `resumed`:
    how many runs `open` took up."""

    def __init__(self, store: Store, host: Host, metrics: Metrics) -> None:
        self._store = store
        self._host = host
        self._flows: dict[str, Flow] = {}
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()  # of those tasks: what is cancelled before it has begun never runs at all
        self._interrupted: set[str] = set()
        self._waiters: dict[str, list[asyncio.Future[RunRow]]] = {}
        self._closed = False
        self.on_end: list[Callable[[str], None]] = []
        self.resumed = 0
        go_on_after_newest(host, store.read, RunRow)

    def add(self, flows: Iterable[Flow]) -> None:
        """Before `open`: flows whose runs this runner drives."""
        self._flows |= {flow.name: flow for flow in flows}

    # --- beginning and ending runs -----------------------------------------------------------------------------------

    def begin(
        self,
        tx: Tx,
        flow_name: str,
        resource: str,
        *,
        steps: Sequence[str],
        cause: str,
        source: Literal["user", "flyd"] = "user",
        trace: str = "",
        args: dict[str, Any] | None = None,
        writes: Callable[[Tx, RunRow], None] | None = None,
        exclusive: bool = True,
        free: bool = False,
        run_id: str = "",
    ) -> RunRow:
        """Record a run in the caller's change; its task starts once that is committed.

        `steps` are the names this run takes, without the final step, which is always added. `writes` are the domain
        writes that belong to the beginning. `run_id` is a ULID of this host where it was needed before. Raises `Busy`
        when an exclusive run holds the resource; `free`: this change has looked, and none does.
        """
        flow = self._flows[flow_name]
        if exclusive and not free and (holder := active_run(tx, resource)):
            raise Busy(holder)
        run = RunRow(
            id=run_id or self._host.ulid(),
            flow=flow.name,
            flow_version=flow.version,
            resource=resource,
            exclusive=exclusive,
            args=args or {},
            steps=[*steps, flow.final.name],
            cause=cause,
            source=source,
            trace=trace,
            started_at_ms=tx.now_ms,
            updated_at_ms=tx.now_ms,
        )
        self._record(tx, "run.started", run, step="")
        if writes:
            writes(tx, run)
        tx.put(run)
        first = flow.by_name.get(run.steps[0])
        if first and first.ahead:
            first.ahead(tx, run)
        run = self._chain(tx, flow, run)
        tx.after_commit(lambda: self._committed(run))
        return run

    async def cancel(self, run_id: str, why: str) -> None:
        """End a run early: its final step runs next, told why. A run in its final step finishes it; an ended one stays.

        A parked run is cancelled, too: this is how a person gives it up.
        """

        def change(tx: Tx) -> RunRow:
            run = _get(tx, run_id)
            if run.status not in ("active", "parked"):
                return run
            active = journal.unparked(run, tx.now_ms) if run.status == "parked" else run
            after = journal.cancelled(active, why, tx.now_ms)
            if after != run:
                self._record(tx, "run.cancelled", run, data={"why": why})
                tx.put(after)
            return after

        run = await self._store.submit(change)
        if run.status != "active":
            return
        if run_id not in self._tasks:
            self._spawn(run)
        elif run.ending == "cancelled":
            self._interrupt(run_id)

    def end_waiting(self, tx: Tx, run: RunRow, why: str) -> None:
        """End a run that only waits, as part of the caller's change: another one takes its place.

        Its final step counts as done: nothing was begun that it would have to put right.
        """
        ending = journal.cancelled(run, why, tx.now_ms)
        for kind, now, after in (
            ("run.cancelled", run, ending),
            ("step.completed", ending, journal.completed(ending, None, tx.now_ms)),
        ):
            self._record(tx, kind, now, data={"why": why})
            tx.put(after)
        tx.after_commit(lambda: self._interrupt(run.id))

    def _interrupt(self, run_id: str) -> None:
        """Have a run's task look at its row anew, whatever it is at."""
        if task := self._tasks.get(run_id):
            self._interrupted.add(run_id)
            if run_id in self._begun:
                task.cancel()

    async def unpark(self, run_id: str, why: str) -> None:
        """A person looked, `why` says who: try the step that was due again.

        Raises `NotFound`, and `Conflict` unless it is parked.
        """

        def change(tx: Tx) -> RunRow:
            run = _get(tx, run_id)
            if run.status != "parked":
                raise Conflict(f"run {run_id} is {run.status}, not parked")
            after = journal.unparked(run, tx.now_ms)
            self._record(tx, "run.unparked", run, data={"why": why})
            tx.put(after)
            return after

        self._spawn(await self._store.submit(change))

    async def wait_ended(self, run_id: str) -> RunRow:
        """The run's row once it has ended or is parked. Raises `NotFound`."""
        run = self._store.read.get(RunRow, run_id)
        if run is None:
            raise NotFound(f"run {run_id} not found")
        if run.status != "active":
            return run
        waiter: asyncio.Future[RunRow] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(run_id, []).append(waiter)
        return await waiter

    def ending(self, run_id: str) -> asyncio.Future[RunRow]:
        """`wait_ended` as a future, to be cancelled when it is not needed any more."""
        if run_id not in self._tasks:
            return asyncio.ensure_future(self.wait_ended(run_id))
        waiter: asyncio.Future[RunRow] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(run_id, []).append(waiter)
        return waiter

    async def open(self) -> None:
        self.resumed = self.resume()

    def resume(self) -> int:
        """Take up every run that was active when the worker last stopped. Returns how many."""
        runs = self._store.read.select(RunRow, f"{UNENDED} and status = 'active' order by id")
        for run in runs:
            self._log("run.resumed", run, step=run.steps[run.next])
            self._spawn(run)
        return len(runs)

    async def close(self) -> None:
        """End the tasks between or inside steps; the runs stay active and are resumed by the next worker."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- driving one run ---------------------------------------------------------------------------------------------

    def _committed(self, run: RunRow) -> None:
        if run.status == "active":
            self._spawn(run)
        else:
            self._ended(run)

    def _spawn(self, run: RunRow) -> None:
        if not self._closed and run.id not in self._tasks:
            self._tasks[run.id] = asyncio.get_running_loop().create_task(self._drive(run), name=f"run {run.id}")

    async def _drive(self, run: RunRow) -> None:
        self._begun.add(run.id)
        try:
            if run.id in self._interrupted:  # by a change in the very commit that began it
                self._interrupted.discard(run.id)
                run = self._now(run)
            while run.status == "active":
                try:
                    run = await self._advance(run)
                except asyncio.CancelledError:
                    if self._closed or run.id not in self._interrupted:
                        raise
                    self._interrupted.discard(run.id)
                    if task := asyncio.current_task():
                        task.uncancel()
                    run = self._now(run)
        finally:
            self._tasks.pop(run.id, None)
            self._begun.discard(run.id)
            self._interrupted.discard(run.id)
        self._ended(run)

    def _now(self, run: RunRow) -> RunRow:
        return self._store.read.get(RunRow, run.id) or run

    async def _advance(self, run: RunRow) -> RunRow:
        flow = self._flows.get(run.flow)
        known = flow.by_name.keys() if flow else frozenset[str]()
        match journal.decide(run, self._host.now_ms(), known):
            case journal.Finished():
                return run
            case journal.Wait(left_ms=left_ms):
                await asyncio.sleep(left_ms / 1000)
                return journal.waited(run)
            case journal.Park(why=why):
                return await self._park(run, why)
            case journal.Act(step=step, key=key, attempt=attempt):
                assert flow is not None  # its step is known
                return await self._step(flow, run, StepContext(run, step, key, attempt))

    async def _step(self, flow: Flow, run: RunRow, context: StepContext) -> RunRow:
        step = flow.by_name[context.step]
        started = perf_counter()
        try:
            done = await step.act(context) if step.act and flow.needs_act(run) else Done(step.commit)
            after = await self._keep(run, lambda tx, now: self._complete(tx, flow, now, done), done.not_before_s)
            outcome = "completed"
        except Abort as error:
            after = await self._abort(run, error.message)
            outcome = "aborted"
        except Broken as error:
            after = await self._park(run, error.message)
            outcome = "broken"
        except Exception as error:
            after = await self._retry(run, error, step.attempts)
            outcome = "retried"
        self._metrics.step(run.flow, context.step, outcome, perf_counter() - started, exemplar(run.resource, run.cause))
        return after

    def _complete(self, tx: Tx, flow: Flow, run: RunRow, done: Done) -> RunRow:
        self._record(tx, "step.completed", run)
        output = done.commit(tx, run) if done.commit else None
        after = journal.completed(run, output, tx.now_ms)
        tx.put(after)
        return self._chain(tx, flow, after)

    def _chain(self, tx: Tx, flow: Flow, run: RunRow) -> RunRow:
        """Join the steps that are commits only to this transaction."""
        while run.status == "active" and run.steps[run.next] in flow.by_name and not flow.needs_act(run):
            run = self._complete(tx, flow, run, Done(flow.by_name[run.steps[run.next]].commit))
        return run

    async def _abort(self, run: RunRow, why: str) -> RunRow:
        def change(tx: Tx, now: RunRow) -> RunRow:
            after = journal.aborted(now, why, tx.now_ms)
            self._record(tx, "run.parked" if after.status == "parked" else "step.aborted", now, data={"why": why})
            tx.put(after)
            return after

        after = await self._keep(run, change)
        if after.status == "parked":
            self._alarm(run)
        return after

    async def _park(self, run: RunRow, why: str) -> RunRow:
        def change(tx: Tx, now: RunRow) -> RunRow:
            after = journal.parked(now, why, tx.now_ms)
            self._record(tx, "run.parked", now, data={"why": why})
            tx.put(after)
            return after

        self._alarm(run)
        return await self._keep(run, change)

    async def _retry(self, run: RunRow, error: Exception, attempts: int) -> RunRow:
        why = error.message if isinstance(error, HawkerError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Retry) and run.attempt + 1 >= attempts:
            return await self._park(run, f"{why} (after {attempts} attempts)")
        after_s = error.after_s if isinstance(error, Retry) else None
        after = journal.retried(run, why, after_s, self._host.now_ms(), self._host.rng)
        if not journal.worth_recording(run, after):
            return after

        def change(tx: Tx, now: RunRow) -> RunRow:
            kept = journal.retried(now, why, after_s, tx.now_ms, self._host.rng)
            self._record(tx, "step.retried", now, data={"why": why, "attempt": kept.attempt})
            tx.put(kept)
            return kept

        return await self._keep(run, change)

    async def _keep(self, run: RunRow, change: Callable[[Tx, RunRow], RunRow], not_before_s: float = 0.0) -> RunRow:
        """Store an outcome. If the run was moved on meanwhile (a cancel), the outcome is dropped and that row wins.

        A full or failing disk is tried again until it takes the outcome: the effect has happened and must not be lost.
        """

        def guarded(tx: Tx) -> RunRow:
            now = _get(tx, run.id)
            if (now.next, now.status) != (run.next, run.status):
                return now
            return change(tx, now if now.attempt >= run.attempt else run)

        while True:
            try:
                return await self._store.submit(guarded, not_before_s=not_before_s)
            except StoreError as error:
                self._log("store.refused", run, why=error.message)
                await asyncio.sleep(STORE_RETRY_S)

    def _ended(self, run: RunRow) -> None:
        for waiter in self._waiters.pop(run.id, []):
            if not waiter.done():
                waiter.set_result(run)
        if run.status == "active":
            return
        self._metrics.runs.labels(run.flow, run.status).inc(exemplar=exemplar(run.resource, run.cause))
        self._log("run.ended", run, status=run.status, error=run.error)
        if run.exclusive and run.status != "parked":
            for told in list(self.on_end):
                told(run.resource)

    # --- telling -----------------------------------------------------------------------------------------------------

    def _alarm(self, run: RunRow) -> None:
        self._metrics.alarms.labels(run.flow, run.steps[run.next]).inc(exemplar=exemplar(run.resource, run.cause))

    def _record(
        self, tx: Tx, kind: str, run: RunRow, *, step: str | None = None, data: dict[str, Any] | None = None
    ) -> None:
        at = (run.steps[run.next] if run.next < len(run.steps) else "") if step is None else step
        tx.record(
            kind,
            run.resource,
            cause=run.cause,
            flow=run.flow,
            run=run.id,
            step=at,
            attempt=run.attempt,
            trace=run.trace,
            data=data or {},
        )
        if heeded("info"):
            tx.after_commit(lambda: self._log(kind, run, step=at, **(data or {})))

    def _log(self, event: str, run: RunRow, **fields: Any) -> None:
        alarm = event in ("run.parked", "store.refused")
        logger = _logger.error if alarm else _logger.info
        logger(event, flow=run.flow, run=run.id, resource=run.resource, cause=run.cause, trace=run.trace, **fields)


def go_on_after_newest(host: Host, reads: Reads, kind: type[Row]) -> None:
    """Let the host's next ids sort after those of all rows of a kind whose order is that of their ids."""
    if newest := reads.query(f"select max(id) from {kind.table}")[0][0]:
        host.go_on_after(newest)


def active_run(reads: Reads, resource: str) -> RunRow | None:
    """The exclusive run that holds a resource, if any."""
    where = f"resource = ? and {UNENDED} and (body ->> '$.exclusive') = 1"
    found = reads.select(RunRow, where, (resource,))
    return found[0] if found else None


def failing(reads: Reads, resource: str) -> str:
    """What the run that holds a resource tries again for: why its step failed last. "" when none did."""
    run = active_run(reads, resource)
    return run.error if run else ""


def _get(tx: Tx, run_id: str) -> RunRow:
    run = tx.get(RunRow, run_id)
    if run is None:
        raise NotFound(f"run {run_id} not found")
    return run


_logger = get_logger()

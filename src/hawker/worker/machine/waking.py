"""What a proxy asks of its worker: to have a machine run, and to put an idle one to rest.

A start is answered as soon as the program runs, while the commit that tells of it is still to come: whoever is waiting
for the first byte should not wait for a disk. A worker that is killed in between resumes the run, finds the instance by
its key, and writes what was answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from hawker.core.life.phases import keeps_program, phase_of
from hawker.core.life.wishes import MEETS, Way, Wish
from hawker.errors import Conflict, DeadlineExceeded, NotFound
from hawker.host import clock_s
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import door
from hawker.model.checks import has_checks
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow
from hawker.model.values import is_host_image
from hawker.services import Service
from hawker.worker.context import WorkerContext
from hawker.worker.flows.runner import Busy, active_run, failing
from hawker.worker.machine.admission import Parked, StartRefused
from hawker.worker.machine.flows import MachineFlows, backoff_left_ms
from hawker.worker.machine.launches import Launches
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import Request

BACKOFF_MOST_MS = 1000
"""A request waits for a backoff that lasts no longer than this."""
_AT_REST = frozenset((State.stopped, State.suspended))
_RESTING = _AT_REST | {State.stopping, State.suspending}


class InBackoff(Conflict):
    """Its program keeps failing, and the worker waits before it starts it again: no request shortens that."""

    code = "in_backoff"

    def __init__(self, machine: str, until_ms: int) -> None:
        super().__init__(
            f"machine {machine} keeps failing and is not started again before its backoff is over",
            details={"machine": machine, "until_ms": until_ms},
        )


class Waking(Service):
    """A worker's answers to proxies. `wake` and `rest` raise what their bodies on the wire say as errors."""

    def __init__(
        self, context: WorkerContext, machines: Machines, launches: Launches, flows: MachineFlows, writer: MachineWriter
    ) -> None:
        self.on_rest: list[Callable[[str, str], None]] = []
        """These are told the id and state of each machine that is stopped or suspended, or about to be, right after the
        commit that says so. The catalog may show it only later, when this worker has changed much."""
        writer.on_change.append(self._changed)
        self._store = context.store
        self._host = context.host
        self._runner = context.runner
        self._machines = machines
        self._launches = launches
        self._flows = flows

    def _changed(self, row: MachineRow) -> None:
        if row.state in _RESTING:
            for told in list(self.on_rest):
                told(row.id, row.state.value)

    def routes(self) -> tuple[Route, ...]:
        return on(door.Wake, self._wake_call), on(door.Rest, self._rest_call)

    async def _wake_call(self, call: Call, wish: door.Wake) -> door.Awake:
        return await self.wake(wish, trace=call.trace)

    async def _rest_call(self, call: Call, wish: door.Rest) -> door.Resting:
        return await self.rest(wish, trace=call.trace)

    async def wake(
        self, wish: door.Wake, released: Callable[[door.Awake], None] = lambda awake: None, *, trace: str = ""
    ) -> door.Awake:
        """Start a machine, or resume it, unless it runs; join a start that is under way, and wait for the end of
        whatever else holds it. Answers once the program runs. Where the worker knows earlier that nothing keeps the
        program from running, it tells `released` what the answer will be: whoever is in a hurry may look for it then.

        Raises what `Machines.start` raises, `InBackoff`, `StartRefused`, and `DeadlineExceeded` after `WAKE_S`.
        """
        began = clock_s()

        def awake(row: MachineRow | None, before: State, instance: str) -> door.Awake:
            return door.Awake(before=before, instance=instance, checked=_checked(row), seconds=clock_s() - began)

        request = Request(id=wish.request, why=wish.why, trace=wish.trace or trace)
        try:
            async with asyncio.timeout(door.WAKE_S):
                runs = await self._until_it_runs(wish, request, lambda *runs: released(awake(*runs)))
            return awake(self._store.read.get(MachineRow, wish.machine), *runs)
        except TimeoutError:
            why = failing(self._store.read, wish.machine)
            because = why and f": {why}"
            raise DeadlineExceeded(
                f"deadline_exceeded: machine {wish.machine} has not started within {door.WAKE_S:g} s{because}"
            ) from None

    async def rest(self, wish: door.Rest, *, trace: str = "") -> door.Resting:
        """Begin to stop or suspend a machine. One that something else holds is left alone: raises `Busy`."""
        row = get_machine(self._store.read, wish.machine, wish.app)
        request = Request(id="", why=wish.why, trace=trace)
        state = await self._machines.rest(
            row.app, row.id, request, suspend=wish.how == "suspend", instance=wish.instance
        )
        return door.Resting(state=state)

    async def _until_it_runs(
        self, wish: door.Wake, request: Request, released: Callable[[MachineRow, State, str], None]
    ) -> tuple[State, str]:
        before: State | None = None
        while True:
            row = get_machine(self._store.read, wish.machine, wish.app)
            first, before = before is None, before or row.state
            # One at rest is most likely nobody's: if not, the start says so.
            holder = None if first and row.state in _AT_REST else active_run(self._store.read, row.id)
            if row.instance and ((row.state is State.started and holder is None) or (holder and keeps_program(holder))):
                return before, row.instance
            try:
                run = await self._joined(row, holder, request)
            except Busy:  # somebody else has begun one
                continue
            if run is None:
                continue
            outcome = await self._launches.wait(run, self._runner, partial(released, row, before))
            if isinstance(outcome, str):
                return before, outcome
            if outcome.status == "parked":
                raise Parked(outcome)
            if outcome.status != "done":
                raise StartRefused(
                    f"machine {row.id} did not start: {outcome.error or outcome.status}", details={"machine": row.id}
                )

    async def _joined(self, row: MachineRow, holder: RunRow | None, request: Request) -> str | None:
        """The run that starts the machine; None once a run that did something else has ended."""
        if holder is None:
            return await self._begun(row, request)
        if holder.status == "parked":
            raise Parked(holder)
        now_ms = self._host.now_ms()
        if (left_ms := backoff_left_ms(holder, now_ms)) > BACKOFF_MOST_MS:
            raise InBackoff(row.id, now_ms + left_ms)
        if MEETS[Wish.wake][phase_of(holder)] is not Way.join:
            try:
                await self._runner.wait_ended(holder.id)
            except NotFound:  # the commit that began it is still on its way, or has failed
                await self._store.submit(lambda tx: None)
            return None
        return holder.id

    async def _begun(self, row: MachineRow, request: Request) -> str | None:
        """Begin a run of our own. Its launch is prepared before the change that begins the run is built."""
        run_id = self._host.ulid()
        if row.state in _AT_REST - {State.suspended} and is_host_image(str(row.config["image"])):
            self._flows.prespawn(row, run_id)
        try:
            run = await self._machines.wake(row.app, row.id, request, run_id)
        except BaseException:
            self._flows.forget(run_id)
            raise
        if run != run_id:
            self._flows.forget(run_id)
        return run or None


def _checked(row: MachineRow | None) -> bool:
    return row is not None and has_checks(row.config) and any(c.gates for c in check_config(row.config).checks)

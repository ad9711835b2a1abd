"""What a proxy asks of its worker: to have a machine run, and to put an idle one to rest.

A start is answered as soon as the program runs, while the commit that tells of it is still to come: whoever is waiting
for the first byte should not wait for a disk. A worker that is killed in between resumes the run, finds the instance by
its key, and writes what was answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hawker.errors import Conflict, DeadlineExceeded, NotFound
from hawker.host import Host
from hawker.http.app import Handler, clock_s
from hawker.http.call import Call
from hawker.model import door
from hawker.model.checks import has_checks
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow
from hawker.store.db import Store
from hawker.worker.machine_api import StartRefused
from hawker.worker.machine_log import get_machine
from hawker.worker.machines import Machines
from hawker.worker.request import Request
from hawker.worker.requests import Parked, runs_on
from hawker.worker.runner import Busy, Runner, active_run

BACKOFF_MOST_MS = 1000
"""The rest of a backoff that a request may wait for."""
FIRST_S = 0.003
"""So long the commit of a start lets the request go before it that waits for it: a commit and what follows from it take
a millisecond or two of this process's time."""
_LAUNCHING = frozenset(("launch", "resume"))
_AT_REST = frozenset((State.stopped, State.suspended))


class InBackoff(Conflict):
    """Its program keeps failing, and the worker waits before it starts it again: no request shortens that."""

    code = "in_backoff"

    def __init__(self, machine: str, until_ms: int) -> None:
        super().__init__(
            f"machine {machine} keeps failing and is not started again before its backoff is over",
            details={"machine": machine, "until_ms": until_ms},
        )


class Launches:
    """Tells whoever waits that a run has its program. `hawker.worker.flows` awaits `launched` before the commit."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[RunRow | str]]] = {}

    async def launched(self, run: str, instance: str) -> None:
        if waiting := self._waiting.pop(run, None):
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(instance)
            await asyncio.sleep(FIRST_S)

    async def wait(self, run: str, runner: Runner) -> RunRow | str:
        """The instance once it runs, or the run once it has ended without one, or had one before this was asked."""
        waiter: asyncio.Future[RunRow | str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, []).append(waiter)
        ended = asyncio.ensure_future(runner.wait_ended(run))

        def over(ended: asyncio.Future[RunRow]) -> None:
            if not waiter.done() and not ended.cancelled():
                if error := ended.exception():
                    waiter.set_exception(error)
                else:
                    waiter.set_result(ended.result())

        ended.add_done_callback(over)
        try:
            return await waiter
        finally:
            ended.cancel()
            waiting = self._waiting.get(run)
            if waiting and waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiting[run]


class Waking:
    """A worker's answers to proxies. `wake` and `rest` raise what their bodies on the wire say as errors."""

    def __init__(self, store: Store, host: Host, runner: Runner, machines: Machines, launches: Launches) -> None:
        self._store = store
        self._host = host
        self._runner = runner
        self._machines = machines
        self._launches = launches

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {door.WAKE: self._wake_call, door.REST: self._rest_call}

    async def _wake_call(self, call: Call) -> Any:
        return await self.wake(call.read(door.Wake), trace=call.trace)

    async def _rest_call(self, call: Call) -> Any:
        return await self.rest(call.read(door.Rest), trace=call.trace)

    async def wake(self, wish: door.Wake, *, trace: str = "") -> door.Awake:
        """Start a machine, or resume it, unless it runs; join a start that is under way, and wait for the end of
        whatever else holds it. Answers once the program runs.

        Raises what `Machines.start` raises, `InBackoff`, `StartRefused`, and `DeadlineExceeded` after `WAKE_S`.
        """
        began = clock_s()
        request = Request(id=wish.request, why=wish.why, trace=trace)
        try:
            async with asyncio.timeout(door.WAKE_S):
                before, instance = await self._until_it_runs(wish, request)
        except TimeoutError:
            raise DeadlineExceeded(
                f"deadline_exceeded: machine {wish.machine} has not started within {door.WAKE_S:g} s"
            ) from None
        return door.Awake(
            before=before,
            instance=instance,
            checked=self._checked(wish.machine),
            seconds=clock_s() - began,
        )

    async def rest(self, wish: door.Rest, *, trace: str = "") -> door.Resting:
        """Begin to stop or suspend a machine. One that something else holds is left alone: raises `Busy`."""
        row = get_machine(self._store.read, wish.machine, wish.app)
        request = Request(id="", why=wish.why, trace=trace)
        state = await self._machines.rest(
            row.app, row.id, request, suspend=wish.how == "suspend", instance=wish.instance
        )
        return door.Resting(state=state)

    async def _until_it_runs(self, wish: door.Wake, request: Request) -> tuple[State, str]:
        before: State | None = None
        while True:
            row = get_machine(self._store.read, wish.machine, wish.app)
            first, before = before is None, before or row.state
            # One at rest is most likely nobody's: if not, the start says so.
            holder = None if first and row.state in _AT_REST else active_run(self._store.read, row.id)
            if row.instance and ((row.state is State.started and holder is None) or (holder and _leaves_it(holder))):
                return before, row.instance
            try:
                run = await self._joined(row, holder, request)
            except Busy:  # somebody else has begun one
                continue
            if run is None:
                continue
            outcome = await self._launches.wait(run, self._runner)
            if isinstance(outcome, str):
                return before, outcome
            if outcome.status == "parked":
                raise Parked(outcome)
            if outcome.status != "done":
                raise StartRefused(
                    f"machine {row.id} did not start: {outcome.error or outcome.status}", details={"machine": row.id}
                )

    def _checked(self, machine: str) -> bool:
        row = self._store.read.get(MachineRow, machine)
        return row is not None and has_checks(row.config) and any(c.gates for c in check_config(row.config).checks)

    async def _joined(self, row: MachineRow, holder: RunRow | None, request: Request) -> str | None:
        """The run that starts the machine; None after the end of one that did something else."""
        if holder is None:
            return await self._machines.wake(row.app, row.id, request) or None
        if holder.status == "parked":
            raise Parked(holder)
        ahead = holder.steps[holder.next :]
        if "backoff" in ahead:
            until_ms: int = holder.args.get("resume_at_ms", 0)
            if until_ms - self._host.now_ms() > BACKOFF_MOST_MS:
                raise InBackoff(row.id, until_ms)
        elif _LAUNCHING.isdisjoint(ahead):
            try:
                await self._runner.wait_ended(holder.id)
            except NotFound:  # the commit that began it is still on its way, or has failed
                await self._store.submit(lambda tx: None)
            return None
        return holder.id


def _leaves_it(run: RunRow) -> bool:
    """Whether the program goes on as it is for now."""
    return run.flow == "machine.resize" or runs_on(run)

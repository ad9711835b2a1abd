"""Running the health checks of this worker's machines, from this host.

The worker looks at a machine while it is started, also while an update gets its image. It shows the results with the
machine at once, and writes them when a status has changed, which is how the region learns of them. The worker does
nothing about a machine that fails its checks: proxies send it no requests.

Each check waits in a timer of the event loop, which keeps its timers in a heap. A check has a task only while it looks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

from hawker.core import checking
from hawker.core.checking import Health, Outcome
from hawker.errors import StoreError
from hawker.host import Host
from hawker.model import api
from hawker.model.checks import Check, has_checks
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import CheckRow, MachineRow
from hawker.model.values import rfc3339
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker.machine.check_rows import key_of, learned
from hawker.worker.machine.inside.probing import Address, probe
from hawker.worker.machine.writer import MachineWriter

AT_ONCE = 256
"""Looks at a time. A thousand machines that all take their whole timeout of 2 s every 15 s need 140."""
HELD_S = 2.5
"""How long a look has one of these places. After that it only waits, which costs a socket and no work. A check may wait
for minutes, and eight machines with such checks would keep all others from being looked at."""
WAITING_MOST = 2048
"""How many looks may wait without a place. Beyond them a look keeps its place: sockets are finite."""
TURN_S, A_TURN = 0.01, 16
"""At most so many looks begin in so much time. A thousand that are due together take 300 ms of the event loop, and
would hold up whatever else the worker does."""

Ways = Callable[[MachineRow, int], Sequence[Address]]
"""How this host reaches a machine's port, the likeliest way first."""


class _Watch:
    """One check of one instance, which started at `started_s` by the loop's clock."""

    __slots__ = ("check", "ended", "health", "row", "started_s", "timer", "ways", "writing", "written")

    def __init__(
        self, row: MachineRow, check: Check, ways: list[Address], health: Health, written: str, started_s: float
    ) -> None:
        self.started_s = started_s
        self.row = row
        self.check = check
        self.ways = ways
        self.health = health
        self.written = written  # the status that the worker's database has
        self.timer: asyncio.TimerHandle | None = None
        self.writing = False
        self.ended = False


class Checks(Service):
    """The health checks of the machines that run. `ways` say how to reach them."""

    def __init__(self, store: Store, host: Host, writer: MachineWriter, ways: Ways) -> None:
        self._store = store
        self._host = host
        self._writer = writer
        self._ways = ways
        self._watched: dict[str, list[_Watch]] = {}  # by machine
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._looking = 0
        self._waiting = 0  # besides those
        self._in_line: deque[_Watch] = deque()  # due
        self._turn: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        self._writer.on_change.append(self._changed)
        for row in self._store.read.select(MachineRow, "instance > ''"):
            self._changed(row)

    async def close(self) -> None:
        if self._changed in self._writer.on_change:
            self._writer.on_change.remove(self._changed)
        for machine in list(self._watched):
            self._end(machine)
        if self._turn:
            self._turn.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def shown(self, row: MachineRow) -> list[api.Check]:
        """The results of a machine's checks as the API shows them, each with the time of its last change of status.
        While the machine does not run, they are `warning`."""
        if not has_checks(row.config):
            return []
        row = row.as_it_runs()
        watched = self._watched.get(row.id, ())
        if watched and watched[0].row.instance == row.instance and row.state is State.started:
            return [_shown(each.check.name, each.health) for each in watched]
        rests = Health(output=f"the machine is {row.state}", changed_ms=row.updated_at_ms)
        return [_shown(check.name, rests) for check in check_config(row.config).checks]

    # --- which are looked at ---

    def _changed(self, row: MachineRow) -> None:
        """After every commit that changed a machine."""
        row = row.as_it_runs()
        watched = self._watched.get(row.id)
        runs = row.state is State.started and row.instance != "" and has_checks(row.config)
        if watched and not (runs and watched[0].row.instance == row.instance):
            self._end(row.id)
            watched = None
        if runs and not watched:
            self._start(row)

    def _start(self, row: MachineRow) -> None:
        watched = self._watched[row.id] = []
        now_ms = self._host.now_ms()
        started_s = asyncio.get_running_loop().time() - max(0, now_ms - row.started_at_ms) / 1000
        for check in check_config(row.config).checks:
            ways = list(self._ways(row, check.port))
            known = self._store.read.get(CheckRow, key_of(row.id, check.name))
            if known is None or known.instance != row.instance:
                health, written = checking.fresh(now_ms), ""
            else:
                health, written = checking.resumed(known.status, known.output, known.updated_at_ms), known.status
            watch = _Watch(row, check, ways, health, written, started_s)
            watched.append(watch)
            self._look_in(watch, checking.first_delay_s(health, check, self._host.rng.random()))

    def _end(self, machine: str) -> None:
        for watch in self._watched.pop(machine):
            watch.ended = True
            if watch.timer:
                watch.timer.cancel()

    # --- looking ---

    def _look_in(self, watch: _Watch, seconds: float) -> None:
        watch.timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._due, watch)

    def _due(self, watch: _Watch) -> None:
        watch.timer = None
        self._in_line.append(watch)
        if self._turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turn, begun = None, 0
        while self._in_line and begun < A_TURN and self._looking < AT_ONCE:
            watch = self._in_line.popleft()
            if not watch.ended:
                begun += 1
                self._looking += 1
                self._run(self._look(watch), f"check {watch.check.name} of {watch.row.id}")
        if begun:
            self._turn = asyncio.get_running_loop().call_later(TURN_S, self._take_turn)

    async def _look(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        began_s, only_waits = loop.time(), False

        def let_go() -> None:
            nonlocal only_waits
            if self._waiting < WAITING_MOST:
                only_waits = True
                self._waiting += 1
                self._give_back()

        held = loop.call_later(HELD_S, let_go)
        try:
            outcome, answered = await probe(watch.check, watch.ways)
        finally:
            held.cancel()
            if only_waits:
                self._waiting -= 1
            else:
                self._give_back()
        if watch.ended:
            return
        if answered is not None and answered != watch.ways[0]:  # the next look begins with it
            watch.ways.sort(key=lambda way: way != answered)
        self._learn(watch, outcome)
        delay_s = checking.delay_s(watch.health, watch.check, self._host.rng.random())
        self._look_in(watch, delay_s - (loop.time() - began_s))

    def _give_back(self) -> None:
        self._looking -= 1
        if self._in_line and self._turn is None:
            self._take_turn()

    def _learn(self, watch: _Watch, outcome: Outcome) -> None:
        age_s = asyncio.get_running_loop().time() - watch.started_s
        watch.health = checking.after(watch.health, outcome, watch.check, age_s=age_s, now_ms=self._host.now_ms())
        if watch.health.status != watch.written and not watch.writing:
            watch.writing = True
            self._run(self._write(watch), f"write {watch.check.name} of {watch.row.id}")

    async def _write(self, watch: _Watch) -> None:
        """Until the database has what is known: it may change meanwhile."""
        try:
            while not watch.ended and watch.health.status != watch.written:
                watch.written = await self._store.submit(lambda tx: self._put(tx, watch))
        except StoreError as error:  # a full disk: the next look tries again
            _logger.error("check.not_written", resource=watch.row.id, why=error.message, cause=CAUSE)
        finally:
            watch.writing = False

    def _put(self, tx: Tx, watch: _Watch) -> str:
        health, name = watch.health, watch.check.name
        cause = f"{CAUSE}: {name} is {health.status}: {health.output}"
        learned(tx, watch.row, watch.check, health, cause)
        return health.status

    def _run(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            raise error


def _shown(name: str, health: Health) -> api.Check:
    return api.Check(name=name, status=health.status, output=health.output, updated_at=rfc3339(health.changed_ms))


CAUSE = "local rule: health check"

_logger = get_logger()

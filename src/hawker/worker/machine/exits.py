"""What a worker does by itself: programs that end, and machines found not running when it starts.

These are the only runs that no request begins. Each carries the local rule that began it as its cause: the restart
policy with its verdict, or the start of the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from hawker.core import restart
from hawker.core.life import endings
from hawker.core.life.endings import Correction
from hawker.errors import StoreError
from hawker.model.config import Restart, known_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow, RunRow, WorkerRow
from hawker.services import Service
from hawker.store.tx import Reads, Tx
from hawker.telemetry import get_logger
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import Exit, Instance, UnknownInstance
from hawker.worker.drivers.driver import needed
from hawker.worker.flows.runner import STORE_RETRY_S, Busy, active_run
from hawker.worker.machine.unknown import unknown
from hawker.worker.machine.writer import MachineWriter

AGAIN_S = 1.0
AGAIN_MOST_S = 60.0


class Exits(Service):
    """Turns exits that the driver reports into runs of `machine.exit`. An exit that is told twice changes nothing.

    An exit of a machine that another run holds waits until that run has ended: a stop in progress reads the exit
    itself.
    """

    def __init__(self, context: WorkerContext, writer: MachineWriter) -> None:
        self._store = context.store
        self._host = context.host
        self._drivers = context.drivers
        self._runner = context.runner
        self._news = context.news
        self._writer = writer
        self._waiting: dict[str, Exit] = {}  # by machine; bounded by the number of machines
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._recovered = False
        self._closed = False
        context.runner.on_end.append(self.on_end)

    def on_exit(self, ended: Exit) -> None:
        """The driver's callback."""
        self._waiting[ended.machine] = ended
        self.on_end(ended.machine)

    def on_end(self, machine: str) -> None:
        """A run of this machine has ended: look at an exit that waited for it."""
        ended = self._waiting.get(machine)
        if ended and self._recovered and not self._closed:
            self._spawn(self._handle(ended), f"exit of {machine}")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def open(self) -> None:
        self._news.listen(self.on_exit, self.recover_late)
        await self.recover()

    async def recover(self) -> None:
        """At the worker's start, after the driver is open, before runs are resumed and before requests: compare what
        should run with what does.

        An instance that no machine knows is removed first: after a restore from an older backup the machine's program
        would otherwise be started beside a later one. One that still runs is there only where a person has decided that
        it may go (`worker.lost_database`). Then a machine that should run and has no instance begins again,
        and a program is frozen, or not, as its machine says.
        """
        # Nothing goes on meanwhile: exits that the driver tells of wait.
        found = await self._drivers.recover()
        for name, instances in found.items():
            await self._remove(name, unknown(self._store.read, instances))
        self._recovered = True
        for machine in list(self._waiting):
            self.on_end(machine)
        await self._correct(list(chain.from_iterable(found.values())), self._drivers.opened())

    async def recover_late(self, name: str, instances: Sequence[Instance]) -> None:
        """`recover` for a driver that could not be opened when the worker began, and is there only now. Nobody can ask
        it anything before this has returned."""
        orphans = unknown(self._store.read, instances)
        for instance in orphans:
            if instance.exit is None:  # the worker has started without having heard of it: nobody said it may go
                _logger.error("orphan.left", resource=instance.machine, instance=instance.key, cause=ORPHAN)
        await self._remove(name, (instance for instance in orphans if instance.exit))
        await self._correct(instances, {name})

    async def _remove(self, driver: str, orphans: Iterable[Instance]) -> None:
        for instance in orphans:
            _logger.warning("orphan.removed", resource=instance.machine, instance=instance.key, cause=ORPHAN)
            await self._or_later(partial(self._destroy, driver, instance.key), instance.key, ORPHAN)

    async def _destroy(self, driver: str, key: str) -> None:
        await self._drivers.of(driver).destroy(key, force=True)

    async def _correct(self, instances: Sequence[Instance], drivers: Collection[str]) -> None:
        """Make programs and rows agree, for the machines of these drivers: nothing is known of the other drivers'
        programs."""
        there = {instance.key: instance for instance in instances}
        for row in self._store.read.select(MachineRow, "instance > ''"):
            instance = there.get(row.instance)
            if row.driver not in drivers or (instance and instance.exit):
                continue
            match endings.found(row.state, there=bool(instance), frozen=bool(instance and instance.suspended)):
                case Correction.ended:
                    self.on_exit(Exit(key=row.instance, machine=row.id, error=LOST, at_ms=self._host.now_ms()))
                case Correction.freeze | Correction.thaw as wanted:
                    _logger.warning("instance.corrected", resource=row.id, why=wanted.value, cause=ROWS_DECIDE)
                    await self._or_later(partial(self._freeze, row), row.instance, ROWS_DECIDE)

    async def _freeze(self, row: MachineRow) -> None:
        """Freeze a program or let it run on, as its machine's row says. A machine that has another program by now is
        left alone."""
        now = self._store.read.get(MachineRow, row.id)
        if now is None or (now.state, now.instance) != (row.state, row.instance):
            return
        with suppress(UnknownInstance):  # it has just ended
            suspending = needed(self._drivers.of(row.driver).abilities.suspending, "suspend and resume")
            await (suspending.suspend if row.state is State.suspended else suspending.resume)(row.instance)

    async def _or_later(self, work: Callable[[], Awaitable[None]], instance: str, cause: str) -> None:
        """One instance that a driver cannot deal with now keeps no worker from starting: it is tried again later."""
        try:
            await work()
        except Exception as error:
            _logger.error("instance.left", instance=instance, why=str(error) or type(error).__name__, cause=cause)
            self._spawn(self._until_done(work, instance, cause), f"deal with {instance}")

    async def _until_done(self, work: Callable[[], Awaitable[None]], instance: str, cause: str) -> None:
        pause_s = AGAIN_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)
            try:
                await work()
            except Exception as error:
                _logger.error("instance.left", instance=instance, why=str(error) or type(error).__name__, cause=cause)
            else:
                return

    async def close(self) -> None:
        """Exits from now on are left to the next worker: its driver tells of them again."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, ended: Exit) -> None:
        if active_run(self._store.read, ended.machine):
            return  # on_end comes back when that run has ended
        pause_s = AGAIN_S
        while _concerned(self._store.read, ended):  # most who ask were stopped: that needs no transaction
            try:
                await self._store.submit(lambda tx: self._begin(tx, ended))
                break
            except Busy:
                return  # as above: it has just begun
            except StoreError as error:  # a full disk: the program has ended all the same
                _logger.error("store.refused", resource=ended.machine, cause="the program ended", why=error.message)
                await asyncio.sleep(STORE_RETRY_S)
            except Exception as error:  # it would be taken for running for ever, and nobody told
                why = f"{type(error).__name__}: {error}"
                _logger.error("exit.not_handled", resource=ended.machine, cause="the program ended", why=why)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_MOST_S)
        if self._waiting.get(ended.machine) == ended:
            del self._waiting[ended.machine]

    def _begin(self, tx: Tx, ended: Exit) -> None:
        if holder := active_run(tx, ended.machine):
            raise Busy(holder)  # it may be the launch of this very instance, which the machine's row does not name yet
        row = _concerned(tx, ended)
        if row is None:
            return
        config = known_config(row.config)
        verdict = self._verdict(tx, row, ended, config.restart)
        plan = endings.ended(again=verdict.again, auto_destroy=config.auto_destroy, of_host=config.of_host)

        def writes(tx: Tx, run: RunRow) -> None:
            after = self._writer.exited(tx, row, run, ended, requested=False, restarting=verdict.again)
            changes = {"instance": "", "desired": plan.desired, "restarts": verdict.restarts}
            self._writer.move(tx, after, *plan.path, cause=run.cause, **changes)

        self._runner.begin(
            tx,
            plan.flow,
            row.id,
            steps=plan.steps,
            cause=verdict.rule,
            source="flyd",
            args={"instance": ended.key, "resume_at_ms": tx.now_ms + int(verdict.delay_s * 1000)},
            writes=writes,
            free=True,
        )

    def _verdict(self, tx: Tx, row: MachineRow, ended: Exit, policy: Restart) -> restart.Verdict:
        if row.state is State.suspended:
            return restart.Verdict(
                again=False, delay_s=0.0, restarts=row.restarts, rule="the suspended program is gone"
            )
        worker = tx.get(WorkerRow, "worker")
        lost = ended.error == LOST or (worker is not None and worker.was_stopping(ended.at_ms))
        if lost and policy.policy != "no":
            return restart.Verdict(again=True, delay_s=0.0, restarts=row.restarts, rule=f"worker start: {LOST}")
        ending = restart.Ending(
            status=ended.status,
            oom_killed=ended.oom_killed,
            ran_s=max(0, ended.at_ms - row.started_at_ms) / 1000,
            restarts=row.restarts,
        )
        return restart.decide(policy, ending)


def _concerned(reads: Reads, ended: Exit) -> MachineRow | None:
    """The machine whose program has ended. None if that is known already, or if another program runs by now."""
    row = reads.get(MachineRow, ended.machine)
    alive = row and row.instance == ended.key and row.state in endings.HAS_PROGRAM
    return row if alive else None


LOST = "the program was gone when the worker started"
ORPHAN = "worker start: no machine knows this instance"
ROWS_DECIDE = "worker start: it is not as its machine is"

_logger = get_logger()

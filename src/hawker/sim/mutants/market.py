"""Mutations of the market: of workers, brokers and the catalog, each with the invariants that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apsw
from msgspec.structs import replace

from hawker.broker.claims import Claims
from hawker.broker.releases import Releases
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.core import capacity
from hawker.model.catalog import Change as CatalogChange
from hawker.model.catalog import Version
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import Reason, Refusal
from hawker.model.rows import FillRow, LogHeadRow, MachineRow, ReservationRow
from hawker.sim.mutants.base import Mutant
from hawker.sim.platform.replacing import Change
from hawker.store import db
from hawker.store.connection import prepare
from hawker.store.tx import Reads, Tx
from hawker.worker import ledger
from hawker.worker.drivers.base import Exit
from hawker.worker.flows.flow import Done, StepContext
from hawker.worker.flows.runner import Runner
from hawker.worker.machine import exits, leases
from hawker.worker.machine.endings import Endings
from hawker.worker.machine.exits import Exits
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.generations import Generations
from hawker.worker.market import Market

# --- what they do instead --------------------------------------------------------------------------------------------


def _nothing(*args: Any, **options: Any) -> None: ...


async def _nothing_async(*args: Any, **options: Any) -> None: ...


async def _claims_nothing(claims: Claims, *args: Any, **options: Any) -> bool:
    return True


def _unsynced(connection: apsw.Connection, **options: Any) -> None:
    prepare(connection, **options)
    connection.execute("pragma synchronous = off")


def _never_lapses(market: Market, tx: Tx) -> int:
    return 0


async def _forgets_what_it_holds(market: Market, key: str, cause: str) -> str:
    """The worker acknowledges a release and does not do it."""
    return ""


async def _releases_and_bars_nothing(market: Market, key: str, cause: str) -> str:
    """The worker releases an order, but takes it again if it comes again or late."""

    def change(tx: Tx) -> str:
        if done := tx.get(FillRow, key):
            return done.machine
        tx.record("reservation.released", key, cause=cause)
        if there := tx.get(ReservationRow, key):
            tx.delete(ReservationRow, key)
            ledger.adjust(tx, market._writer.capacity, there.resources, Resources())
        return ""

    return await market._store.submit(change)


def _also_stopped(reads: Reads, ended: Exit) -> MachineRow | None:
    """The worker takes a program's end for its machine's even after the machine was stopped."""
    row = reads.get(MachineRow, ended.machine)
    if row is None or (row.instance and row.instance != ended.key):
        return None
    return row if row.state in (State.started, State.suspended, State.stopped) else None


def _resumes_nothing(runner: Runner) -> int:
    return 0


def _takes_orders_while_cordoned(unfit: Callable[..., Refusal | None]) -> Callable[..., Refusal | None]:
    def look(market: Market, *args: Any) -> Refusal | None:
        refusal = unfit(market, *args)
        return None if refusal and refusal.reason is Reason.cordoned else refusal

    return look


async def _undoes_nothing(endings: Endings, context: StepContext) -> Done:
    return Done(endings.settle)


async def _leaves_the_directory(flows: MachineFlows, context: StepContext) -> Done:
    return await flows._clear(context)


def _publishes_at_once(log: OwnerLog, tx: Tx, head: LogHeadRow, changes: tuple[CatalogChange, ...]) -> None:
    """The worker answers before the commit, which may fail."""
    tx.put(replace(head, head=head.head + 1))
    log.tell(Version(log.owner, head.tier, head.epoch, head.head + 1, changes, head.floor))


def _nobody_supersedes(superseding: Generations, machine: MachineRow) -> str:
    return ""


MUTANTS: dict[str, Mutant] = {
    "ledger without check": Mutant(
        "a worker books what it has no room for", ("oversold", "S1"), (Change(capacity, "shortfall", _nothing),)
    ),
    "answer before durable": Mutant(
        "an answer goes out before its commit is on the disk",
        ("S2", "without a run", "log record", "expected number"),
        (Change(db, "prepare", _unsynced),),
    ),
    "release forgotten by the broker": Mutant(
        "an order in doubt is not released",
        ("S3",),
        (Change(Releases, "begin", _nothing),),
        ("cut at the answer",),
    ),
    "release forgotten by the worker": Mutant(
        "a worker acknowledges a release and does not do it",
        ("S3", "L2"),
        (Change(Market, "release", _forgets_what_it_holds),),
        ("cut at the answer",),
    ),
    "release bars nothing": Mutant(
        "an order that was given up is taken when it comes again",
        ("S3",),
        (Change(Market, "release", _releases_and_bars_nothing),),
        ("cut at the answer",),
    ),
    "stop undone": Mutant(
        "the restart policy starts what a user has stopped",
        ("S2",),
        (Change(exits, "_concerned", _also_stopped),),
    ),
    "lapse ignored": Mutant("reservations never lapse", ("reservations",), (Change(Market, "_lapse", _never_lapses),)),
    "claim not taken": Mutant(
        "an order with a key is confirmed without its claim", ("S4",), (Change(Claims, "take", _claims_nothing),)
    ),
    "exits forgotten at restart": Mutant(
        "a worker does not look at its start whether its programs are there",
        ("the world has", "its instance is", "S5"),
        (Change(Exits, "recover", _nothing_async),),
    ),
    "exits not heard": Mutant(
        "the end of a program is not noticed", ("the world has", "is active"), (Change(Exits, "on_exit", _nothing),)
    ),
    "runs not resumed": Mutant(
        "a worker leaves the runs of the one before it where they were",
        ("not at rest", "is active"),
        (Change(Runner, "resume", _resumes_nothing),),
    ),
    "lease not checked": Mutant("anybody may change a leased machine", ("S17",), (Change(leases, "check", _nothing),)),
    "cordon ignored": Mutant(
        "a cordoned worker takes orders",
        ("taken while the worker was cordoned",),
        (Change(Market, "_unfit", _takes_orders_while_cordoned(Market._unfit)),),
    ),
    "failed start not undone": Mutant(
        "what a failed launch left is not removed",
        ("S5", "the world has", "no machine", "left its directory"),
        (Change(Endings, "undo", _undoes_nothing),),
        ("failing driver", "slow driver"),
    ),
    "published before the commit": Mutant(
        "the catalog hears of rows that may not be kept",
        ("S11", "S12", "L1"),
        (Change(OwnerLog, "_append", _publishes_at_once),),
        ("full disk", "i/o error"),
    ),
    "generation ignored": Mutant(
        "a returning worker keeps machines that were ordered anew elsewhere",
        ("S5", "S4"),
        (Change(Generations, "by", _nobody_supersedes),),
        ("long power cut",),
    ),
    "directory left": Mutant(
        "a destroyed machine leaves its directory",
        ("left its directory",),
        (Change(MachineFlows, "_purge", _leaves_the_directory),),
    ),
}

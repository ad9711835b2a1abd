"""The row of the worker itself: made at its first start, and changed when its host goes down and comes up again."""

from __future__ import annotations

from msgspec.structs import replace

from hawker.core import capacity as ledger_rules
from hawker.errors import Refused
from hawker.host import Host
from hawker.model.rows import WorkerRow
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker import ledger
from hawker.worker.expiries import shorten
from hawker.worker.settings import WorkerSettings


def identify(tx: Tx, settings: WorkerSettings, host: Host) -> WorkerRow:
    """The worker's own row. Also notes the end of a shutdown of the host. Raises `Refused` for the database of another
    worker."""
    me = tx.get(WorkerRow, "worker")
    if me is None:
        me = WorkerRow(name=settings.name, region=settings.region, epoch=host.ulid(), created_at_ms=tx.now_ms)
    elif (me.name, me.region) != (settings.name, settings.region):
        raise Refused(
            f"{settings.directory} belongs to worker {me.name} in {me.region}, "
            f"not {settings.name} in {settings.region}",
            hint="give each worker a directory of its own",
        )
    me = replace(me, started_again_ms=tx.now_ms)
    tx.record("worker.started", me.name, cause="worker start")
    tx.put(me)
    shorten(tx)
    held = ledger.held(tx)
    try:
        ledger_rules.check(settings.capacity, held)
    except AssertionError as error:
        # Capacity was lowered below what is held: nothing is evicted, nothing new fits.
        _logger.warning("capacity.below_held", worker=me.name, why=str(error), cause="worker start")
    return me


def mark_stopping(tx: Tx) -> None:
    """From now until the next start programs end because the host goes down, not by themselves."""
    me = tx.get(WorkerRow, "worker")
    assert me is not None  # written at the start
    tx.record("worker.stopping", me.name, cause="the host shuts down")
    tx.put(replace(me, stopping_since_ms=tx.now_ms))


_logger = get_logger()

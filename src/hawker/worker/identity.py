"""What a worker writes when it starts: its own row, and the times of leases and reservations."""

from __future__ import annotations

from msgspec.structs import replace

from hawker.core import capacity as ledger_rules
from hawker.core.deadlines import left_ms
from hawker.errors import Refused
from hawker.host import Host
from hawker.model.rows import LeaseRow, ReservationRow, WorkerRow
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker import ledger
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


def shorten(tx: Tx) -> None:
    """Shorten leases and reservations that a clock which was ahead has made too long. Needs an open record. Asked again
    it changes nothing.

    They end at a time of a clock that nobody sets while a process lives (`hawker.host.Host.steady_ms`). The next
    process begins with the wall clock as it is by then, which may have been set back: then none lasts longer than its
    own length. Backoffs and the delays of runs need no such look: whoever waits for them asks `hawker.core.deadlines`.
    """
    now_ms, living = tx.steady_ms, "body ->> '$.expires_at_ms' > ? order by id"
    for lease in tx.select(LeaseRow, living, (now_ms,)):
        until_ms = now_ms + left_ms(lease.expires_at_ms, lease.ttl_s * 1000, now_ms)
        if until_ms < lease.expires_at_ms:
            tx.put(replace(lease, expires_at_ms=until_ms))
    for held in tx.select(ReservationRow, living, (now_ms,)):
        until_ms = now_ms + left_ms(held.expires_at_ms, held.expires_at_ms - held.created_at_ms, now_ms)
        if until_ms < held.expires_at_ms:
            tx.put(replace(held, created_at_ms=now_ms, expires_at_ms=until_ms))


_logger = get_logger()

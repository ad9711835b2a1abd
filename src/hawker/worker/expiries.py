"""When a worker starts, it shortens leases and reservations that a clock which was ahead has made too long.

They end at a time of a clock that nobody sets while a process lives (`hawker.host.Host.steady_ms`). The next process
begins with the wall clock as it is by then, which may have been set back: then none lasts longer than its own length.
Backoffs and the delays of runs need no such look: whoever waits for them asks `hawker.core.deadlines`.
"""

from __future__ import annotations

from msgspec.structs import replace

from hawker.core.deadlines import left_ms
from hawker.model.rows import LeaseRow, ReservationRow
from hawker.store.tx import Tx


def shorten(tx: Tx) -> None:
    """Needs an open record. Asked again it changes nothing."""
    now_ms, living = tx.steady_ms, "body ->> '$.expires_at_ms' > ? order by id"
    for lease in tx.select(LeaseRow, living, (now_ms,)):
        until_ms = now_ms + left_ms(lease.expires_at_ms, lease.ttl_s * 1000, now_ms)
        if until_ms < lease.expires_at_ms:
            tx.put(replace(lease, expires_at_ms=until_ms))
    for held in tx.select(ReservationRow, living, (now_ms,)):
        until_ms = now_ms + left_ms(held.expires_at_ms, held.expires_at_ms - held.created_at_ms, now_ms)
        if until_ms < held.expires_at_ms:
            tx.put(replace(held, created_at_ms=now_ms, expires_at_ms=until_ms))

"""Leases: a client's exclusive right to change one machine for a while.

A lease is acquired with a time to live, refreshed by its holder with the same nonce, released, or it lapses by the
worker's own clock, which is one that nobody sets. While it lasts, changes of the machine without its nonce are refused.
"""

from __future__ import annotations

from hawker.errors import Conflict, Invalid, NotFound, PreconditionFailed
from hawker.host import Host
from hawker.model.machine import State
from hawker.model.rows import LeaseRow, MachineRow
from hawker.model.values import rfc3339
from hawker.store.tx import Reads, Tx
from hawker.worker.request import Request

TTL_S_DEFAULT = 120
TTL_S_MAX = 24 * 3600


class LeaseHeld(Conflict):
    """Another client holds the lease."""

    def __init__(self, lease: LeaseRow) -> None:
        super().__init__(
            f"machine ID {lease.machine} lease currently held by {lease.owner or 'another client'}, "
            f"expires at {rfc3339(lease.expires_at_ms)}",
            details={"owner": lease.owner, "expires_at_ms": lease.expires_at_ms},
        )


def current(reads: Reads, machine: str, steady_ms: int) -> LeaseRow | None:
    """The lease that is in force, if any."""
    lease = reads.get(LeaseRow, machine)
    return lease if lease and lease.expires_at_ms > steady_ms else None


def check(tx: Tx, machine: str, request: Request) -> None:
    """Raises `LeaseHeld` unless nobody holds a lease or the caller brought its nonce."""
    lease = current(tx, machine, tx.steady_ms)
    if lease and lease.nonce != request.nonce:
        raise LeaseHeld(lease)


def acquire(tx: Tx, host: Host, row: MachineRow, request: Request, ttl_s: int, description: str = "") -> LeaseRow:
    """Acquire, or refresh when the caller brings the nonce in force: the same nonce with a new time. Raises
    `LeaseHeld`."""
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise Invalid("ttl", ttl_s, f"give seconds from 1 to {TTL_S_MAX}")
    if row.state is State.destroyed:
        raise PreconditionFailed(f"failed_precondition: machine {row.id} is destroyed: nobody can change it any more")
    check(tx, row.id, request)
    held = current(tx, row.id, tx.steady_ms)
    lease = LeaseRow(
        machine=row.id,
        nonce=held.nonce if held else host.token(bits=48),
        owner=request.owner,
        description=description or (held.description if held else ""),
        expires_at_ms=tx.steady_ms + ttl_s * 1000,
        ttl_s=ttl_s,
    )
    tx.record("lease.refreshed" if held else "lease.acquired", row.id, cause=request.cause, trace=request.trace)
    tx.put(lease)
    return lease


def release(tx: Tx, row: MachineRow, request: Request) -> None:
    """Give the lease back. Raises `NotFound` when there is none, `LeaseHeld` when the nonce is not its own."""
    if current(tx, row.id, tx.steady_ms) is None:
        raise NotFound(f"lease not found for machine {row.id}")
    check(tx, row.id, request)
    tx.record("lease.released", row.id, cause=request.cause, trace=request.trace)
    tx.delete(LeaseRow, row.id)

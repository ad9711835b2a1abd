"""The ledger's arithmetic: is there room, and if not, what is short and by how much.

The worker's ledger is one durable row of totals, `held`, changed in the same transaction as the machine or
reservation it counts. This module decides; `hawker.worker.ledger` reads and writes that row.
"""

from __future__ import annotations

import msgspec

from hawker.model.guest import RESOURCES, Resources


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """The first resource that is short, in the fixed order of `RESOURCES`, with true figures."""

    resource: str
    wanted: int
    free: int


def free(capacity: Resources, held: Resources) -> Resources:
    """What is left. Negative where a worker's capacity was lowered below what it already holds: nothing is evicted."""
    return capacity - held


def shortfall(capacity: Resources, held: Resources, wanted: Resources) -> Shortfall | None:
    """None when `wanted` fits beside `held`; else the first resource that does not. What is not wanted is not
    checked."""
    for name in RESOURCES:
        need = getattr(wanted, name)
        left = getattr(capacity, name) - getattr(held, name)
        if need > 0 and need > left:
            return Shortfall(resource=name, wanted=need, free=max(0, left))
    return None


def setting_of(resource: str) -> str:
    """What a worker's configuration calls the amount of a resource that it sells."""
    return "worker.cpu_overcommit" if resource == "cpus_shared" else f"worker.capacity.{resource}"


def check(capacity: Resources, held: Resources) -> None:
    """Raises when the ledger is oversold or negative: a bug of ours, whatever the callers did."""
    for name in RESOURCES:
        used, most = getattr(held, name), getattr(capacity, name)
        if used < 0:
            raise AssertionError(f"ledger: {name} held is {used}")
        if used > most:
            raise AssertionError(f"ledger: {name} oversold: {used} of {most}")

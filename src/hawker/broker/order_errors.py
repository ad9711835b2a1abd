"""What the client is told whose order was not filled: one sentence, what to do, and a reason for each worker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hawker.core.capacity import setting_of
from hawker.errors import Conflict, NoCapacity, Refused, Unreachable
from hawker.model.guest import Guest
from hawker.model.market import Reason, Refusal

_AT_ITS_DISK = {Reason.disk_full: "make room on the disk", Reason.disk_failed: "look at the disk"}


def not_taken(refusals: Sequence[Refusal]) -> Refused | None:
    """The error of a worker that does not take what the order says, though this broker did: it is of another version.
    None when there was room nowhere, and no more."""
    refusal = next((r for r in refusals if r.error is not None), None)
    if refusal is None or refusal.error is None:
        return None
    details = {**(refusal.error.get("details") or {}), "refusals": msgspec.to_builtins(refusals)}
    error = Refused(f"{refusal.worker}: {refusal.error.get('error')}", details=details)
    error.status = refusal.status
    error.code = str(refusal.error.get("status", error.code))
    return error


def no_capacity(region: str, guest: Guest, regions: Sequence[str], refusals: Sequence[Refusal]) -> NoCapacity:
    """The error for an order that nobody filled, with true figures per worker. `region` is what the client wrote,
    `regions` what that means."""
    where = ", ".join(regions) or region
    reasons = "; ".join(r.sentence() for r in refusals)
    if not refusals:
        text, hint = f"no worker is in region {where}", "hawker regions shows the ones there are"
    elif all(r.reason is Reason.no_driver for r in refusals):
        names = ", ".join(dict.fromkeys(r.driver for r in refusals if r.driver)) or "such"
        text = f"no worker in {where} can run {names} machines ({reasons})"
        hint = "hawker doctor, on a worker's host, tells what it lacks"
    else:
        asked = f"{guest.cpus} {guest.cpu_kind} cpus and {guest.memory_mb} MiB"
        text = f"insufficient resources available to fulfill request: {asked} in {where} ({reasons})"
        hint = "hawker workers shows what is free; try a smaller guest or another region"
        if short := sorted({r.resource for r in refusals if r.reason is Reason.full}):
            hint += f"; {' and '.join(map(setting_of, short))} of the workers' configuration may be raised"
        for reason, remedy in _AT_ITS_DISK.items():
            if workers := [r.worker for r in refusals if r.reason is reason]:
                hint += f"; {remedy} of {', '.join(workers)}"
    return NoCapacity(text, hint=hint, details={"refusals": msgspec.to_builtins(refusals)})


def in_doubt(worker: str, problem: str, *, keyed: bool, again: str) -> Unreachable:
    """The error for an order that may have been filled."""
    state = "the order may be filled" if keyed else "the order is being undone there"
    return Unreachable(f"{worker} {problem} while it filled the order; {state}", hint=again)


def not_claimed(replaces: str, *, again: str) -> Conflict:
    what = f"that replaces machine {replaces}" if replaces else "with this idempotency key"
    return Conflict(f"another order {what} is being filled", hint=again)

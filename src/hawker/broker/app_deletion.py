"""Destroying all machines of an app whose deletion a client asks for: all of them, or none.

The public API's clients send a bare DELETE and expect the machines to go. Leases are looked up first: a deletion that
stopped at the third machine of five would leave what nobody wanted. With `force` leases are no obstacle, as the API
documents it.
"""

from __future__ import annotations

import asyncio

from hawker.broker.fleet import Fleet
from hawker.broker.relay import CALL_S, by
from hawker.errors import Conflict, HawkerError, NotFound
from hawker.http.call import Call
from hawker.model.api import Lease, Machine
from hawker.model.machine_calls import DestroyMachine, ListMachines
from hawker.model.market import CALL_S as MARKET_CALL_S
from hawker.model.request_codec import encode
from hawker.model.values import rfc3339

AT_ONCE = 16
"""How many machines are destroyed at the same time. Each takes a commit or two, for which other commits wait."""
ROUNDS = 3
"""How many times leases are looked up: a machine may be leased after the last time and before it is destroyed."""


async def destroy_all(fleet: Fleet, call: Call, app: str, *, force: bool) -> None:
    """Raises `Conflict` for a lease of somebody else, unless `force`, and for a machine that could not be destroyed;
    and the error of a worker that does not list its machines."""
    failed: list[str] = []
    for at in range(ROUNDS):
        machines = await _machines(fleet, app)
        if at == 0 and not force:
            _check_leases(call, app, machines)
        slots = asyncio.Semaphore(AT_ONCE)
        gone = [_destroy(fleet, call, worker, app, machine, slots) for worker, machine in machines]
        failed = [why for why in await asyncio.gather(*gone) if why]
        if not failed:
            return
    raise Conflict("; ".join(failed))


async def _machines(fleet: Fleet, app: str) -> list[tuple[str, Machine]]:
    """The app's machines, each with its worker."""
    answers, errors = await fleet.ask_all(ListMachines(app, include_leases=True), MARKET_CALL_S)
    for error in errors.values():
        raise error
    return [(worker, machine) for worker, machines in answers.items() for machine in machines]


def _check_leases(call: Call, app: str, machines: list[tuple[str, Machine]]) -> None:
    held = [
        f"machine ID {machine.id} lease currently held by {machine.lease.owner or 'another client'}, "
        f"expires at {rfc3339(machine.lease.expires_at * 1000)}"
        for _, machine in machines
        if isinstance(machine.lease, Lease) and machine.lease.nonce != call.nonce
    ]
    if held:
        raise Conflict(
            f"app {app} is not deleted, and none of its machines: {'; '.join(held)}",
            hint="delete it again when the lease has ended, or with force=true, which heeds no leases",
        )


async def _destroy(fleet: Fleet, call: Call, worker: str, app: str, machine: Machine, slots: asyncio.Semaphore) -> str:
    """Why it could not be done, "" when it was."""
    nonce = machine.lease.nonce if isinstance(machine.lease, Lease) else ""
    sent = encode(DestroyMachine(app, machine.id, nonce=nonce, force=True))
    link = fleet.links.get(worker)
    try:
        if link is None:
            raise HawkerError(f"worker {worker} is not known any more")
        async with slots:
            await link.send_unread(sent._replace(headers={**sent.headers, **by(call)}), CALL_S)
    except HawkerError as error:
        if error.status != NotFound.status:
            return f"machine {machine.id} could not be destroyed: {error.message}"
    return ""

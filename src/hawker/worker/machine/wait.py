"""Waiting for what comes of a machine: its state, as the API's `wait` defines it, and the last line of its log.

The machine is looked at once and then after every committed change, so a state that lasts a moment is not missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from hawker.errors import DeadlineExceeded, Invalid, NotFound, PreconditionFailed
from hawker.model.machine import SETTLED, State
from hawker.model.rows import EventRow, MachineRow, VersionRow
from hawker.store.db import Store
from hawker.worker.drivers.base import LogLine
from hawker.worker.flows.runner import failing
from hawker.worker.machine.writer import MachineWriter, get_machine

LAST_LINES_S = 0.1
"""How long the log of a machine that is gone must be silent to have ended. A driver tells of the last line before it
has purged the machine, so this waits for nothing but its turn to read."""
WAITED_FOR = ("started", "stopped", "suspended", "destroyed", "failed", "settled")


class Reached(msgspec.Struct, frozen=True):
    """The machine and its latest event when a state that was waited for came."""

    row: MachineRow
    event_id: str


def wanted_states(names: list[str]) -> frozenset[State]:
    """States from their names; `settled` is every resting one. Raises `Invalid`."""
    states: set[State] = set()
    for name in names or ["started"]:
        if name not in WAITED_FOR:
            raise Invalid("state", name, f"wait for one of {', '.join(WAITED_FOR)}")
        states |= SETTLED if name == "settled" else {State(name)}
    return frozenset(states)


async def wait_state(
    store: Store,
    writer: MachineWriter,
    app: str,
    machine_id: str,
    states: frozenset[State],
    *,
    version: str = "",
    after_event: str = "",
    timeout_s: float,
) -> Reached:
    """Return once the machine is in one of `states`. With `version`, only that version counts; with `after_event`, only
    what happened after that event.

    Raises `NotFound`, `PreconditionFailed` when the version has been replaced, `DeadlineExceeded`, which says what is
    tried again and again, if something is.
    """
    row = get_machine(store.read, machine_id, app)
    names = ", ".join(sorted(states))
    reached: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()

    def look(now: MachineRow, event: EventRow | None) -> None:
        nonlocal row
        row = now
        if reached.done() or event is not None:
            return  # an event alone reaches no state: a program's exit is told before the move that follows from it
        if version and now.version != version:
            text = f"machine failed to reach desired state, {names}, currently replaced"
            reached.set_exception(PreconditionFailed(f"failed_precondition: {text}"))
        elif now.state in states and (event_id := _last_event(store, machine_id)) > after_event:
            reached.set_result(Reached(now, event_id))

    if version and version != row.version:
        known = store.read.get(VersionRow, version)
        if known is None or known.machine != machine_id:
            raise NotFound(f"machine not found: {machine_id} has no version {version}")
    stop = writer.listen(machine_id, look)
    try:
        look(row, None)
        async with asyncio.timeout(timeout_s):
            return await reached
    except TimeoutError:
        text = f"machine failed to reach desired state, {names}, currently {row.state}"
        why = failing(store.read, machine_id)
        raise DeadlineExceeded(
            f"deadline_exceeded: {text}{why and ': ' + why}", details={"machine": machine_id, "why": why}
        ) from None
    finally:
        stop()


def _last_event(store: Store, machine_id: str) -> str:
    """The id of a machine's latest event. Read after the commit, so it is the one that came with the state."""
    found = store.read.query("select max(id) from event where machine = ?", (machine_id,))
    return found[0][0] or ""


async def until_destroyed(
    lines: AsyncIterator[LogLine], store: Store, writer: MachineWriter, machine: str
) -> AsyncIterator[LogLine]:
    """Give the lines of a log as they come, to the last one once the machine is destroyed."""
    gone = False
    waiting: asyncio.Timeout | None = None

    def look(now: MachineRow, event: EventRow | None) -> None:
        nonlocal gone
        if now.state is State.destroyed and not gone:
            gone = True
            if waiting:
                waiting.reschedule(asyncio.get_running_loop().time() + LAST_LINES_S)

    stop = writer.listen(machine, look)
    row = store.read.get(MachineRow, machine)
    gone = row is None or row.state is State.destroyed
    try:
        while True:
            try:
                async with asyncio.timeout(LAST_LINES_S if gone else None) as waiting:
                    line = await anext(lines)
            except (StopAsyncIteration, TimeoutError):
                return
            finally:
                waiting = None
            yield line
    finally:
        stop()

"""The writer of machines: their rows, what they hold of the ledger, the events that the API shows, and who is told.

Every change of a machine goes through `MachineWriter`, inside a change of the store: a move is checked against the
table of legal moves, the ledger follows the state, the event carries run, step and cause, and waiters are told
after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from hawker.errors import NotFound
from hawker.host import Host
from hawker.model.guest import Resources
from hawker.model.machine import ENDS_ASLEEP, State, check_move
from hawker.model.rows import EventRow, MachineRow, RunRow
from hawker.model.values import rfc3339
from hawker.store.tx import Reads, Tx
from hawker.worker import ledger
from hawker.worker.drivers.base import Exit
from hawker.worker.machine import check_rows, tally
from hawker.worker.ports import PORTS, Holder, nobody

Listener = Callable[[MachineRow, EventRow | None], None]


class MachineWriter:
    """The only writer of machine rows and events. `capacity` is the worker's, for the ledger. `ports` are the ports of
    the host that the worker may give to machines; `holder` says which of them a program of the host has."""

    def __init__(self, host: Host, capacity: Resources, ports: range = PORTS, holder: Holder = nobody) -> None:
        self._host = host
        self.capacity = capacity
        self.ports = ports
        self.holder = holder
        self._listeners: dict[str, list[Listener]] = {}
        self.on_change: list[Callable[[MachineRow], None]] = []
        """Called after every committed change of any machine."""

    def move(self, tx: Tx, row: MachineRow, *states: State, cause: str, **changes: Any) -> MachineRow:
        """Take a machine through `states` (none: it stays where it is) and set other fields.

        Raises `ledger.Full` when the new state needs room that is not there.
        """
        state = row.state
        for new in states:
            state = check_move(row.id, state, new)
        asleep = state is State.suspended or (row.asleep and state in ENDS_ASLEEP)
        at_ms = max(tx.now_ms, row.updated_at_ms)
        after = replace(row, state=state, cause=cause, updated_at_ms=at_ms, asleep=asleep, **changes)
        ledger.adjust(tx, self.capacity, row.held(), after.held())
        if state is State.destroyed is not row.state:
            tally.count(tx, row.app, -1)
        tx.put(after)
        check_rows.follow(tx, row.as_it_runs(), after.as_it_runs())
        tx.after_commit(lambda: self._tell(after, None))
        return after

    def event(
        self,
        tx: Tx,
        row: MachineRow,
        kind: str,
        status: str,
        run: RunRow,
        *,
        request: dict[str, Any] | None = None,
    ) -> MachineRow:
        """Add an event. Times of one machine's events strictly rise, whatever the clock does: clients order by them."""
        at_ms = max(tx.now_ms, row.updated_at_ms + 1)
        event = EventRow(
            id=self._host.ulid(),
            machine=row.id,
            version=row.version,
            type=kind,
            status=status,
            source=run.source,
            at_ms=at_ms,
            cause=run.cause,
            run=run.id,
            step=run.steps[run.next] if run.next < len(run.steps) else "",
            request=request,
        )
        after = replace(row, updated_at_ms=at_ms)
        tx.put(event)
        tx.put(after)
        tx.after_commit(lambda: self._tell(after, event))
        return after

    def exited(
        self, tx: Tx, row: MachineRow, run: RunRow, ended: Exit, *, requested: bool, restarting: bool
    ) -> MachineRow:
        """The `exit` event of an instance."""
        request = exit_request(row, ended, requested=requested, restarting=restarting)
        return self.event(tx, row, "exit", "stopped", run, request=request)

    def listen(self, machine: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every committed change of a machine. Returns how to stop that."""
        listeners = self._listeners.setdefault(machine, [])
        listeners.append(listener)

        def stop() -> None:
            listeners.remove(listener)
            if not listeners:
                self._listeners.pop(machine, None)

        return stop

    def _tell(self, row: MachineRow, event: EventRow | None) -> None:
        for changed in list(self.on_change):
            changed(row)
        for listener in list(self._listeners.get(row.id, ())):
            listener(row, event)


def get_machine(reads: Reads, machine_id: str, app: str | None = None) -> MachineRow:
    """Raises `NotFound`, also when the machine belongs to another app."""
    row = reads.get(MachineRow, machine_id)
    if row is None or (app is not None and row.app != app):
        raise NotFound(f"machine not found: {machine_id}")
    return row


def exit_request(row: MachineRow, ended: Exit, *, requested: bool, restarting: bool) -> dict[str, Any]:
    """An event's `request` about an ending, in the one form that release commands, smoke checks and SDKs read."""
    exit_event = {
        "exit_code": ended.status,
        "guest_exit_code": ended.code if ended.code is not None else 0,
        "guest_signal": ended.signal if ended.signal is not None else -1,
        "guest_error": ended.error,
        "signal": ended.signal if ended.signal is not None else -1,
        "error": ended.error,
        "oom_killed": ended.oom_killed,
        "requested_stop": requested,
        "restarting": restarting,
        "exited_at": rfc3339(ended.at_ms),
    }
    return {"exit_event": exit_event, "restart_count": row.restarts}

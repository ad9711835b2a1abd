"""The worker's handlers for what is inside a machine that runs: its memory, sessions with commands, connections."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import StreamingResponse

from hawker.errors import Conflict, Invalid, NotBuilt, PreconditionFailed
from hawker.http.app import Handler
from hawker.http.call import Call
from hawker.model import api, inside_api
from hawker.model.config import PROCESS, check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.store.db import Store
from hawker.worker.drivers.base import NotSupported, StartFailed, Terminal, UnknownInstance
from hawker.worker.drivers.several import Runtimes
from hawker.worker.machine.admission import Parked
from hawker.worker.machine.inside.connecting import connect
from hawker.worker.machine.inside.probing import Address
from hawker.worker.machine.inside.reaching import own_ways
from hawker.worker.machine.inside.sessions import Session, Sessions
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.updates import Updates
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import request_of


class CannotStart(Invalid):
    """A session's command: not found, not executable."""

    status = 422
    code = "start_failed"


class NotConnected(PreconditionFailed):
    """Nothing takes connections at the port, or there is no way there."""

    code = "not_connected"


class InsideApi:
    """Handlers by operation in `handlers()`. `row` is a request's machine, `running` one that must run; `ways` are
    where its ports are."""

    def __init__(
        self,
        store: Store,
        driver: Runtimes,
        machines: Machines,
        updates: Updates,
        sessions: Sessions,
        connections: Sessions,
        row: Callable[[Call], MachineRow],
        running: Callable[[Call], MachineRow],
        ways: Callable[[MachineRow, int], Sequence[Address]],
    ) -> None:
        self._store = store
        self._driver = driver
        self._machines = machines
        self._updates = updates
        self._sessions = sessions
        self._connections = connections
        self._row = row
        self._running = running
        self._ways = ways

    def handlers(self) -> dict[str, Handler]:
        return {
            "Machines_show_memory": self.show_memory,
            "Machines_set_memory": self.set_memory,
            "Machines_open_session": self.open_session,
            "Machines_connect": self.connect,
            "Machines_read_session": self.read_session,
            "Machines_write_session": self.write_session,
            "Machines_resize_session": self.resize_session,
            "Machines_close_session": self.close_session,
        }

    async def show_memory(self, call: Call) -> Any:
        return await self._memory(self._row(call))

    async def set_memory(self, call: Call) -> Any:
        row = self._row(call)
        body = call.read(inside_api.SetMemory)
        request = request_of(call)
        run_id = await self._updates.resize(row.app, row.id, request, memory_mb=body.limit_mb, cpus=body.cpus)
        run = await self._machines.wait_ended(run_id)
        if run and run.status == "parked":
            raise Parked(run)
        if run and run.status != "done":
            raise Conflict(f"machine {row.id} keeps its size: {run.error}", details={"machine": row.id})
        return await self._memory(get_machine(self._store.read, row.id))

    async def _memory(self, row: MachineRow) -> inside_api.Memory:
        limit = check_config(row.config).guest.memory_mb
        used = 0
        if row.state is State.started and row.instance:
            try:
                used = (await self._driver.of(row.driver).stats(row.instance)).memory_bytes >> 20
            except UnknownInstance:
                used = 0  # it has just ended
        return inside_api.Memory(limit_mb=limit, available_mb=max(0, limit - used))

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def open_session(self, call: Call) -> Any:
        body = call.read(inside_api.OpenSession)
        if not body.command[0] or any("\0" in word for word in body.command):
            raise Invalid("command", body.command, 'give the command as a list such as ["ls", "-l"]')
        for name, value in body.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise Invalid(f"env.{name}", value, "a name has at least one character and neither '=' nor NUL")
        row = self._running(call)

        async def start() -> Terminal:
            return await self._driver.of(row.driver).terminal(
                row.instance, body.command, tty=body.tty, env=body.env, columns=body.columns, rows=body.rows
            )

        try:
            session_id = await self._sessions.open(row.id, start)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        except NotSupported:
            raise NotBuilt("command", body.command, f"the {row.driver} driver has no sessions; use exec") from None
        except StartFailed as error:
            raise CannotStart("command", body.command, str(error)) from None
        return inside_api.Session(id=session_id)

    async def connect(self, call: Call) -> Any:
        port = call.read(inside_api.Connect).port
        row = self._running(call)
        if row.driver == PROCESS:
            ways = await self._own_ways(row, port)
        else:
            ways = self._ways(row, port)
        if not ways:
            known = ", ".join(str(each.internal_port) for each in row.ports if each.protocol == "tcp") or "none"
            raise NotConnected(
                f"machine {row.id} has no network, and its port {port} is not published; published are: {known}"
            )
        try:
            session_id = await self._connections.open(row.id, lambda: connect(ways))
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0).lower()
            hint = "" if row.driver == PROCESS else "its program must listen on all addresses, 0.0.0.0 or [::]"
            raise NotConnected(f"port {port} of machine {row.id} takes no connection: {why}", hint=hint) from None
        return inside_api.Session(id=session_id)

    async def _own_ways(self, row: MachineRow, port: int) -> Sequence[Address]:
        """The host has ports of its own, of this worker and of other machines. Raises `PreconditionFailed`."""
        try:
            processes = await self._driver.of(row.driver).processes(row.instance)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        if ways := own_ways(processes, port):
            return ways
        raise NotConnected(f"port {port} of machine {row.id} takes no connection: none of its programs listens there")

    async def read_session(self, call: Call) -> Any:
        session = self._session(call)
        return StreamingResponse(session.output(), media_type="application/octet-stream")

    async def write_session(self, call: Call) -> Any:
        await self._session(call).write(call.body, end=call.flag("end"))
        return api.Ok()

    async def resize_session(self, call: Call) -> Any:
        body = call.read(inside_api.Window)
        await self._session(call).resize(body.columns, body.rows)
        return api.Ok()

    async def close_session(self, call: Call) -> Any:
        await self._kind(call).remove(self._row(call).id, call.path("session_id"))
        return api.Ok()

    def _session(self, call: Call) -> Session:
        return self._kind(call).get(self._row(call).id, call.path("session_id"))

    def _kind(self, call: Call) -> Sessions:
        return self._connections if call.path("session_id") in self._connections else self._sessions

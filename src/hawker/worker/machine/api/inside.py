"""The worker's handlers for what is inside a machine that runs: its memory, sessions with commands, connections."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from starlette.responses import StreamingResponse

from hawker.errors import Conflict, Invalid, NotBuilt, PreconditionFailed
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import api, inside_api
from hawker.model.config import PROCESS, check_config
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.services import Service
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import NotSupported, StartFailed, Terminal, UnknownInstance
from hawker.worker.drivers.driver import needed
from hawker.worker.machine.admission import Parked
from hawker.worker.machine.api.machines import MachineApi
from hawker.worker.machine.inside.checks import Ways
from hawker.worker.machine.inside.connecting import connect
from hawker.worker.machine.inside.probing import Address
from hawker.worker.machine.inside.reaching import own_ways
from hawker.worker.machine.inside.sessions import CONNECTIONS_MAX, Session, Sessions
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


class InsideApi(Service):
    """`row` is a request's machine, `running` one that must run; `ways` are
    where its ports are."""

    def __init__(
        self, context: WorkerContext, api: MachineApi, machines: Machines, updates: Updates, ways: Ways
    ) -> None:
        self._store = context.store
        self._drivers = context.drivers
        self._machines = machines
        self._updates = updates
        self._sessions = Sessions(context.host)
        self._connections = Sessions(context.host, CONNECTIONS_MAX)
        self._row = api.row
        self._running = api.running
        self._ways = ways

    async def close(self) -> None:
        await self._sessions.close()
        await self._connections.close()

    def routes(self) -> tuple[Route, ...]:
        return (
            on(inside_api.ShowMemory, self.show_memory),
            on(inside_api.SetMemory, self.set_memory),
            on(inside_api.OpenSession, self.open_session),
            on(inside_api.Connect, self.connect),
            on(inside_api.ReadSession, self.read_session),
            on(inside_api.WriteSession, self.write_session),
            on(inside_api.ResizeSession, self.resize_session),
            on(inside_api.CloseSession, self.close_session),
        )

    async def show_memory(self, call: Call, request: inside_api.ShowMemory) -> Any:
        return await self._memory(self._row(request))

    async def set_memory(self, call: Call, request: inside_api.SetMemory) -> Any:
        row = self._row(request)
        asker = request_of(call)
        run_id = await self._updates.resize(row.app, row.id, asker, memory_mb=request.limit_mb, cpus=request.cpus)
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
                used = (await self._drivers.of(row.driver).stats(row.instance)).memory_bytes >> 20
            except UnknownInstance:
                used = 0  # it has just ended
        return inside_api.Memory(limit_mb=limit, available_mb=max(0, limit - used))

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def open_session(self, call: Call, request: inside_api.OpenSession) -> Any:
        if not request.command[0] or any("\0" in word for word in request.command):
            raise Invalid("command", request.command, 'give the command as a list such as ["ls", "-l"]')
        for name, value in request.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise Invalid(f"env.{name}", value, "a name has at least one character and neither '=' nor NUL")
        row = self._running(request)

        async def start() -> Terminal:
            terminals = needed(self._drivers.of(row.driver).abilities.terminals, "sessions")
            return await terminals.terminal(
                row.instance,
                request.command,
                tty=request.tty,
                env=request.env,
                columns=request.columns,
                rows=request.rows,
            )

        try:
            session_id = await self._sessions.open(row.id, start)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        except NotSupported:
            raise NotBuilt("command", request.command, f"the {row.driver} driver has no sessions; use exec") from None
        except StartFailed as error:
            raise CannotStart("command", request.command, str(error)) from None
        return inside_api.Session(id=session_id)

    async def connect(self, call: Call, request: inside_api.Connect) -> Any:
        port = request.port
        row = self._running(request)
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
            processes = await self._drivers.of(row.driver).processes(row.instance)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        if ways := own_ways(processes, port):
            return ways
        raise NotConnected(f"port {port} of machine {row.id} takes no connection: none of its programs listens there")

    async def read_session(self, call: Call, request: inside_api.ReadSession) -> Any:
        session = self._session(request)
        return StreamingResponse(session.output(), media_type="application/octet-stream")

    async def write_session(self, call: Call, request: inside_api.WriteSession) -> Any:
        await self._session(request).write(request.data, end=request.end)
        return api.Ok()

    async def resize_session(self, call: Call, request: inside_api.ResizeSession) -> Any:
        await self._session(request).resize(request.columns, request.rows)
        return api.Ok()

    async def close_session(self, call: Call, request: inside_api.CloseSession) -> Any:
        await self._kind(request.session_id).remove(self._row(request).id, request.session_id)
        return api.Ok()

    def _session(self, request: inside_api.ReadSession | inside_api.WriteSession | inside_api.ResizeSession) -> Session:
        return self._kind(request.session_id).get(self._row(request).id, request.session_id)

    def _kind(self, session: str) -> Sessions:
        return self._connections if session in self._connections else self._sessions

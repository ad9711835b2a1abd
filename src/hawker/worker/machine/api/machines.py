"""The worker's handlers of the public API: one method per endpoint of a machine that exists.

They read and check the request, call `Machines`, and answer in the API's form. The broker passes these requests on as
they came, so the same handlers serve a client that talks to the worker directly.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

from hawker.errors import DeadlineExceeded, Invalid, NotBuilt, NotFound, PreconditionFailed
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import api, views
from hawker.model import machine_calls as calls
from hawker.model.app_calls import StartById, StopById
from hawker.model.call_bases import AnyOfMachine
from hawker.model.config import accept_config, check_config
from hawker.model.exec_output import as_text
from hawker.model.machine import State
from hawker.model.rows import DecisionRow, EventRow, MachineRow, VersionRow
from hawker.model.values import is_host_image, parse_duration_s, parse_signal, rfc3339
from hawker.services import Service
from hawker.worker.context import WorkerContext
from hawker.worker.drivers.base import StartFailed, UnknownInstance
from hawker.worker.machine import leases
from hawker.worker.machine.admission import Parked, StartRefused
from hawker.worker.machine.operations import Machines
from hawker.worker.machine.updates import Updates
from hawker.worker.machine.wait import until_destroyed, wait_state, wanted_states
from hawker.worker.machine.writer import MachineWriter, get_machine
from hawker.worker.request import request_of

EVENTS_SHOWN = 20
EXEC_S_DEFAULT = 60
EXEC_S_MAX = 3600


class MachineApi(Service):
    """`superseded` says which worker has a machine of ours by now, or "": such a
    machine is not found here, so that a broker with an old hint asks who has it. `checks` shows a machine's."""

    def __init__(
        self,
        context: WorkerContext,
        writer: MachineWriter,
        machines: Machines,
        updates: Updates,
        superseded: Callable[[MachineRow], str],
        checks: Callable[[MachineRow], list[api.Check]],
    ) -> None:
        self._store = context.store
        self._host = context.host
        self._drivers = context.drivers
        self._name = context.settings.name
        self._writer = writer
        self._machines = machines
        self._updates = updates
        self._superseded = superseded
        self._checks = checks

    def routes(self) -> tuple[Route, ...]:
        return (
            on(calls.ListMachines, self.machines),
            on(calls.ShowMachine, self.show),
            on(calls.UpdateMachine, self.update),
            on(calls.DestroyMachine, self.delete),
            on(calls.StartMachine, self.start),
            on(calls.StopMachine, self.stop),
            on(calls.SuspendMachine, self.suspend),
            on(calls.RestartMachine, self.restart),
            on(calls.SignalMachine, self.signal),
            on(calls.WaitForMachine, self.wait),
            on(calls.ExecInMachine, self.exec),
            on(calls.ListProcesses, self.processes),
            on(calls.ListEvents, self.events),
            on(calls.ListVersions, self.versions),
            on(calls.CordonMachine, self.cordon),
            on(calls.UncordonMachine, self.uncordon),
            on(calls.FollowLogs, self.logs),
            on(calls.ExplainMachine, self.explain),
            on(StartById, self.start_by_id),
            on(StopById, self.stop_by_id),
        )

    # --- reading -----------------------------------------------------------------------------------------------------

    async def machines(self, call: Call, request: calls.ListMachines) -> Any:
        """This worker's machines of an app, filtered as the API documents. Destroyed ones only when asked for."""
        rows = self._store.read.select(MachineRow, "app = ? order by id", (request.app_name,))
        states = request.state
        hidden = not request.include_deleted and "destroyed" not in states
        return [
            self.view(row, with_lease=request.include_leases)
            for row in rows
            if not (hidden and row.state is State.destroyed)
            and (not states or row.state in states)
            and request.region in (None, row.region)
            and request.metadata.items() <= check_config(row.config).metadata.items()
        ]

    async def show(self, call: Call, request: calls.ShowMachine) -> Any:
        return self.view(self.row(request), with_lease=request.include_leases)

    async def events(self, call: Call, request: calls.ListEvents) -> Any:
        row = self.row(request)
        return [views.event_view(e) for e in self._events(row.id, request.limit)]

    async def versions(self, call: Call, request: calls.ListVersions) -> Any:
        found = self._store.read.select(VersionRow, "machine = ? order by id desc", (self.row(request).id,))
        return [api.Version(version=v.id, user_config=v.config) for v in found]

    async def explain(self, call: Call, request: calls.ExplainMachine) -> Any:
        row = self.row(request)
        kept = self._store.read.get(DecisionRow, row.id)
        if kept is None:
            raise NotFound(f"machine {row.id} was placed without a broker: no decision is kept")
        where = {"machine": row.id, "app": row.app, "worker": self._name, "region": row.region}
        return {**where, "decision": kept.decision}

    async def processes(self, call: Call, request: calls.ListProcesses) -> Any:
        row = self.running(request)
        try:
            found = await self._drivers.of(row.driver).processes(row.instance)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        now = self._host.now_ms()
        stats = [
            api.ProcessStat(
                pid=p.pid,
                stime=p.started_at_ms // 1000,
                rtime=max(0, now - p.started_at_ms) // 1000,
                command=p.command,
                directory=p.directory,
                cpu=int(p.cpu_s),
                rss=p.rss_bytes,
                listen_sockets=[api.ListenSocket(proto=proto, address=address) for proto, address in p.listen],
            )
            for p in found
        ]
        if by := request.sort_by:
            if by not in ("pid", "stime", "rtime", "command", "directory", "cpu", "rss"):
                raise Invalid("sort_by", by, "use pid, stime, rtime, command, directory, cpu or rss")
            stats.sort(key=lambda p: getattr(p, by), reverse=request.order == "desc")
        return stats

    async def wait(self, call: Call, request: calls.WaitForMachine) -> Any:
        reached = await wait_state(
            self._store,
            self._writer,
            request.app_name,
            request.machine_id,
            wanted_states(request.state),
            version=request.version or request.instance_id,
            after_event=request.from_event_id,
            timeout_s=request.timeout,
        )
        return api.Waited(ok=True, state=reached.row.state, version=reached.row.version, event_id=reached.event_id)

    async def logs(self, call: Call, request: calls.FollowLogs) -> Any:
        row = self.row(request)
        lines = self._drivers.of(row.driver).logs(row.id, tail=request.tail, follow=request.follow)
        if request.follow:
            lines = until_destroyed(lines, self._store, self._writer, row.id)

        async def encoded() -> AsyncIterator[bytes]:
            async for line in lines:
                shown = api.LogLine(
                    timestamp=rfc3339(line.at_ms), stream=line.stream, message=line.text, instance=line.instance
                )
                yield msgspec.json.encode(shown) + b"\n"

        return StreamingResponse(encoded(), media_type="application/x-ndjson")

    # --- changing ----------------------------------------------------------------------------------------------------

    async def start(self, call: Call, request: calls.StartMachine) -> Any:
        row = self.row(request)
        before, run_id = await self._machines.start(row.app, row.id, request_of(call))
        if request.wait:
            run = await self._machines.wait_ended(run_id)
            if run and run.status != "done":
                raise StartRefused(f"machine {row.id} did not start: {run.error}", details={"machine": row.id})
        return api.Started(previous_state=before)

    async def stop(self, call: Call, request: calls.StopMachine) -> Any:
        row = self.row(request)
        await self._machines.stop(
            row.app,
            row.id,
            request_of(call),
            signal=parse_signal("signal", request.signal) if request.signal not in (None, "") else None,
            timeout_s=_grace_s(request.timeout) if request.timeout not in (None, "") else None,
        )
        return api.Ok()

    async def start_by_id(self, call: Call, request: StartById) -> Any:
        return await self.start(call, calls.StartMachine("", request.machine_id, wait=request.wait))

    async def stop_by_id(self, call: Call, request: StopById) -> Any:
        stop = calls.StopMachine("", request.machine_id, signal=request.signal, timeout=request.timeout)
        return await self.stop(call, stop)

    async def suspend(self, call: Call, request: calls.SuspendMachine) -> Any:
        row = self.row(request)
        await self._machines.suspend(row.app, row.id, request_of(call))
        return api.Ok()

    async def restart(self, call: Call, request: calls.RestartMachine) -> Any:
        row = self.row(request)
        timeout, signal = request.timeout, request.signal
        await self._machines.restart(
            row.app,
            row.id,
            request_of(call),
            signal=parse_signal("signal", signal) if signal else None,
            timeout_s=_grace_s(f"{timeout}s" if timeout.isdecimal() else timeout) if timeout else None,
            force=request.force_stop,
        )
        return api.Ok()

    async def update(self, call: Call, request: calls.UpdateMachine) -> Any:
        row = self.row(request)
        refuse_secrets(request.min_secrets_version)
        after, lease = await self._updates.update(
            row.app,
            row.id,
            request_of(call),
            config=accept_config(with_runtime(request.config, row)),
            current_version=request.current_version or "",
            skip_launch=bool(request.skip_launch),
            lease_ttl_s=request.lease_ttl or 0,
            cordoned=request.skip_service_registration,
            image_timeout_s=request.image_timeout or 0,
        )
        return self.view(after, nonce=lease.nonce if lease else "")

    async def delete(self, call: Call, request: calls.DestroyMachine) -> Any:
        row = self.row(request)
        force = request.force or request.kill
        run_id = await self._machines.destroy(row.app, row.id, request_of(call), force=force)
        run = await self._machines.wait_ended(run_id)
        if run and run.status == "parked":
            raise Parked(run)
        return api.Ok()

    async def signal(self, call: Call, request: calls.SignalMachine) -> Any:
        number = parse_signal("signal", request.signal)
        row = self.running(request)
        try:
            await self._drivers.of(row.driver).signal(row.instance, number)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        return api.Ok()

    async def exec(self, call: Call, request: calls.ExecInMachine) -> Any:
        if request.container:
            raise NotBuilt("container", request.container, "several containers in one machine are not built yet")
        argv = _argv(request)
        timeout_s = request.timeout or EXEC_S_DEFAULT
        if timeout_s > EXEC_S_MAX:
            raise Invalid("timeout", timeout_s, f"at most {EXEC_S_MAX} s")
        row = self.running(request)
        try:
            stdin = (request.stdin or "").encode()
            result = await self._drivers.of(row.driver).exec(row.instance, argv, stdin=stdin, timeout_s=timeout_s)
        except UnknownInstance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} has just ended") from None
        except StartFailed as error:
            return api.ExecReply(exit_code=127, exit_signal=0, stdout="", stderr=f"{error}\n")
        gave = api.ExecReply(
            exit_code=result.code,
            exit_signal=result.signal or 0,
            truncated=result.truncated,
            **as_text("stdout", result.stdout, cut=result.truncated),
            **as_text("stderr", result.stderr, cut=result.truncated),
        )
        if result.timed_out:
            why = f"deadline_exceeded: the command was killed after {timeout_s} s"
            raise DeadlineExceeded(why, details=msgspec.to_builtins(gave))
        return gave

    async def cordon(self, call: Call, request: calls.CordonMachine) -> Any:
        row = self.row(request)
        await self._machines.cordon(row.app, row.id, request_of(call), cordoned=True)
        return api.Ok()

    async def uncordon(self, call: Call, request: calls.UncordonMachine) -> Any:
        row = self.row(request)
        await self._machines.cordon(row.app, row.id, request_of(call), cordoned=False)
        return api.Ok()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def view(self, row: MachineRow, *, nonce: str = "", with_lease: bool = False) -> api.Machine:
        """A machine as the API shows it, with its latest events."""
        lease = leases.current(self._store.read, row.id, self._host.steady_ms()) if with_lease else msgspec.UNSET
        events = self._events(row.id, EVENTS_SHOWN)
        return views.machine_view(row, self._name, events, self._checks(row), nonce=nonce, lease=lease)

    def _events(self, machine_id: str, limit: int) -> list[EventRow]:
        return self._store.read.select(EventRow, "machine = ? order by id desc limit ?", (machine_id, limit))

    def row(self, request: AnyOfMachine) -> MachineRow:
        """The machine of the path. The article's paths have no app in them."""
        row = get_machine(self._store.read, request.machine_id, request.app_name or None)
        if why := self._superseded(row):
            raise NotFound(f"machine not found: {row.id}: {why}")
        return row

    def running(self, request: AnyOfMachine) -> MachineRow:
        row = self.row(request).as_it_runs()
        if row.state is not State.started or not row.instance:
            raise PreconditionFailed(f"failed_precondition: machine {row.id} is not running, currently '{row.state}'")
        return row


def with_runtime(config: dict[str, Any], row: MachineRow) -> dict[str, Any]:
    """Clients that do not know our `runtime` leave it out when they give a configuration back: the machine keeps its
    own."""
    kept = row.config.get("runtime")
    if "runtime" in config or not kept or is_host_image(str(config.get("image"))):
        return config
    return {**config, "runtime": kept}


def refuse_secrets(min_version: int | None) -> None:
    if min_version:
        raise NotBuilt("min_secrets_version", min_version, "secrets are not built yet; leave the field out")


def _grace_s(value: str | int | None) -> float:
    seconds = parse_duration_s("timeout", value)
    if seconds > 300:
        raise Invalid("timeout", value, "at most 300s")
    return seconds


def _argv(body: calls.ExecInMachine) -> list[str]:
    if body.command:
        argv = body.command
    else:
        try:
            argv = shlex.split(body.cmd or "")
        except ValueError as error:
            raise Invalid("cmd", body.cmd, f"cannot be split into words: {error}") from error
    if not argv or not argv[0] or any("\0" in word for word in argv):
        raise Invalid("command", argv, 'give the command as a list such as ["ls", "-l"], or as a line in "cmd"')
    return argv

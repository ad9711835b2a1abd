"""The connection to a supervisor (`hawker.supervisor`), and its start.

A supervisor is one process per driver and worker; it is the parent of what runs and outlives this daemon. It is started
by the first call that needs it, or at once if it has instances, or if machines may be started (`stand_by`): a driver
that nobody uses costs no process. When its socket breaks, the daemon starts the next supervisor, which takes over what
runs. Log files are read here, from where the supervisor writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, overload

import msgspec

from hawker.errors import Unreachable
from hawker.supervisor import old_logs
from hawker.supervisor.calls import (
    Follow,
    Hello,
    KeepStandby,
    ListInstances,
    Prespawn,
    Request,
    ShutDown,
    Start,
    Unfollow,
    Wait,
)
from hawker.supervisor.protocol import PRESPAWN, gate_of
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import Exit, LogLine
from hawker.worker.drivers.logs import follow_lines, tail_lines
from hawker.worker.drivers.wire import RunningSupervisor, SupervisorLost, Wire, runs_nothing

CONNECT_S = 10.0
RECONNECT_S = 1.0
FORGET_S = 60.0
T = TypeVar("T")


class Supervisor:
    """The connection to the supervisor of one directory. `options` go to its command line."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._on_exit: Callable[[Exit], None] = lambda exit_: None
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._child = 0  # the supervisor that was started last
        self._replacing: asyncio.Task[None] | None = None
        self._standby = ""  # the file that standby processes run
        self._outdated = False  # the supervisor is of another version
        self._forgetting: asyncio.Task[None] | None = None

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        """Connect if anything is there; `on_exit` is told every exit, also those that nobody has heard of yet."""
        self._closed = False
        self._on_exit = on_exit
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().create_task(self._forget(), name="forget old logs")
        if not self.unused:
            await self._connected()

    async def close(self) -> None:
        self._closed = True
        if self._forgetting:
            forgetting, self._forgetting = self._forgetting, None
            forgetting.cancel()
            await asyncio.gather(forgetting, return_exceptions=True)
        if self._retry:
            self._retry.cancel()
        if self._replacing:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if self._connecting:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
            await asyncio.sleep(0)  # asyncio closes the socket of a connect that was cancelled one turn later
        if self._wire:
            wire, self._wire = self._wire, None
            await wire.close()

    @property
    def unused(self) -> bool:
        """No supervisor is there and none left anything: there are no instances."""
        if self._wire or self._connecting:
            return False
        socket, run = f"{self.directory}/socket", f"{self.directory}/run"
        return not (os.path.exists(socket) or os.path.islink(run) or _any_inside(run))

    @overload
    async def call(self, request: Request, *, once: bool = False) -> None: ...

    @overload
    async def call(self, request: Request, reply: type[T], *, once: bool = False) -> T: ...

    async def call(self, request: Request, reply: Any = NoneType, *, once: bool = False) -> Any:
        """Ask the supervisor; when it dies in the middle, ask the next one. With `once`, for a call whose effects must
        not be repeated, raise `SupervisorLost` then, and when this was closed meanwhile."""
        while True:
            if once and self._closed:
                raise SupervisorLost()
            wire = self._wire or await self._connected()
            try:
                return msgspec.convert(await wire.call(request), reply)
            except SupervisorLost:
                if once or self._closed:
                    raise
                await asyncio.sleep(0)  # a socket that closes in this turn is told to `_lost` in the next

    def keep_standby(self, program: str) -> None:
        """Have standby processes ready, which run this file."""
        self._standby = program
        wire = self._wire
        if wire and wire.supervisor and PRESPAWN in wire.supervisor.features:
            wire.tell(KeepStandby(program=program))

    def prespawn(self, start: Start) -> bool:
        """Say that this start will be asked for. False where no supervisor is there that can prepare it, or no standby
        processes are kept."""
        wire = self._wire
        if not (self._standby and wire and wire.supervisor and PRESPAWN in wire.supervisor.features):
            return False
        wire.tell(Prespawn(standby=self._standby, start=start))
        return True

    def release_start(self, key: str) -> bool:
        """Open the start gate of a prespawned program ourselves. False: nothing waits there, or not yet."""
        try:
            pipe = os.open(gate_of(str(self.directory), key), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.write(pipe, b"g") == 1
        except OSError:
            return False
        finally:
            os.close(pipe)

    def stand_by(self) -> None:
        """Have a supervisor soon."""
        self._reconnect()

    async def dial(self) -> socket.socket:
        """Open a connection of the caller's own, who has to close it."""
        await self._connected()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        fd = os.open(self.directory, os.O_PATH | os.O_CLOEXEC)
        try:
            await asyncio.get_running_loop().sock_connect(sock, f"/proc/self/fd/{fd}/socket")
        except OSError as error:
            sock.close()
            raise SupervisorLost() from error
        finally:
            os.close(fd)
        return sock

    async def logs(self, machine: str, *, tail: int, follow: bool) -> AsyncIterator[LogLine]:
        """See `Driver.logs`."""
        path = self.directory / "logs" / machine
        lines, position = tail_lines(path, tail)
        if not position[0] and not lines:  # it may be destroyed
            lines, _ = tail_lines(Path(old_logs.place(str(self.directory)), machine), tail)
        for line in lines:
            yield line
        if not follow:
            return
        wakeup = asyncio.Event()
        self._followers.setdefault(machine, set()).add(wakeup)
        try:
            await self.call(Follow(machine=machine))
            wakeup.set()  # something may have come between the tail and the subscription
            async for line in follow_lines(path, position, wakeup):
                yield line
        finally:
            followers = self._followers[machine]
            followers.discard(wakeup)
            if not followers:
                del self._followers[machine]
                if self._wire:
                    with contextlib.suppress(SupervisorLost):
                        await self._wire.call(Unfollow(machine=machine))

    async def shut_down(self, *, grace_s: float) -> None:
        """Stop every instance and the supervisor."""
        if self.unused:
            return
        wire = await self._connected()
        self._closed = True
        with contextlib.suppress(SupervisorLost):
            running = [i["key"] for i in await wire.call(ListInstances()) if not i["exit"]]
            ends = [asyncio.ensure_future(wire.call(Wait(key=key))) for key in running]
            try:
                await wire.call(ShutDown(grace_s=grace_s))
            finally:
                await asyncio.gather(*ends, return_exceptions=True)
        await _gone(self.directory, self._child)

    async def _forget(self) -> None:
        """Remove the logs of destroyed machines once nobody may read them any more, also where no supervisor runs."""
        directory = str(self.directory)
        while True:
            if _any_inside(Path(old_logs.place(directory))):
                try:
                    await asyncio.to_thread(old_logs.forget, directory)
                except OSError as error:
                    _logger.error("old_logs.kept", directory=directory, error=str(error), cause="their time is over")
            await asyncio.sleep(FORGET_S)

    async def _connected(self) -> Wire:
        if self._wire:
            return self._wire
        return await asyncio.shield(self._connecting or self._start_connecting())

    def _start_connecting(self) -> asyncio.Task[Wire]:
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="connect to supervisor")
        return self._connecting

    async def _connect(self) -> Wire:
        """Connect, starting a supervisor when none listens, and tell the worker of ends it has not heard of."""
        wire, replaced = None, False
        try:
            async with asyncio.timeout(CONNECT_S):
                while wire is None:
                    wire = await self._dial()
                    while wire is None:
                        self._spawn()
                        wire = await self._dial_soon()
                    try:
                        running = msgspec.convert(await wire.call(Hello()), RunningSupervisor)
                        self._outdated = running.outdated(self._options)
                        if self._outdated and runs_nothing(running.instances) and not replaced:
                            await wire.close()
                            wire, replaced = None, True
                            await running.end()
                            continue
                        wire.supervisor = running
                        for machine, wakeups in list(self._followers.items()):
                            await wire.call(Follow(machine=machine))
                            for wakeup in wakeups:
                                wakeup.set()  # for what came while nobody told
                    except SupervisorLost:  # it was on its way out
                        wire = None
        except BaseException as error:
            if wire:
                await wire.close()
            if isinstance(error, OSError):
                why = f"does not answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else str(error)
                raise Unreachable(f"the supervisor in {self.directory}: {why}") from error
            raise
        finally:
            self._connecting = None
        self._wire = wire
        if self._standby:
            self.keep_standby(self._standby)
        for shown in running.instances:
            if shown["exit"]:
                self._ended(shown["exit"])
        return wire

    async def _dial(self) -> Wire | None:
        loop = asyncio.get_running_loop()
        fd = os.open(self.directory, os.O_PATH | os.O_CLOEXEC) if self.directory.exists() else -1
        if fd < 0:
            return None
        try:  # by way of the descriptor: the path may be longer than the 108 bytes a socket's name takes
            path = f"/proc/self/fd/{fd}/socket"
            _, wire = await loop.create_unix_connection(lambda: Wire(self._event, self._lost), path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        finally:
            os.close(fd)
        return wire

    async def _dial_soon(self) -> Wire | None:
        for _ in range(400):
            if wire := await self._dial():
                return wire
            await asyncio.sleep(0.005)
        return None

    def _spawn(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = os.open(self.directory / "supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        argv = [sys.executable, "-m", "hawker.supervisor", str(self.directory)]
        try:
            child = subprocess.Popen(
                [*argv, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        child.returncode = 0  # reaped below, not by subprocess, which complains of children that outlive their parent
        self._child = child.pid
        _children.add(child.pid)
        _reap()

    def _event(self, message: dict[str, Any]) -> None:
        if message["event"] == "exit":
            self._ended(message["exit"])
            self._replace_once_empty()
        else:
            for wakeup in self._followers.get(message["machine"], ()):
                wakeup.set()

    def _replace_once_empty(self) -> None:
        wire = self._wire
        if wire is None or not self._outdated or self._closed:
            return
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.get_running_loop().create_task(self._replace(wire), name="replace supervisor")

    async def _replace(self, wire: Wire) -> None:
        with contextlib.suppress(SupervisorLost):
            if wire.supervisor and runs_nothing(await wire.call(ListInstances())):
                await wire.supervisor.end()

    def _ended(self, told: Any) -> None:
        """Report an exit. One that cannot be read, perhaps from another version, must not cost the connection and all
        other exits."""
        try:
            ended = msgspec.convert(told, Exit)
        except msgspec.ValidationError as error:
            _logger.error("supervisor.nonsense", told=str(told)[:500], error=str(error))
        else:
            self._on_exit(ended)

    def _lost(self, wire: Wire) -> None:
        if wire is not self._wire:
            return  # it was still being connected, and whoever does that has been told
        self._wire = None
        if not self._closed:
            _logger.warning("supervisor.lost", directory=str(self.directory), cause="the supervisor's socket closed")
            self._reconnect()

    def _reconnect(self) -> None:
        """Connect again until it succeeds: exits of programs are told over this connection."""
        if not (self._closed or self._wire or self._connecting):
            self._start_connecting().add_done_callback(self._reconnected)

    def _reconnected(self, task: asyncio.Task[Wire]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _logger.error("supervisor.unreachable", error=str(error), cause="the supervisor's socket closed")
            self._retry = asyncio.get_running_loop().call_later(RECONNECT_S, self._reconnect)


def _any_inside(directory: Path | str) -> bool:
    try:
        return bool(os.listdir(directory))
    except FileNotFoundError:
        return False


_children: set[int] = set()
"""Supervisors this process started."""


def _reap() -> None:
    for pid in list(_children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
        _children.discard(pid)


async def _gone(directory: Path, child: int) -> None:
    """Wait, for a bounded time, until the supervisor has removed its socket and, where it is our child, ended."""
    for _ in range(1000):
        _reap()
        if not (directory / "socket").exists() and child not in _children:
            break
        await asyncio.sleep(0.005)


_logger = get_logger()

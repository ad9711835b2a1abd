"""The connection to a supervisor (`hawker.supervisor`), and its start.

A supervisor is one process per driver and worker; it is the parent of what runs and outlives this daemon. It is started
by the first call that needs one, or at once where something was recorded, or machines may be started (`stand_by`): a
driver that nobody uses costs no process.
When its socket breaks the next one is started, which takes over what runs. Log files are read here, from where the
supervisor writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from hawker.supervisor.protocol import FORESEES, understood
from hawker.telemetry import get_logger
from hawker.worker.drivers.base import Exit, LogLine
from hawker.worker.drivers.logs import follow_lines, tail_lines
from hawker.worker.drivers.refusals import SupervisorLost, told
from hawker.worker.drivers.versions import Peer, is_empty

CONNECT_S = 10.0
RECONNECT_S = 1.0


class _Wire(asyncio.Protocol):
    """The socket to the supervisor: requests by number, events as they come."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None], on_lost: Callable[[_Wire], None]) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._numbers = count()
        self.peer: Peer | None = None  # until its hello
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._rest = b""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line)
            if "event" in message:
                self._on_event(message)
            elif (future := self._waiting.pop(message["id"], None)) and not future.done():
                if "error" in message:
                    future.set_exception(told(message))
                else:
                    future.set_result(message["ok"])

    def connection_lost(self, exc: Exception | None) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(SupervisorLost())
        if not self._gone.done():
            self._gone.set_result(None)
        self._on_lost(self)

    async def call(self, op: str, **fields: Any) -> Any:
        if self._transport is None or self._transport.is_closing():
            raise SupervisorLost()
        if self.peer:
            self.peer.check(op, fields)
            fields = understood(fields, self.peer.features)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(_line({"id": number, "op": op, **fields}))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def tell(self, op: str, **fields: Any) -> None:
        """What nobody waits for the answer of."""
        assert self.peer is not None  # its hello was waited for
        if self._transport is not None and not self._transport.is_closing():
            fields = understood(fields, self.peer.features)
            self._transport.write(_line({"id": next(self._numbers), "op": op, **fields}))

    async def close(self) -> None:
        """Returns once the socket is closed."""
        if self._transport:
            self._transport.abort()
            await asyncio.shield(self._gone)


class Supervisor:
    """The connection to the supervisor of one directory. `options` go to its command line."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None
        self._on_exit: Callable[[Exit], None] = lambda exit_: None
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._child = 0  # the supervisor that was started last
        self._replacing: asyncio.Task[None] | None = None

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        """Take hold of what is there; `on_exit` is told every end, also those nobody has heard of yet."""
        self._closed = False
        self._on_exit = on_exit
        if not self.unused:
            await self._connected()

    async def close(self) -> None:
        self._closed = True
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
        there = self.directory
        return not ((there / "socket").exists() or (there / "run").is_symlink() or _any_inside(there / "run"))

    async def call(self, op: str, **fields: Any) -> Any:
        """Ask the supervisor; when it dies in the middle, ask the next one."""
        while True:
            wire = await self._connected()
            try:
                return await wire.call(op, **fields)
            except SupervisorLost:
                if self._closed:
                    raise
                await asyncio.sleep(0)  # a socket that closes in this turn is told to `_lost` in the next

    def foresee(self, **fields: Any) -> None:
        """Say that a start like this will be asked for. Does nothing where no supervisor is there that knows what to
        do about that."""
        if self._wire and self._wire.peer and FORESEES in self._wire.peer.features:
            self._wire.tell("foresee", **fields)

    def stand_by(self) -> None:
        """Have a supervisor soon."""
        self._reconnect()

    async def dial(self) -> socket.socket:
        """A connection of one's own, to be closed."""
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

    async def call_once(self, op: str, **fields: Any) -> Any:
        """Ask what may have effects that must not be repeated. Raises `SupervisorLost` when it dies in the middle, or
        this was closed meanwhile."""
        if self._closed:
            raise SupervisorLost()
        return await (await self._connected()).call(op, **fields)

    async def logs(self, machine: str, *, tail: int, follow: bool) -> AsyncIterator[LogLine]:
        """See `Driver.logs`."""
        path = self.directory / "logs" / machine
        lines, position = tail_lines(path, tail)
        for line in lines:
            yield line
        if not follow:
            return
        wakeup = asyncio.Event()
        self._followers.setdefault(machine, set()).add(wakeup)
        try:
            await self.call("follow", machine=machine)
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
                        await self._wire.call("unfollow", machine=machine)

    async def shut_down(self, *, grace_s: float) -> None:
        """Stop every instance and the supervisor."""
        if self.unused:
            return
        wire = await self._connected()
        self._closed = True
        with contextlib.suppress(SupervisorLost):
            running = [i["key"] for i in await wire.call("list") if not i["exit"]]
            ends = [asyncio.ensure_future(wire.call("wait", key=key)) for key in running]
            try:
                await wire.call("shutdown", grace_s=grace_s)
            finally:
                await asyncio.gather(*ends, return_exceptions=True)
        await _gone(self.directory, self._child)

    async def _connected(self) -> _Wire:
        if self._wire:
            return self._wire
        return await asyncio.shield(self._connecting or self._start_connecting())

    def _start_connecting(self) -> asyncio.Task[_Wire]:
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="connect to supervisor")
        return self._connecting

    async def _connect(self) -> _Wire:
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
                        hello = await wire.call("hello")
                        peer = msgspec.convert(hello, Peer)
                        if peer.outdated(self._options) and is_empty(hello) and not replaced:
                            await wire.close()
                            wire, replaced = None, True
                            await peer.end()
                            continue
                        wire.peer = peer
                        for machine, wakeups in list(self._followers.items()):
                            await wire.call("follow", machine=machine)
                            for wakeup in wakeups:
                                wakeup.set()  # for what came while nobody told
                    except SupervisorLost:  # it was on its way out
                        wire = None
        except BaseException:
            if wire:
                await wire.close()
            raise
        finally:
            self._connecting = None
        self._wire = wire
        for shown in hello["instances"]:
            if shown["exit"]:
                self._ended(shown["exit"])
        return wire

    async def _dial(self) -> _Wire | None:
        loop = asyncio.get_running_loop()
        fd = os.open(self.directory, os.O_PATH | os.O_CLOEXEC) if self.directory.exists() else -1
        if fd < 0:
            return None
        try:  # by way of the descriptor: the path may be longer than the 108 bytes a socket's name takes
            path = f"/proc/self/fd/{fd}/socket"
            _, wire = await loop.create_unix_connection(lambda: _Wire(self._event, self._lost), path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        finally:
            os.close(fd)
        return wire

    async def _dial_soon(self) -> _Wire | None:
        for _ in range(400):
            if wire := await self._dial():
                return wire
            await asyncio.sleep(0.005)
        return None

    def _spawn(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
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
        if not (wire and wire.peer and wire.peer.outdated(self._options)) or self._closed:
            return
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.get_running_loop().create_task(self._replace(wire), name="replace supervisor")

    async def _replace(self, wire: _Wire) -> None:
        with contextlib.suppress(SupervisorLost):
            if wire.peer and is_empty({"instances": await wire.call("list")}):
                await wire.peer.end()

    def _ended(self, told: Any) -> None:
        """One end that is none, perhaps of another version, must not cost the connection, and so all the others."""
        try:
            ended = msgspec.convert(told, Exit)
        except msgspec.ValidationError as error:
            _logger.error("supervisor.nonsense", told=str(told)[:500], error=str(error))
        else:
            self._on_exit(ended)

    def _lost(self, wire: _Wire) -> None:
        if wire is not self._wire:
            return  # it was still being connected, and whoever does that has been told
        self._wire = None
        if not self._closed:
            _logger.warning("supervisor.lost", directory=str(self.directory), cause="the supervisor's socket closed")
            self._reconnect()

    def _reconnect(self) -> None:
        """Until it succeeds: ends of programs are told over this connection."""
        if not (self._closed or self._wire or self._connecting):
            self._start_connecting().add_done_callback(self._reconnected)

    def _reconnected(self, task: asyncio.Task[_Wire]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _logger.error("supervisor.unreachable", error=str(error), cause="the supervisor's socket closed")
            self._retry = asyncio.get_running_loop().call_later(RECONNECT_S, self._reconnect)


def _line(message: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:  # words that are no text, as a command line may have them
        return json.dumps(message).encode() + b"\n"


def _any_inside(directory: Path) -> bool:
    try:
        return next(directory.iterdir(), None) is not None
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

"""The socket to a supervisor, as its daemon has it: requests by number, events as they come, and refusals as the
exceptions of drivers. See `hawker.supervisor.wire`.

A supervisor that another version of the daemon started is replaced as soon as nothing runs under it: the daemon kills
it, which harms no machine and loses nothing, because its files say what has ended. Until then it gets the calls that it
understands, and the others are refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import msgspec

from hawker.errors import Broken, Unreachable
from hawker.supervisor.calls import MakeContainer, MakeTree, Request, Start
from hawker.supervisor.protocol import HINDERED, PROTOCOL, features, fields_of, needed
from hawker.worker.drivers.base import InstanceRunning, NotSupported, Refused, StartFailed, UnknownInstance

ENDED_S = 5.0


class RunningSupervisor(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor that a daemon is connected to, as its hello says."""

    pid: int
    protocol: int = 0
    features: frozenset[str] = frozenset()
    instances: Sequence[Mapping[str, Any]] = ()

    def outdated(self, options: Sequence[str]) -> bool:
        """Whether one that was started now, with these options, could do more, or means other things."""
        return self.protocol != PROTOCOL or not self.features.issuperset(features(options))

    def check(self, request: Request) -> None:
        """Raises `StartFailed` for a call that it does not understand. It understands those about machines that run."""
        lacking = needed(request) - self.features
        if isinstance(request, Start | MakeContainer | MakeTree) and self.protocol not in (0, PROTOCOL):
            lacking.add(f"protocol {PROTOCOL}")
        if lacking:
            raise StartFailed(
                f"the supervisor (process {self.pid}) is of another version than this worker and cannot do this: it "
                f"lacks {', '.join(sorted(lacking))}. It is replaced as soon as no machine runs under it: stop or move "
                "those that do"
            )

    async def end(self) -> None:
        """Kill it. Returns once it is gone, or after a while."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            async with asyncio.timeout(ENDED_S):
                await gone.wait()
        except (ProcessLookupError, TimeoutError):
            pass  # whoever connects next finds out
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def runs_nothing(instances: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing runs under the supervisor that has these instances."""
    return all(shown["exit"] for shown in instances)


class SupervisorLost(Unreachable):
    """The supervisor went away in the middle of a call. The call may be repeated: every call is idempotent."""

    def __init__(self) -> None:
        super().__init__("the supervisor of the machine went away in the middle of this; ask again")


class Hindered(Unreachable):
    """The supervisor met an error of its host, such as a full disk. Part of the call may have been carried out; it may
    be repeated."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the host hinders the supervisor of the machine: {problem}")


class RuntimeKilled(Exception):
    """A container's runtime was killed while it made one. Nothing is left of it; it may be tried again."""


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (UnknownInstance, InstanceRunning, StartFailed, NotSupported, Refused, RuntimeKilled)
} | {HINDERED: Hindered}


def told(answer: Mapping[str, str]) -> Exception:
    """The exception of an answer `{"error", "message"}`."""
    return _ERRORS.get(answer["error"], Broken)(answer["message"])


class Wire(asyncio.Protocol):
    def __init__(self, on_event: Callable[[dict[str, Any]], None], on_lost: Callable[[Wire], None]) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._numbers = count()
        self.supervisor: RunningSupervisor | None = None  # until its hello
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

    async def call(self, request: Request) -> Any:
        if self._transport is None or self._transport.is_closing():
            raise SupervisorLost()
        if self.supervisor:
            self.supervisor.check(request)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(encoded(number, request, self.supervisor))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def tell(self, request: Request) -> None:
        """Send a request that has no reply."""
        assert self.supervisor is not None  # its hello was waited for
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encoded(next(self._numbers), request, self.supervisor))

    async def close(self) -> None:
        """Returns once the socket is closed."""
        if self._transport:
            self._transport.abort()
            await asyncio.shield(self._gone)


def encoded(number: int, request: Request, supervisor: RunningSupervisor | None) -> bytes:
    fields = fields_of(request, supervisor.features) if supervisor else vars(request)
    message = {"id": number, "op": request.op, **fields}
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:  # words that are no text, as a command line may have them
        return json.dumps(message, default=vars).encode() + b"\n"

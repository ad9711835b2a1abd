"""The socket to a supervisor, as its daemon has it: requests by number, events as they come. See
`hawker.supervisor.wire`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import msgspec

from hawker.supervisor.calls import Request
from hawker.supervisor.protocol import fields_of
from hawker.worker.drivers.refusals import SupervisorLost, told
from hawker.worker.drivers.versions import RunningSupervisor


class Wire(asyncio.Protocol):
    """The socket to the supervisor: requests by number, events as they come."""

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

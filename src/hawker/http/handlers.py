"""What answers a declared call: a handler is given the call and the request as it was read.

on(StopMachine, self.stop)         async def stop(self, call: Call, request: StopMachine) -> Ok
on_each(Order, self.reserve)       async def reserve(self, call: Call, orders: list[Order | Invalid]) -> list[...]
unread(StopMachine, self.pass_on)  async def pass_on(self, call: Call) -> Response
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from hawker.errors import Invalid
from hawker.http.call import Call
from hawker.model.json_reading import read_each
from hawker.model.op import Declared
from hawker.model.request_codec import decode

Q = TypeVar("Q", bound=Declared[Any])
Handler = Callable[[Call], Awaitable[Any]]


class Route(NamedTuple):
    """A declared call and what answers it."""

    kind: type[Declared[Any]]
    handler: Handler


def on(kind: type[Q], handler: Callable[[Call, Q], Awaitable[Any]]) -> Route:
    async def read(call: Call) -> Any:
        request = call.request
        return await handler(
            call, decode(kind, request.path_params, request.query_params.multi_items(), request.headers, call.body)
        )

    return Route(kind, read)


def on_each(kind: type[Q], handler: Callable[[Call, list[Q | Invalid]], Awaitable[Any]]) -> Route:
    async def read(call: Call) -> Any:
        return await handler(call, read_each(call.body, kind))

    return Route(kind, read)


def unread(kind: type[Declared[Any]], handler: Handler) -> Route:
    """A route whose handler reads nothing, because it passes the call on as it came."""
    return Route(kind, handler)

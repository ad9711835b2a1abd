"""Calls workers: to have a machine run, and to put an idle one to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from hawker.client.connection import Peer
from hawker.errors import HawkerError, Unreachable
from hawker.http.app import REQUEST_ID, WORKER
from hawker.model import door
from hawker.model.op import Request, reply_of
from hawker.model.request_codec import encode
from hawker.proxy.catalog_view.index import Worker

_T = TypeVar("_T")


class Declined(HawkerError):
    """The worker's answer is an error."""

    def __init__(self, status: int, code: str, message: str, details: Any = None) -> None:
        super().__init__(message, details=details)
        self.status = status
        self.code = code


Released = Callable[[door.Awake], None]


def _nobody(awake: door.Awake) -> None:
    """The `released` of a caller that waits for the answer alone."""


class Calls(Protocol):
    """The calls of one worker. Both raise `HawkerError`, and `Unreachable` when the outcome is in doubt."""

    async def wake(self, wish: door.Wake, released: Released = _nobody) -> door.Awake:
        """Have the machine run. `released` may be told what the answer will be, as soon as nothing keeps the machine
        from running. The start may still fail, and then this call raises."""

    async def rest(self, wish: door.Rest) -> door.Resting: ...


class Own(Calls, Protocol):
    """The calls of the worker in this very process."""

    on_rest: list[Callable[[str, str], None]]
    """These are told of machines that are stopped or suspended, or about to be: id and state."""


class _Error(msgspec.Struct):
    error: str = ""
    status: str = "unknown"
    details: Any = None


class WorkerCalls:
    """The calls of a worker over HTTP. `close` when done."""

    def __init__(self, worker: Worker, token: str) -> None:
        headers = {"authorization": f"Bearer {token}", WORKER: worker.name}
        self._peer = Peer(worker.host, worker.port, headers=headers)

    async def wake(self, wish: door.Wake, released: Released = _nobody) -> door.Awake:
        return await self._send(wish, wish.request)

    async def rest(self, wish: door.Rest) -> door.Resting:
        return await self._send(wish, "")

    async def close(self) -> None:
        await self._peer.close()

    async def _send(self, wish: Request[_T], request: str) -> _T:
        """`request` is the id of the user's request that waits for it, "" for none."""
        sent = encode(wish)
        headers = {**sent.headers, **({REQUEST_ID: request} if request else {})}
        response = await self._peer.request(
            sent.method,
            sent.target,
            body=sent.body,
            headers=headers,
            timeout_s=wish.op.deadline_s,
            idempotent=True,
        )
        try:
            if response.status == 200:
                reply: _T = msgspec.json.decode(response.body, type=reply_of(type(wish)))
                return reply
            told = msgspec.json.decode(response.body, type=_Error)
        except msgspec.MsgspecError as error:
            raise Unreachable(
                f"{self._peer.name} answered {response.status} with what is no answer: {error}"
            ) from error
        raise Declined(response.status, told.status, told.error or f"status {response.status}", told.details)


class Workers:
    """The calls of every worker, by its address. `own` are those of the worker in this very process, if there is
    one."""

    def __init__(self, token: str, own_name: str = "", own: Calls | None = None) -> None:
        self._token = token
        self._own_name = own_name
        self._own = own
        self._calls: dict[Worker, WorkerCalls] = {}

    def of(self, worker: Worker) -> Calls:
        if self._own is not None and worker.name == self._own_name:
            return self._own
        calls = self._calls.get(worker)
        if calls is None:
            calls = self._calls[worker] = WorkerCalls(worker, self._token)
        return calls

    async def forget(self, worker: Worker) -> None:
        """This worker has moved, or is gone. Calls that are under way fail."""
        if calls := self._calls.pop(worker, None):
            await calls.close()

    async def close(self) -> None:
        calls, self._calls = list(self._calls.values()), {}
        await asyncio.gather(*(each.close() for each in calls))

"""A proxy's calls to workers: to have a machine run, and to put an idle one to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from hawker.client.connection import Peer
from hawker.errors import HawkerError, Unreachable
from hawker.http.app import REQUEST_ID, WORKER
from hawker.model import door
from hawker.proxy.catalog_view.index import Worker

REST_S = 10.0
_T = TypeVar("_T")


class Declined(HawkerError):
    """The worker's answer is an error."""

    def __init__(self, status: int, code: str, message: str, details: Any = None) -> None:
        super().__init__(message, details=details)
        self.status = status
        self.code = code


Released = Callable[[door.Awake], None]


def _nobody(awake: door.Awake) -> None:
    """Is in a hurry."""


class Calls(Protocol):
    """One worker. Both raise `HawkerError`, `Unreachable` when the outcome is in doubt."""

    async def wake(self, wish: door.Wake, released: Released = _nobody) -> door.Awake:
        """`released` may be told of what will be answered as soon as nothing keeps the machine from running. It may
        still fail to, and then this raises."""

    async def rest(self, wish: door.Rest) -> door.Resting: ...


class Own(Calls, Protocol):
    """The worker in this very process."""

    on_rest: list[Callable[[str, str], None]]
    """Told of machines that are stopped or suspended, or about to be: id and state."""


class _Error(msgspec.Struct):
    error: str = ""
    status: str = "unknown"
    details: Any = None


class WorkerCalls:
    """A worker over HTTP. `close` when done."""

    def __init__(self, worker: Worker, token: str) -> None:
        headers = {"authorization": f"Bearer {token}", WORKER: worker.name}
        self._peer = Peer(worker.host, worker.port, headers=headers)

    async def wake(self, wish: door.Wake, released: Released = _nobody) -> door.Awake:
        return await self._call(door.WAKE, wish, door.Awake, door.WAKE_S + 5.0, wish.request)

    async def rest(self, wish: door.Rest) -> door.Resting:
        return await self._call(door.REST, wish, door.Resting, REST_S, "")

    async def close(self) -> None:
        await self._peer.close()

    async def _call(self, route: tuple[str, str], body: Any, kind: type[_T], timeout_s: float, request: str) -> _T:
        headers = {"content-type": "application/json", **({REQUEST_ID: request} if request else {})}
        response = await self._peer.request(
            *route, body=msgspec.json.encode(body), headers=headers, timeout_s=timeout_s, idempotent=True
        )
        try:
            if response.status == 200:
                return msgspec.json.decode(response.body, type=kind)
            told = msgspec.json.decode(response.body, type=_Error)
        except msgspec.MsgspecError as error:
            raise Unreachable(
                f"{self._peer.name} answered {response.status} with what is no answer: {error}"
            ) from error
        raise Declined(response.status, told.status, told.error or f"status {response.status}", told.details)


class Workers:
    """The calls of every worker, by its place. `own` are those of the worker in this very process, if there is one."""

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
        """It has moved, or is gone. What is under way fails."""
        if calls := self._calls.pop(worker, None):
            await calls.close()

    async def close(self) -> None:
        calls, self._calls = list(self._calls.values()), {}
        await asyncio.gather(*(each.close() for each in calls))

"""Relaying requests, as they came, to the worker that owns the machine.

The broker asks all workers whose machine it is the first time and remembers the answer; a remembered answer that proves
wrong costs one more round. Logs that are followed are passed on line by line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response, StreamingResponse

from hawker.broker.directory import Directory
from hawker.broker.fleet import Fleet, WorkerLink, check_meant, gather_named, not_found
from hawker.errors import HawkerError, NotFound, Unreachable
from hawker.http.app import OWNER, REQUEST_ID, reply
from hawker.http.call import Call
from hawker.http.handlers import Route, unread
from hawker.model.call_bases import NONCE
from hawker.model.calls import CALLS
from hawker.model.fleet_calls import CancelRun, RetryRun, ShowRun
from hawker.model.market import CALL_S as MARKET_CALL_S
from hawker.model.market import LocateMachine
from hawker.model.op import Declared, StreamRequest
from hawker.model.request_codec import Encoded
from hawker.model.values import is_machine_id

REMEMBERED = 100_000
CALL_S = 90.0  # a wait takes up to 60 s, and a request may wait for the machine that long
_PASSED = ("content-type", NONCE, "traceparent")


class Relay:
    """Finds machines and passes calls on."""

    def __init__(self, fleet: Fleet, directory: Directory | None = None) -> None:
        self._fleet = fleet
        self._directory = directory
        self._owners: OrderedDict[str, str] = OrderedDict()  # a hint; the worker's answer decides

    def remember(self, machine: str, worker: str) -> None:
        self._owners[machine] = worker
        if len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    async def locate(self, machine: str) -> WorkerLink:
        """The worker that owns a machine. Raises `NotFound`, or `Unreachable` when one that may own it is silent."""
        if not is_machine_id(machine):
            raise NotFound(f"machine not found: {machine}")
        hint = self._owners.get(machine) or (self._directory.worker_of(machine) if self._directory else "")
        return self._fleet.links.get(hint) or await self._ask_for(machine)

    async def _ask_for(self, machine: str) -> WorkerLink:
        """Ask every worker. Of several the one with the highest generation has it."""
        links = self._fleet.links
        found, errors = await self._fleet.ask_all(LocateMachine(machine_id=machine))
        if found:
            name = max(found, key=lambda name: (found[name].generation, name))
            self.remember(machine, name)
            return links[name]
        raise not_found("machine", errors, machine)

    async def run_call(self, call: Call) -> Response:
        """The handler of the calls of one run. Whose run it is the workers are asked each time: few clients ever do."""
        run = call.path("run_id")
        links = self._fleet.links
        found, errors = await self._fleet.ask_all(ShowRun(run_id=run), MARKET_CALL_S)
        for name in found:
            return await self.send(links[name], call)
        raise not_found("run", errors, run, hint="hawker workers runs")

    def routes(self) -> tuple[Route, ...]:
        """The calls about one machine, and about one run."""
        machines = [kind for kind in CALLS if kind.op.served == "worker" and "machine_id" in kind.op.in_path]
        runs = (ShowRun, RetryRun, CancelRun)
        return (
            *(unread(kind, partial(self.machine_call, kind)) for kind in machines),
            *(unread(kind, self.run_call) for kind in runs),
        )

    async def machine_call(self, kind: type[Declared[Any]], call: Call) -> Response:
        """The handler of every call about a machine that a worker serves."""
        machine = call.path("machine_id")
        link = await self.locate(machine)
        try:
            response = await self._pass(link, kind, call)
        except Unreachable:  # it may have been replaced because of that
            there = await self._elsewhere(machine, link)
            if there is None:
                raise
            return await self._pass(there, kind, call)
        if response.status_code == 404:  # it may have been a stale hint that sent us there
            there = await self._elsewhere(machine, link)
            if there is not None:
                return await self._pass(there, kind, call)
        return response

    async def _elsewhere(self, machine: str, link: WorkerLink) -> WorkerLink | None:
        """Another worker that has the machine, when the supposed owner does not have it or does not answer."""
        self._owners.pop(machine, None)
        with suppress(NotFound, Unreachable):
            there = await self._ask_for(machine)
            return None if there is link else there
        return None

    async def _pass(self, link: WorkerLink, kind: type[Declared[Any]], call: Call) -> Response:
        if issubclass(kind, StreamRequest):
            return await self._follow(link, call)
        return await self.send(link, call, timeout_s=max(CALL_S, kind.op.deadline_s))

    async def send(self, link: WorkerLink, call: Call, target: str = "", *, timeout_s: float = CALL_S) -> Response:
        """Pass a call to one worker and its answer back. `target` stands for the call's own."""
        answer = await link.peer.request(
            call.request.method,
            target or target_of(call),
            body=call.body,
            headers=_headers(call),
            timeout_s=timeout_s,
        )
        check_meant(link.name, answer.status)
        media = answer.headers.get("content-type")
        response = Response(answer.body, answer.status, media_type=media)
        if timing := answer.headers.get("server-timing"):
            response.headers["server-timing"] = timing
        return response

    async def _follow(self, link: WorkerLink, call: Call) -> Response:
        stack = AsyncExitStack()
        try:
            status, headers, chunks = await stack.enter_async_context(
                link.peer.stream(call.request.method, target_of(call), headers=_headers(call), timeout_s=CALL_S)
            )
            if status >= 300:  # an error is no stream
                whole = b"".join([chunk async for chunk in chunks])
                await stack.aclose()
                check_meant(link.name, status)
                return Response(whole, status, media_type=headers.get("content-type"))
        except BaseException:
            await stack.aclose()
            raise

        async def body() -> AsyncIterator[bytes]:
            async with stack:
                async for chunk in chunks:
                    yield chunk

        return StreamingResponse(body(), status, media_type=headers.get("content-type"))


def target_of(call: Call) -> str:
    """Path and query as they came, still encoded."""
    path: bytes = call.request.scope["raw_path"]
    return _quoted(path) + query_of(call)


def query_of(call: Call) -> str:
    """The query as it came, still encoded, with its question mark; "" when there is none."""
    query: bytes = call.request.scope["query_string"]
    return "?" + _quoted(query) if query else ""


def _quoted(part: bytes) -> str:
    return quote(part.decode("latin-1"), safe="/:@!$&'()*+,;=-._~%?")


def _headers(call: Call) -> dict[str, str]:
    passed = {name: call.request.headers[name] for name in _PASSED if name in call.request.headers}
    return {**passed, **by(call)}


def by(call: Call) -> dict[str, str]:
    """The headers that tell a worker whose call this is, and its id."""
    return {REQUEST_ID: call.id, OWNER: call.owner}


async def ask_lists(
    call: Call, links: Iterable[WorkerLink], method: str = "GET"
) -> tuple[dict[str, list[msgspec.Raw]], dict[str, HawkerError]]:
    """Make the call at each worker. Returns lists, whose entries are passed on unread, and errors, by name."""
    sent = Encoded(method, target_of(call), {}, b"")
    return await gather_named({link.name: link.ask_lists(sent) for link in links})


def answer(value: Any, silent: Sequence[str]) -> Response:
    """An answer made of what the workers said. A header of ours names those that said nothing."""
    response = reply(value)
    if silent:
        response.headers["hawker-unreachable-workers"] = ", ".join(silent)
    return response

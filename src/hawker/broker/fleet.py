"""The workers that a broker knows, and how it sends them declared requests.

The catalog tells which workers there are (`broker.directory`), or a fixed list does. What many orders ask of a worker
at once (offers, reservations, confirmations) travels as one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from hawker.client.batching import Batcher
from hawker.client.connection import Peer, Response
from hawker.client.wire import PeerUnreachable
from hawker.core import rendezvous, silence
from hawker.errors import HawkerError, Invalid, Misdirected, NotFound, Unreachable
from hawker.http.app import WORKER
from hawker.model.market import CALL_S
from hawker.model.op import Request, reply_of
from hawker.model.request_codec import Encoded, encode, encode_each

BATCHES_IN_FLIGHT = 2  # one on its way while the next one fills
BATCH_MAX = 32
"""How many requests travel as one. Each has one configuration at most, or is answered with one: at their largest, so
many fill half of what a message between agents may have (`hawker.http.call.BATCH_BYTES_MAX`)."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

R = TypeVar("R")
T = TypeVar("T")


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker listens. It must call itself by `name` and `region`. `since_ms` is when its database was made, 0
    where that is not known."""

    name: str
    region: str
    host: str
    port: int
    since_ms: int = 0

    @property
    def place(self) -> tuple[str, str, int]:
        return self.region, self.host, self.port


def parse_address(text: str) -> WorkerAddress:
    """An address from a flag: `name@region=host:port`."""
    head, _, address = text.partition("=")
    name, _, region = head.partition("@")
    host, _, port = address.rpartition(":")
    if not (name and region and host and port.isdigit()):
        raise Invalid("worker", text, "write name@region=host:port")
    return WorkerAddress(name=name, region=region, host=host.strip("[]"), port=int(port))


class PeerError(HawkerError):
    """A worker's error, which is passed on with its status."""

    def __init__(self, response: Response) -> None:
        try:
            body = msgspec.json.decode(response.body, type=dict[str, Any])
        except _UNREADABLE:
            body = {"error": response.body[:200].decode(errors="replace")}
        super().__init__(str(body.get("error", "unknown")), details=body.get("details"))
        self.status = response.status
        self.code = str(body.get("status", self.code))


def check_meant(worker: str, status: int) -> None:
    """Raises `PeerUnreachable` when another worker has answered: it has done nothing."""
    if status == Misdirected.status:
        raise PeerUnreachable(worker, "is not the one that answers at its address", sent=False)


class WorkerLink:
    """One worker as a broker sees it. Requests that are declared `batch` and made at once travel together. Each may be
    repeated; it raises `Unreachable` when the outcome is in doubt, and `PeerError` when the worker answers with an
    error."""

    def __init__(self, name: str, region: str, peer: Peer) -> None:
        self.name = name
        self.region = region
        self.peer = peer
        self.missed = False
        """Whether its last offer did not come in time, and nothing has come since."""
        self._silence = silence.ANSWERS
        self._late: dict[asyncio.Task[Any], None] = {}  # requests to a silent worker whose answer nobody waits for
        self._batchers: dict[type[Request[Any]], Batcher[Any, Any]] = {}

    async def send(self, request: Request[R], timeout_s: float | None = None) -> R:
        """The answer. One of a batch that has a time-out of its own goes alone: its neighbours must not wait for it."""
        if not request.op.batch:
            body = await self.send_unread(encode(request), timeout_s or request.op.deadline_s)
            reply: R = self._read(request.op.path, body, decoder_of(type(request)))
            return reply
        if timeout_s is None:
            return await self.collect(request)
        answers: list[R | HawkerError] = await self._send_each([request], timeout_s)
        if isinstance(answer := answers[0], HawkerError):
            raise answer
        return answer

    async def send_unread(self, sent: Encoded, timeout_s: float) -> bytes:
        """The body of the answer, for callers that pass it on."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            response = await self.peer.request(
                sent.method, sent.target, headers=sent.headers, body=sent.body, timeout_s=timeout_s, idempotent=True
            )
        except Unreachable:
            self._silence = silence.unanswered(self._silence, began, loop.time())
            raise
        self._silence = silence.ANSWERS
        self.missed = False
        if response.status >= 300:
            check_meant(self.name, response.status)
            raise PeerError(response)
        return response.body or b"null"

    def collect(self, request: Request[R]) -> asyncio.Future[R]:
        """The answer to a request that travels in a batch with those that are made at the same time."""
        batcher = self._batchers.get(type(request))
        if batcher is None:
            batcher = self._batchers[type(request)] = Batcher(
                self._send_each, in_flight_max=BATCHES_IN_FLIGHT, batch_max=BATCH_MAX
            )
        return batcher.submit(request)

    async def ask(self, request: Request[R], timeout_s: float | None = None) -> R:
        """As `send`, for callers that can do without an answer: a worker that has been silent is not waited for."""
        body = await self.ask_unread(encode(request), timeout_s or request.op.deadline_s)
        reply: R = self._read(request.op.path, body, decoder_of(type(request)))
        return reply

    async def ask_lists(self, sent: Encoded) -> list[msgspec.Raw]:
        """As `ask`, of a request that is passed on. Its answer is a list whose entries are passed on unread."""
        return self._read(sent.target, await self.ask_unread(sent, CALL_S), _RAWS)

    async def ask_unread(self, sent: Encoded, timeout_s: float) -> bytes:
        wait_s = silence.patience_s(self._silence, timeout_s)
        if self._silence.since_s is None:
            return await self.send_unread(sent, timeout_s)
        silent_s = asyncio.get_running_loop().time() - self._silence.since_s
        if wait_s > 0:
            late = asyncio.get_running_loop().create_task(self.send_unread(sent, timeout_s), name=f"late {self.name}")
            self._late[late] = None
            self._silence = silence.asked(self._silence, True)
            late.add_done_callback(self._late_ended)
            await asyncio.wait({late}, timeout=wait_s)
            if late.done() and not late.cancelled():  # cancelled: the fleet is closed
                return late.result()
        raise PeerUnreachable(self.name, f"has not answered for {silent_s:.0f} s", sent=wait_s > 0)

    def _late_ended(self, late: asyncio.Task[Any]) -> None:
        self._late.pop(late, None)
        self._silence = silence.asked(self._silence, bool(self._late))
        if not late.cancelled():
            late.exception()  # nobody waits for it any more; asyncio would complain

    async def close(self) -> None:
        """Fail what waits, end what is on its way, close the connections. May be called again."""
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))
        await self.peer.close()

    async def _send_each(self, requests: Sequence[Request[R]], timeout_s: float | None = None) -> list[R | HawkerError]:
        """An answer for each request, or the error that concerns it alone."""
        kind = type(requests[0])
        op = kind.op
        body = await self.send_unread(encode_each(requests), timeout_s or op.deadline_s)
        answers = self._read(op.path, body, _RAWS)
        if len(answers) != len(requests):
            raise HawkerError(f"{self.name}: {op.path} was asked {len(requests)} times and gave {len(answers)} answers")
        decoder = decoder_of(kind)
        read: list[R | HawkerError] = []
        for raw in answers:
            try:
                read.append(self._read(op.path, raw, decoder))
            except HawkerError as error:
                read.append(error)
        return read

    def _read(self, path: str, body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            return decoder.decode(body)
        except _UNREADABLE as error:
            raise HawkerError(f"{self.name}: an answer to {path} does not read: {error}") from error


_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


@cache
def decoder_of(kind: type[Request[Any]]) -> msgspec.json.Decoder[Any]:
    """Reads the replies to a kind of request."""
    return msgspec.json.Decoder(reply_of(kind))


class Fleet:
    """All workers, by name. `update` as the catalog changes; a fixed list stays as it is.

    `links` is never changed, only replaced: who holds it across an await has the fleet as it was.
    """

    def __init__(self, addresses: Sequence[WorkerAddress], token: str, region: str = "") -> None:
        names = [a.name for a in addresses]
        for name in names:
            if names.count(name) > 1:
                raise Invalid("workers", name, "two workers of the list have this name; each needs its own")
        self._headers = {"authorization": f"Bearer {token}"}
        self.home = region
        self._closing: dict[asyncio.Task[None], None] = {}
        self._addresses: dict[str, WorkerAddress] = {}
        self.links: dict[str, WorkerLink] = {}
        self.update(addresses)

    def update(self, addresses: Sequence[WorkerAddress]) -> None:
        """Follow the list: links of workers that stay where they are stay as they are."""
        wanted = {address.name: address for address in addresses}
        gone, links = dict(self.links), {}
        for name, address in wanted.items():
            before = self._addresses.get(name)
            if before and before.place == address.place:  # a new database at the same place ends no call
                links[name] = gone.pop(name)
            else:
                headers = {**self._headers, WORKER: name}
                peer = Peer(address.host, address.port, headers=headers)
                links[name] = WorkerLink(name, address.region, peer)
        self._addresses, self.links = wanted, links
        for name, link in gone.items():
            task = asyncio.get_running_loop().create_task(link.close(), name=f"close {name}")
            self._closing[task] = None
            task.add_done_callback(lambda done: self._closing.pop(done, None))

    def link(self, name: str) -> WorkerLink:
        """The worker of a name that a client gave. Raises `NotFound`."""
        link = self.links.get(name)
        if link is None:
            raise NotFound(f"no worker is called {name}", hint="hawker workers lists them")
        return link

    def settled(self, now_ms: int) -> list[str]:
        """The workers that may decide what brokers must agree on."""
        since_ms = {name: at.since_ms if (at := self._addresses.get(name)) else 0 for name in self.links}
        return rendezvous.settled(since_ms, now_ms)

    def regions(self) -> list[str]:
        """Regions that have workers, the broker's own first."""
        codes = dict.fromkeys(link.region for link in self.links.values())
        return sorted(codes, key=lambda code: code != self.home)

    def in_region(self, region: str) -> list[WorkerLink]:
        return [link for link in self.links.values() if link.region == region]

    async def ask_all(
        self, request: Request[R], timeout_s: float | None = None
    ) -> tuple[dict[str, R], dict[str, HawkerError]]:
        """Send the same request to every worker at once. Returns answers and errors by name; a silent worker costs no
        deadline."""
        return await ask_each(self.links.values(), request, timeout_s)

    async def close(self) -> None:
        """Nothing of the fleet is left pending afterwards. Whoever still waits is told `Unreachable`."""
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)


async def ask_each(
    links: Iterable[WorkerLink], request: Request[R], timeout_s: float | None = None
) -> tuple[dict[str, R], dict[str, HawkerError]]:
    """As `Fleet.ask_all`, of these workers."""
    return await gather_named({link.name: link.ask(request, timeout_s) for link in links})


async def gather_named(calls: Mapping[str, Awaitable[T]]) -> tuple[dict[str, T], dict[str, HawkerError]]:
    """Await all calls. Returns answers and Hawker's errors by name; any other error is raised."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    answers: dict[str, T] = {}
    errors: dict[str, HawkerError] = {}
    for name, result in zip(calls, results, strict=True):
        if isinstance(result, HawkerError):
            errors[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[name] = result
    return answers, errors


def unreachable(errors: Mapping[str, HawkerError]) -> list[str]:
    """The workers whose answer is missing."""
    return sorted(name for name, error in errors.items() if isinstance(error, Unreachable))


def not_found(what: str, errors: Mapping[str, HawkerError], name: str, hint: str = "") -> HawkerError:
    """The error for what no worker has that answered. One that did not answer may have it."""
    if silent := unreachable(errors):
        text = f"{what} not found on the workers that answered, and {', '.join(silent)} did not answer"
        return Unreachable(text, hint="try again when they are back")
    return NotFound(f"{what} not found: {name}", hint=hint)

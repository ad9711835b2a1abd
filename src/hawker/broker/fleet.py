"""The workers a broker knows, and the calls it makes to them.

Which there are the catalog tells (`broker.directory`), or a fixed list. Calls that many orders
make at once (offers, reservations, confirmations) are collected per worker and tick and sent as one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from hawker.client.batching import Batcher
from hawker.client.connection import Peer, Response
from hawker.client.wire import PeerUnreachable
from hawker.core import rendezvous, silence
from hawker.errors import HawkerError, Invalid, Misdirected, Unreachable
from hawker.http.app import WORKER
from hawker.model.market import Ask, Decision, Failed, Offer, Order, Refusal, Reservation
from hawker.model.rows import AppRow

OFFERS_S = 0.25
"""The one deadline of an offers round. A worker that has not answered by then is simply not in the book."""
RESERVE_S = 1.5
CALL_S = 5.0
BATCHES_IN_FLIGHT = 2  # one on its way while the next one fills
BATCH_MAX = 32
"""Items of a batch. Each has, or is answered with, one configuration at most: all of them are half of what a request
between agents (`hawker.http.call.BATCH_BYTES_MAX`) and its answer may have."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker listens. `name` and `region` are what it must call itself; `since_ms` is when its database was
    made, 0 where nobody says."""

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


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    app: AppRow
    decision: Decision | None = None
    wait: bool = False


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """`machine` is the API's JSON as the worker wrote it, passed on unread."""

    status: int = 200
    machine: msgspec.Raw = msgspec.Raw(b"null")
    error: dict[str, Any] | None = None


class AppKept(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's row of an app and how many machines of it live there."""

    app: AppRow
    machines: int


class PeerError(HawkerError):
    """A worker answered with an error of its own; passed on with its status."""

    def __init__(self, response: Response) -> None:
        try:
            body = msgspec.json.decode(response.body, type=dict[str, Any])
        except _UNREADABLE:
            body = {"error": response.body[:200].decode(errors="replace")}
        super().__init__(str(body.get("error", "unknown")), details=body.get("details"))
        self.status = response.status
        self.code = str(body.get("status", self.code))


def check_meant(worker: str, response: Response) -> None:
    """Raises `PeerUnreachable` when another worker has answered: it has done nothing."""
    if response.status == Misdirected.status:
        raise PeerUnreachable(worker, "is not the one that answers at its address", sent=False)


_encode = msgspec.json.Encoder().encode


class WorkerLink:
    """One worker as a broker sees it. All calls may be repeated; they raise `Unreachable` when the outcome is in
    doubt."""

    def __init__(self, name: str, region: str, peer: Peer) -> None:
        self.name = name
        self.region = region
        self.peer = peer
        self.missed = False
        """Whether its last offer did not come in time, and nothing has come since."""
        self._silence = silence.ANSWERS
        self._late: dict[asyncio.Task[Any], None] = {}  # questions to a silent worker that nobody waits for
        self._offers = self._batcher("offers", Offer | Refusal | Failed, OFFERS_S)
        self._reserves = self._batcher("reserve", Reservation | Refusal | Failed, RESERVE_S)
        self._confirms = self._batcher("confirm", Confirmed, CALL_S)

    async def offer(self, ask: Ask) -> Offer | Refusal:
        answer: Offer | Refusal = await self._offers.submit(ask)
        return answer

    async def reserve(self, order: Order) -> Reservation | Refusal:
        answer: Reservation | Refusal = await self._reserves.submit(order)
        return answer

    async def confirm(self, item: Confirmation, *, timeout_s: float = CALL_S) -> Confirmed:
        """A confirmation that waits for the start goes alone: a slow program must not hold up its neighbours."""
        if item.wait:
            alone: Confirmed | HawkerError = (await self._send("confirm", Confirmed, timeout_s, [item]))[0]
            if isinstance(alone, HawkerError):
                raise alone
            return alone
        answer: Confirmed = await self._confirms.submit(item)
        return answer

    async def call(self, method: str, path: str, kind: type[T], body: Any = None, timeout_s: float = CALL_S) -> T:
        """A call between agents. Raises `PeerError` for an answer other than 2xx."""
        raw = b"" if body is None else _encode(body)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            response = await self.peer.request(method, path, body=raw, timeout_s=timeout_s, idempotent=True)
        except Unreachable:
            self._silence = silence.unanswered(self._silence, began, loop.time())
            raise
        self._silence = silence.ANSWERS
        self.missed = False
        check_meant(self.name, response)
        if response.status >= 300:
            raise PeerError(response)
        try:
            return msgspec.json.decode(response.body or b"null", type=kind)
        except _UNREADABLE as error:
            raise HawkerError(f"{self.name}: the answer to {method} {path} does not read: {error}") from error

    async def ask(self, method: str, path: str, kind: type[T], body: Any = None, timeout_s: float = CALL_S) -> T:
        """As `call`, for callers that can do without an answer: a worker that has been silent is not waited for."""
        wait_s = silence.patience_s(self._silence, timeout_s)
        if self._silence.since_s is None:
            return await self.call(method, path, kind, body, timeout_s)
        silent_s = asyncio.get_running_loop().time() - self._silence.since_s
        if wait_s > 0:
            coroutine = self.call(method, path, kind, body, timeout_s)
            late = asyncio.get_running_loop().create_task(coroutine, name=f"late {self.name}")
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
        await asyncio.gather(self._offers.close(), self._reserves.close(), self._confirms.close())
        await self.peer.close()

    def _batcher(self, verb: str, kind: Any, timeout_s: float) -> Batcher[Any, Any]:
        send = partial(self._send, verb, kind, timeout_s)
        return Batcher(send, in_flight_max=BATCHES_IN_FLIGHT, batch_max=BATCH_MAX)

    async def _send(self, verb: str, kind: Any, timeout_s: float, items: Sequence[Any]) -> list[Any]:
        """An answer for each, or the error that is its alone."""
        answers = await self.call("POST", f"/v1/market/{verb}", list[msgspec.Raw], list(items), timeout_s)
        if len(answers) != len(items):
            raise HawkerError(f"{self.name}: {len(items)} {verb} were asked for, and {len(answers)} answers came")
        return [self._answer(verb, kind, raw) for raw in answers]

    def _answer(self, verb: str, kind: Any, raw: msgspec.Raw) -> Any:
        try:
            answer = msgspec.json.decode(raw, type=kind)
        except _UNREADABLE as error:
            return HawkerError(f"{self.name}: an answer to {verb} does not read: {error}")
        return HawkerError(f"{self.name}: {answer.error}") if isinstance(answer, Failed) else answer


class Fleet:
    """All workers, by name. `update` as the catalog changes; a fixed list stays as it is.

    `links` is never changed, only replaced: who holds it across an await has the fleet as it was.
    """

    def __init__(self, addresses: Sequence[WorkerAddress], token: str, region: str = "") -> None:
        names = [a.name for a in addresses]
        for name in names:
            if names.count(name) > 1:
                raise Invalid("workers", name, "two workers of the list have this name; each needs its own")
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
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
            if before and before.place == address.place:  # its database may be a new one: that ends no call
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
        self, method: str, path: str, kind: type[T], body: Any = None, timeout_s: float = CALL_S
    ) -> tuple[dict[str, T], dict[str, HawkerError]]:
        """The same call to every worker at once: answers and errors by name. A silent worker costs no deadline."""
        calls = {name: link.ask(method, path, kind, body, timeout_s) for name, link in self.links.items()}
        return await gather_named(calls)

    async def close(self) -> None:
        """Nothing of the fleet is left pending afterwards. Whoever still waits is told `Unreachable`."""
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)


async def gather_named(calls: Mapping[str, Awaitable[T]]) -> tuple[dict[str, T], dict[str, HawkerError]]:
    """Await all; errors of ours are sorted out by name, others are raised."""
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


def unreachable(errors: dict[str, HawkerError]) -> list[str]:
    """The workers whose answer is missing."""
    return sorted(name for name, error in errors.items() if isinstance(error, Unreachable))

"""Calls between members over HTTP: digests, ranges, tables of members, probes. Their bodies are sealed as packets are.

A message that fits into a datagram travels in one. A member asks by HTTP for whatever is larger or must not be lost.
Every call may be repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from hawker.catalog.gossip.packets import UNREADABLE, NotOurs, Sealer
from hawker.client.connection import Peer
from hawker.client.wire import PeerUnreachable
from hawker.errors import Invalid, Refused, Unreachable
from hawker.http.call import Call
from hawker.http.handlers import Handler, Route, unread
from hawker.model.op import BYTES, Op, Request, reply_of

R = TypeVar("R")
Address = tuple[str, int]
Answer = Callable[[bytes], Awaitable[bytes]]
"""What answers a question, both opened."""

CALL_S = 5.0
FETCH_S = 60.0
ANSWER_BYTES_MAX = 64 << 20
"""A snapshot of a worker with 100,000 machines is half of this."""
PEERS_KEPT = 64


class Sealed(Request[R], Generic[R]):
    """Base of what members ask each other. The body is a sealed message, and so is that of the answer, which has the
    type `R`. Each may be repeated."""

    message: bytes = b""


def sealed_op(name: str, deadline_s: float = CALL_S) -> Op:
    return Op(
        f"Catalog_{name}",
        "POST",
        f"/v1/catalog/{name}",
        served="any",
        callers="agents",
        raw="message",
        idempotent=True,
        deadline_s=deadline_s,
        media=BYTES,
    )


class NotAMember(Refused):
    """A request that is not sealed with one of the cluster's keys."""

    status = 403
    code = "not_a_member"


class Refuses(PeerUnreachable):
    """A member that refuses whatever this node asks."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, why, sent=True)
        self.message = f"{peer} {why}"  # the member has not acted


REFUSED = {
    401: "has another cluster token: tokens.cluster must be the same at all agents",
    403: "has another catalog key: catalog.cluster and catalog.keys must be the same at all agents",
}


class Exchange:
    """Asks other members, over connections that it keeps for those that it asked last."""

    def __init__(self, sealer: Sealer, token: str) -> None:
        self._sealer = sealer
        self._headers = {"authorization": f"Bearer {token}", "content-type": BYTES}
        self._peers: OrderedDict[Address, Peer] = OrderedDict()
        self.bytes_sent = 0
        self.bytes_received = 0

    async def ask(self, to: Address, call: type[Sealed[R]], question: Any, timeout_s: float | None = None) -> R:
        """Ask, and read the answer. Raises `PeerUnreachable`, also for an answer that does not open or read."""
        answer = await self.ask_bytes(to, call, _encode(question), timeout_s)
        try:
            found: R = msgspec.msgpack.decode(answer, type=reply_of(call))
        except UNREADABLE as error:
            why = f"answered {call.op.path} with what does not read: {error}"
            raise PeerUnreachable(_named(to), why, sent=True) from error
        return found

    async def ask_bytes(
        self, to: Address, call: type[Sealed[Any]], question: bytes, timeout_s: float | None = None
    ) -> bytes:
        """The same with messages that the caller reads itself."""
        op, body = call.op, self._sealer.seal(question)
        response = await (await self._peer(to)).request(
            op.method,
            op.path,
            body=body,
            timeout_s=timeout_s or op.deadline_s,
            idempotent=op.idempotent,
            body_bytes_max=ANSWER_BYTES_MAX,
        )
        self.bytes_sent += len(body)
        self.bytes_received += len(response.body)
        if why := REFUSED.get(response.status):
            raise Refuses(_named(to), why)
        if response.status != 200:
            raise PeerUnreachable(_named(to), f"answered {op.path} with status {response.status}", sent=True)
        try:
            return self._sealer.open(response.body)
        except NotOurs as error:
            raise PeerUnreachable(
                _named(to), f"answered {op.path} with what does not open: {error.why}", sent=True
            ) from error

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            await peer.close()

    async def _peer(self, to: Address) -> Peer:
        peer = self._peers.get(to)
        if peer is None:
            peer = self._peers[to] = Peer(*to, headers=self._headers, connections_max=8)
            if len(self._peers) > PEERS_KEPT:
                _, oldest = self._peers.popitem(last=False)
                await oldest.close()
        else:
            self._peers.move_to_end(to)
        return peer


class Answering:
    """Opens questions and seals answers, around handlers of plain bytes. Once `closed`, it answers nothing any more:
    the server outlives the member by a moment."""

    def __init__(
        self, sealer: Sealer, strangers: Callable[[str], None], closed: Callable[[], bool] = lambda: False
    ) -> None:
        self._sealer = sealer
        self._strangers = strangers
        self._closed = closed

    def routes(self, answers: Mapping[type[Sealed[Any]], Answer]) -> tuple[Route, ...]:
        return tuple(unread(call, self._handler(answer)) for call, answer in answers.items())

    def _handler(self, answer: Answer) -> Handler:
        async def handle(call: Call) -> Response:
            try:
                question = self._sealer.open(call.body)
            except NotOurs as error:
                self._strangers(error.why)
                raise NotAMember(
                    f"not a member of this cluster: {error.why}",
                    hint="give every agent the same catalog.cluster and catalog.keys",
                ) from error
            if self._closed():
                raise Unreachable("this member is being closed")
            try:
                answered = await answer(question)
            except UNREADABLE as error:
                self._strangers("unreadable")
                raise Invalid("body", "...", f"not a question of this version of Hawker: {error}") from error
            return Response(self._sealer.seal(answered), media_type=BYTES)

        return handle


def _named(to: Address) -> str:
    return f"{to[0]}:{to[1]}"


_encode = msgspec.msgpack.Encoder().encode

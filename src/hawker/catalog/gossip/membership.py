"""Membership with its I/O: drives the core (`core.swim`), carries out what the core asks for, and keeps the table of
members.

The core decides everything. This module has its clock, its packets, its stream probes and its exchanges of whole
tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from hawker.catalog.gossip.exchange import Address, Exchange, Sealed, sealed_op
from hawker.catalog.gossip.packets import PAYLOAD_MAX
from hawker.catalog.gossip.replica import Replica
from hawker.client.wire import PeerUnreachable
from hawker.core.swim import actions
from hawker.core.swim.members import Member, Status, View
from hawker.core.swim.settings import Settings
from hawker.core.swim.swim import Swim
from hawker.errors import StoreError
from hawker.host import Host
from hawker.telemetry import get_logger

KIND = b"s"
"""The first byte of a packet of membership."""


class ExchangeMembers(Sealed[bytes]):
    """Exchange whole tables of members, as `core.swim` writes them."""

    op = sealed_op("members")


class Probe(Sealed[None]):
    """Answer: the member lives, although its datagrams get lost."""

    op = sealed_op("probe")


class Surroundings(Protocol):
    """What membership needs of its node."""

    def send(self, to: Address, payload: bytes) -> None: ...

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None: ...

    def noted(self, name: str, note: bytes) -> None:
        """A live member's note came with a packet."""

    def reached(self) -> None:
        """Somebody answered."""

    async def exchange_logs(self, member: Member) -> None:
        """Exchange logs with the neighbour whose table of members was just exchanged. Raises `PeerUnreachable`,
        `StoreError`."""


class Membership:
    """One node's membership. It tells `hint` the address of a member that is not known here."""

    def __init__(
        self,
        me: Member,
        settings: Settings,
        host: Host,
        replica: Replica,
        exchange: Exchange,
        node: Surroundings,
        hint: Callable[[Address], None],
    ) -> None:
        self.swim = Swim(me, settings, host.rng, payload_max=PAYLOAD_MAX - len(KIND))
        self._name = me.name
        self._host = host
        self._replica = replica
        self._exchange = exchange
        self._node = node
        self._hint = hint
        self._addresses: dict[Address, None] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self) -> None:
        self.swim.start(asyncio.get_running_loop().time())
        self.act()

    def close(self) -> None:
        """Say goodbye, so that nobody waits to find out."""
        self._closed = True
        self.swim.leave(asyncio.get_running_loop().time())
        self.act()
        if self._ticking:
            self._ticking.cancel()

    def live(self) -> list[Member]:
        """The neighbours that are believed to live, by name."""
        found = self.swim.members
        return [found[name].member for name in sorted(found) if found[name].status.live and name != self._name]

    def introduce(self, views: list[View] | tuple[View, ...]) -> None:
        """Take up neighbours that a third party told of."""
        entries = [(view.member, view.incarnation, view.status) for view in views]
        self.swim.join(asyncio.get_running_loop().time(), entries)
        self.act()

    def received(self, source: Address, payload: bytes) -> None:
        """Take an opened packet of membership. Raises `StoreError`."""
        self.swim.on_packet(asyncio.get_running_loop().time(), source, payload)
        self.act()
        if source not in self._addresses:  # the sender knows us: it may be of a part of the region that we lost
            self._hint(source)

    async def answer_members(self, question: bytes) -> bytes:
        answer = self.swim.push_pull_answer(asyncio.get_running_loop().time(), question)
        self.act()
        return answer

    async def answer_probe(self, question: bytes) -> bytes:
        return b""

    def act(self) -> None:
        """Do what the core asks for, and set its clock. Raises `StoreError` when the table of members cannot be
        written; everything else is done by then."""
        loop = asyncio.get_running_loop()
        failed: StoreError | None = None
        for action in self.swim.take():
            match action:
                case actions.Send(to, payload):
                    self._node.send(to, KIND + payload)
                case actions.StreamProbe(member, probe_id, deadline):
                    self._node.start(self._probe(member, probe_id, deadline), "probe")
                case actions.PushPull(member):
                    self._node.start(self._push_pull(member), "push-pull")
                case actions.Noted(name, note):
                    self._node.noted(name, note)
                case actions.Changed(name, before, after, member):
                    try:
                        self._changed(name, before, after, member)
                    except StoreError as error:
                        failed = error
                case actions.Conflict(ours, theirs):
                    at = {"ours": ours.address, "theirs": theirs.address}
                    _logger.error("member.conflict", member=ours.name, cause="membership", **at)
        if self._ticking:
            self._ticking.cancel()
        if not self._closed:
            self._ticking = loop.call_at(max(loop.time(), self.swim.due()), self._tick)
        if failed:
            raise failed

    def _tick(self) -> None:
        self._ticking = None
        self.swim.tick(asyncio.get_running_loop().time())
        try:
            self.act()
        except StoreError as error:
            _logger.warning("members.not_kept", error=error.message, cause="membership")

    def _changed(self, name: str, before: Status | None, after: Status | None, member: Member) -> None:
        was, now = (status.name if status is not None else None for status in (before, after))
        _logger.info("member.changed", member=name, before=was, after=now, cause="membership")
        if after is None:
            self._addresses.pop(member.address, None)
        else:
            self._addresses[member.address] = None
        if name != self._name:
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Write the member into the table of members, which SQL reads and the next start begins with."""
        view = self.swim.members.get(name)
        if view is None:
            self._replica.drop_member(name)
            return
        member = view.member
        self._replica.keep_member(
            name,
            region=member.region,
            host=member.host,
            port=member.port,
            roles=",".join(member.roles),
            status=view.status.name,
            incarnation=view.incarnation,
            born_ms=member.born,
            changed_ms=self._host.now_ms(),
        )

    async def _probe(self, member: Member, probe_id: int, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._exchange.ask_bytes(member.address, Probe, b"", max(0.05, deadline - loop.time()))
            reached = True
            self._node.reached()  # where datagrams are lost, streams may get through
        except PeerUnreachable:
            reached = False
        self.swim.on_stream_probe(loop.time(), probe_id, reached)
        self.act()

    async def _push_pull(self, member: Member) -> None:
        """Exchange tables of members with a neighbour, then what the logs of either lack."""
        loop = asyncio.get_running_loop()
        try:
            ask: bytes | None = self.swim.push_pull_ask(loop.time())
            while ask is not None:
                answer = await self._exchange.ask_bytes(member.address, ExchangeMembers, ask)
                ask = self.swim.push_pull_done(loop.time(), answer)
                self.act()
            await self._node.exchange_logs(member)
        except (PeerUnreachable, StoreError, ValueError) as error:
            _logger.info("catalog.exchange_failed", member=member.name, error=str(error), cause="local rule: push-pull")


_logger = get_logger()

"""Finding the others: at the start, after a long partition, and in other regions.

Any member will do to begin with. One of our own region introduces us to its neighbours; one of another region passes on
the directory of workers, and we go to those of our region. Afterwards one worker of our region that the directory knows
and membership does not is tried now and then: so two halves that took each other for dead find together again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import msgspec

from hawker.catalog.gossip.exchange import Address, Exchange, Sealed, sealed_op
from hawker.catalog.gossip.membership import Membership
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import Replication
from hawker.client.wire import PeerUnreachable
from hawker.core.swim.members import Member, Status, View
from hawker.errors import StoreError
from hawker.model.catalog import TIERS
from hawker.telemetry import get_logger

FIRST_S, MOST_S = 0.5, 15.0
LOOK_S = 10.0
INTRODUCED_MOST = 64
CONTACTS_MOST = 5
SEEDS_MOST = 8
HINTS_MOST = 16
HINT_S = 5.0
"""How often one address is followed up. A host that sends from another address than it announces never becomes known by
the address that its packets come from."""
TRIED_AT_ONCE = 3
HOLDER_S = 1.0
"""How long another node that was last known by the joining node's name has to answer."""
SETTLE_S = 0.4  # several workers often come at once, and one of them introduces the others


class JoinAsk(msgspec.Struct, frozen=True, array_like=True):
    region: str
    member: Member
    incarnation: int


class JoinAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`members` are the answering node and its neighbours, of use to a node of the same region. `holder` is where
    another node answers to the asker's name, "" where none does; then the asker does not become a member."""

    region: str
    members: tuple[View, ...]
    holder: str = ""


class Join(Sealed[JoinAnswer]):
    """Introduce a new member."""

    op = sealed_op("join")


class Joining:
    """What one node, `me`, does to find the others, beginning with the members `seeds`. `joined` is set once a member
    of any region has answered and its logs were read; with nobody to ask it stays unset."""

    def __init__(
        self,
        me: Member,
        seeds: Sequence[Address],
        replica: Replica,
        exchange: Exchange,
        membership: Membership,
        replication: Replication,
        rng: Random,
    ) -> None:
        self._me = me
        self._configured = seeds
        self._replica = replica
        self._exchange = exchange
        self._membership = membership
        self._replication = replication
        self._rng = rng
        self.joined = asyncio.Event()
        self.holder = ""
        """Where another node answers to our name, as a member told us when we asked."""
        self._hinted: dict[Address, None] = {}
        self._followed: dict[Address, float] = {}  # hints, and when they were followed up last
        self._directory_changed = asyncio.Event()
        replica.on_applied.append(self._hint)

    async def run(self) -> None:
        """Join, then look for members that are missing, and never return."""
        delay_s = FIRST_S
        while True:
            if self._needed():
                with suppress(StoreError):  # our own disk failed; it is read again in a while
                    if await self._join_anyone():
                        delay_s = FIRST_S
                    else:
                        await asyncio.sleep(delay_s)
                        delay_s = min(MOST_S, delay_s * 2)
                        continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S * self._rng.uniform(0.5, 1.5)):
                    await self._directory_changed.wait()
            await asyncio.sleep(SETTLE_S * self._rng.random())
            self._directory_changed.clear()
            with suppress(StoreError):
                await self._find_missing()

    def hint(self, address: Address) -> None:
        """Follow up an address from which an unknown member sent a packet."""
        now = asyncio.get_running_loop().time()
        if len(self._hinted) < HINTS_MOST and now >= self._followed.get(address, -HINT_S) + HINT_S:
            self._hinted[address] = None
            self._directory_changed.set()

    def anyone(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._seeds())

    def expected(self) -> bool:
        """Whether anybody should be there: a configured seed, or a member that did not leave."""
        if any(address != self._me.address for address in self._configured):
            return True
        found = "select count(*) from members where name <> ? and status <> 'left'"
        return bool(self._replica.rows(found, (self._me.name,))[0][0])

    async def answer(self, question: bytes) -> bytes:
        """Answer a node that wants to join. It becomes a neighbour if it is of our region and nobody else has its name:
        two nodes of one name would each undo what the other publishes."""
        ask = _decode_ask(question)
        if holder := await self._holder(ask.member):
            _logger.error("catalog.name_taken", member=ask.member.name, holder=holder, asks=ask.member.host)
            return _encode(JoinAnswer(self._me.region, (), holder))
        mine = self._membership.swim.members
        names = sorted(name for name in mine if mine[name].status.live and name != self._me.name)
        some = self._rng.sample(names, min(len(names), INTRODUCED_MOST))
        answer = JoinAnswer(self._me.region, tuple(mine[name] for name in (self._me.name, *some)))
        if ask.region == self._me.region:
            self._introduce([View(ask.member, Status.alive, ask.incarnation)])
        return _encode(answer)

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _holder(self, member: Member) -> str:
        """Where another node answers to this member's name; "" where none does."""
        known = self._replica.rows("select host, port from workers where name = ? order by host, port", (member.name,))
        if view := self._membership.swim.members.get(member.name):
            known = [*known, view.member.address]
        for host, port in dict.fromkeys(known):
            if (host, port) != member.address and await self._answers_as(member, (host, port)):
                return f"{host}:{port}"
        return ""

    async def _answers_as(self, member: Member, address: Address) -> bool:
        """Whether a node with this member's name, and another address, answers there."""
        if address == self._me.address:
            return self._me.name == member.name
        me = self._membership.swim.members[self._me.name]
        try:
            ask = JoinAsk(self._me.region, me.member, me.incarnation)
            answer = await self._exchange.ask(address, Join, ask, HOLDER_S)
        except PeerUnreachable:
            return False  # it moved, or ended
        there = answer.members[0].member if answer.members else None
        return there is not None and there.name == member.name and there.address != member.address

    def _needed(self) -> bool:
        return not self.joined.is_set() or not self._membership.live()

    async def _join_anyone(self) -> bool:
        """Join by anyone. Returns whether somebody answered, or there is nobody to ask."""
        seeds = self._seeds()
        answered = await self._join_some(seeds)
        if answered and not self._membership.live():
            await self._join_some([address for _, address in self._contacts()[:CONTACTS_MOST]])
        if answered:
            self.joined.set()
        return answered or not seeds

    async def _join_some(self, addresses: Sequence[Address]) -> bool:
        """Ask a few at once, until we have a neighbour, and return whether anybody answered. One alone might be a node
        that has just started, as we have, and knows nobody to introduce us to."""
        answered = False
        for start in range(0, len(addresses), TRIED_AT_ONCE):
            some = addresses[start : start + TRIED_AT_ONCE]
            answered |= any(await asyncio.gather(*(self._join(address) for address in some)))
            if answered and self._membership.live():
                break
        return answered

    def _seeds(self) -> list[Address]:
        """The configured addresses, then the members of the last time, in random order."""
        remembered = self._replica.rows(
            "select host, port from members where name <> ? order by name", (self._me.name,)
        )
        known = [(host, port) for host, port in remembered]
        self._rng.shuffle(known)
        seeds = [address for address in dict.fromkeys((*self._configured, *known)) if address != self._me.address]
        return seeds[: max(SEEDS_MOST, len(self._configured))]

    def _contacts(self) -> list[tuple[str, Address]]:
        """The workers of our region that are no live members, in random order."""
        live = {member.name for member in self._membership.live()} | {self._me.name}
        found = self._replica.rows(
            "select name, host, port from workers where region = ? order by name", (self._me.region,)
        )
        contacts = [(name, (host, port)) for name, host, port in found if name not in live]
        self._rng.shuffle(contacts)
        return contacts

    def _hint(self, tables: tuple[str, ...]) -> None:
        if "workers" in tables:
            self._directory_changed.set()

    async def _find_missing(self) -> None:
        hinted, self._hinted = list(self._hinted), {}
        contacts = [address for _, address in self._contacts()]
        some = list(dict.fromkeys((*hinted, *contacts)))[:TRIED_AT_ONCE]
        now = asyncio.get_running_loop().time()
        self._followed = {address: at for address, at in self._followed.items() if now < at + HINT_S}
        self._followed |= dict.fromkeys((address for address in some if address in hinted), now)
        await asyncio.gather(*(self._join(address) for address in some))

    async def _join(self, address: Address) -> bool:
        me = self._membership.swim.members[self._me.name]
        ask = JoinAsk(self._me.region, me.member, me.incarnation)
        try:
            answer = await self._exchange.ask(address, Join, ask)
            if answer.holder:
                self._taken(answer.holder)
                return False
            self.holder = ""
            same = answer.region == self._me.region
            if same:
                self._introduce(answer.members)
            for tier in TIERS if same else ("global",):
                await self._replication.catch_up(address, tier, home=same)
            if same and len(answer.members) > 2:  # it knows more than itself and us: not one that has just started, too
                self.joined.set()
        except (PeerUnreachable, StoreError) as error:
            # 401, 403: another cluster's token or key. Whoever starts the agent should see that. Later on it is a
            # worker that is away, tried again every few seconds.
            log = _logger.info if self.joined.is_set() else _logger.warning
            log("catalog.join_failed", error=error.message, cause="join")
            return False
        return True

    def _taken(self, holder: str) -> None:
        self.holder = holder
        if self.joined.is_set():  # since then; before, whoever waits for `joined` tells
            _logger.error("catalog.name_taken", member=self._me.name, holder=holder, cause="join")

    def _introduce(self, views: list[View] | tuple[View, ...]) -> None:
        self._membership.introduce(views)


_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(JoinAsk).decode
_logger = get_logger()

"""The packets that a member sends, each filled up with rumours, and whom they go to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hawker.core.swim import wire
from hawker.core.swim.actions import Action, PushPull, Send
from hawker.core.swim.beliefs import Beliefs
from hawker.core.swim.members import Member, Status
from hawker.core.swim.settings import Settings

if TYPE_CHECKING:
    from random import Random


ACTIONS_MAX = 16_384
"""A shell that does not drain its actions loses packets beyond this, as in a bad network, but no memory."""


class Telling:
    """Adds packets to `actions`. `note` goes with every ping and ack."""

    def __init__(
        self, beliefs: Beliefs, settings: Settings, rng: Random, actions: list[Action], payload_max: int
    ) -> None:
        self.note = b""
        self._beliefs = beliefs
        self._settings = settings
        self._rng = rng
        self._actions = actions
        self._payload_max = payload_max
        self._limit = (0, 0)  # how many members, how often each rumour is sent

    def gossip(self, now: float) -> None:
        targets = self.some_members(self._settings.gossip_fanout, dead_at=now)
        for member in targets:
            if self._beliefs.rumours:
                self.send(wire.GOSSIP, member.address, "", 0, ())

    def push_pull(self, now: float) -> None:
        """Exchange tables with a live member, or now and then with a dead one, in case it was only cut off."""
        graves = self._beliefs.graves()
        if graves and self._rng.random() * (self._beliefs.table.live + len(graves)) < len(graves):
            view = self._beliefs.table.get(graves[int(self._rng.random() * len(graves))].name)
            if view is not None and view.status is Status.dead:
                self._actions.append(PushPull(view.member))
                return
        for member in self.some_members(1):
            self._actions.append(PushPull(member))

    def some_members(self, count: int, but: str = "", dead_at: float | None = None) -> list[Member]:
        """Live members at random, never this one; with `dead_at` also those that died recently."""
        table, me = self._beliefs.table, self._beliefs.me.name
        found: dict[str, Member] = {}
        for name in self._beliefs.order.some(self._rng, 12 + 4 * count):
            if len(found) == count:
                break
            view = table.get(name)
            if view is None or name in (me, but):
                continue
            if view.status.live or (dead_at is not None and self._beliefs.recently_dead(dead_at, view)):
                found[name] = view.member
        return list(found.values())

    def send(self, kind: int, to: tuple[str, int], name: str, born: int, fields: tuple[int | str, ...]) -> None:
        """Send a packet to an address, filled up with rumours. (name, born) is the member there, if it is known."""
        if len(self._actions) >= ACTIONS_MAX:
            return
        me = self._beliefs.me
        note = self.note if kind in (wire.PING, wire.ACK) else b""
        told: list[msgspec.Raw] = []
        first = self._first_for(name, born) if name and self._settings.lifeguard else None
        rumours = self._beliefs.rumours
        if rumours or first:
            room = self._payload_max - len(wire.encode((kind, me.name, me.born, note, told, *fields))) - 2
            if first and len(first) <= room:
                told.append(msgspec.Raw(first))
                room -= len(first)
            told += rumours.take(room, wire.RUMOURS_MAX - len(told), self._retransmits())
        self._actions.append(Send(to, wire.encode((kind, me.name, me.born, note, told, *fields))))

    def _first_for(self, name: str, born: int) -> bytes | None:
        """Tell a member first that it is not believed alive, so that it can refute that at once (Lifeguard's buddy
        rule, for the dead, too). Tell an older life of the later one."""
        view = self._beliefs.table.get(name)
        if view is None or (view.status is Status.alive and view.member.born <= born):
            return None
        if view.status.live and view.member.born > born:
            return wire.alive(view.member, view.incarnation)
        return wire.accusation(view, self._beliefs.me.name)

    def _retransmits(self) -> int:
        live = self._beliefs.table.live
        if self._limit[0] != live:
            self._limit = (live, self._settings.retransmits(live))
        return self._limit[1]

"""SWIM (Das, Gupta, Motivala, DSN 2002) with all of Lifeguard (arXiv 1707.00788), without I/O or a clock.

Each period one member is probed: pinged; after the timeout also through helpers and over a stream; suspected at the
end of the period. What is believed (`beliefs`) spreads on every packet, by a gossip tick of its own, and by push-pull
of whole tables.

The shell calls in with the time in seconds, drains `take` after each call, and calls `tick` at `due`. No call raises
for what comes from outside, but for the bodies of a push-pull: those raise ValueError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from hawker.core.swim import exchange, wire
from hawker.core.swim.actions import Action, Noted, StreamProbe
from hawker.core.swim.beliefs import INF, Beliefs
from hawker.core.swim.members import Known, Member, Status, View
from hawker.core.swim.settings import Settings
from hawker.core.swim.telling import Telling

if TYPE_CHECKING:
    from random import Random

RELAYS_MAX = 4_096
NACK_AFTER = 0.8
"""A helper sends a nack when it has no ack by this share of the timeout."""
SETTLED_S = 2.0
"""A packet of an older life may be late for this long; after that it shows that both lives run."""
SILENCE_PERIODS = 2.0
"""A member hears on average one ping and one ack a period. If it hears none for so long, it is cut off or has no
peers."""


class Probe(msgspec.Struct):
    """The probe of this period. `asked`: whether helpers were asked. `nacks`: the helpers that said that they are
    well."""

    member: Member
    incarnation: int
    number: int
    end: float
    acked: bool = False
    asked: bool = False
    helpers: int = 0
    nacks: list[str] = msgspec.field(default_factory=list)


class Relay(msgspec.Struct, frozen=True):
    """A probe that another member asked for, and where its ack goes."""

    to: tuple[str, int]
    number: int


class Counts(msgspec.Struct):
    """Counts of what was ignored: packets and rumours of no known form, packets meant for another or echoed, requests
    above the limit of probes for others."""

    malformed: int = 0
    strange: int = 0
    misdirected: int = 0
    overload: int = 0


class Swim:
    """One member. `known`: a table shared by a simulation's members. `rules`: the beliefs' class."""

    def __init__(
        self,
        me: Member,
        settings: Settings,
        rng: Random,
        *,
        payload_max: int = wire.PAYLOAD_MAX,
        known: Known | None = None,
        rules: type[Beliefs] = Beliefs,
    ) -> None:
        wire.check_member(me)
        self.settings = settings
        self.counts = Counts()
        self.health = 0
        self._rng = rng
        self._actions: list[Action] = []
        self.beliefs = rules(me, settings, known or Known(), self._actions)
        self._telling = Telling(self.beliefs, settings, rng, self._actions, payload_max)
        self._refuted = 0
        self._number = rng.getrandbits(32)
        self._probe: Probe | None = None
        self._probe_at = self._gossip_at = self._push_pull_at = INF
        self._gossip_phase = self._heard_at = 0.0
        self._relays: dict[int, Relay] = {}
        self._nacks_due: deque[tuple[float, int]] = deque()
        self._relays_end: deque[tuple[float, int]] = deque()

    @property
    def me(self) -> Member:
        """The identity that others should know. Its `born` may be later than the one given."""
        return self.beliefs.me

    @property
    def members(self) -> Mapping[str, View]:
        """All members that are known, this one and the dead included."""
        return self.beliefs.table

    @property
    def farewell_told(self) -> bool:
        """Whether, after `leave`, the farewell was sent as often as any rumour is."""
        return self.beliefs.leaving and self.me.name not in self.beliefs.rumours

    # Calls of the shell

    def start(self, now: float) -> None:
        settings, rng = self.settings, self._rng
        self._heard_at = now
        self._probe_at = now + rng.random() * settings.probe_interval
        self._push_pull_at = now + rng.random() * settings.push_pull_interval
        self._gossip_phase = now + rng.random() * settings.gossip_interval

    def join(self, now: float, members: Sequence[tuple[Member, int, Status]]) -> None:
        """Take members learned from a seed, with incarnation and status, and announce this member to all."""
        self.beliefs.merge(
            now, self.me.name, [wire.Entry(m, status, incarnation) for m, incarnation, status in members]
        )
        self.beliefs.announce(now, self.beliefs.incarnation)
        self._settle(now)

    def update(self, now: float, *, roles: tuple[str, ...] | None = None, meta: str | None = None) -> None:
        """Announce other particulars of this member to all."""
        me = self.me
        me = replace(me, roles=me.roles if roles is None else roles, meta=me.meta if meta is None else meta)
        wire.check_member(me)
        self.beliefs.me = me
        self.beliefs.announce(now, self.beliefs.incarnation + 1)
        self._settle(now)

    def leave(self, now: float) -> None:
        """Stop probing and tell everybody. Keep calling `tick` until `farewell_told`, or for a second or two."""
        self.beliefs.leave(now)
        self._probe, self._probe_at, self._push_pull_at = None, INF, INF
        self._telling.gossip(now)
        self._settle(now)

    def set_note(self, note: bytes) -> None:
        """Set the note of at most 40 bytes that pings and acks carry from now on."""
        if len(note) > wire.NOTE_MAX:
            raise ValueError(f"a note of {len(note)} bytes: at most {wire.NOTE_MAX} fit")
        self._telling.note = note

    def take(self) -> list[Action]:
        """Take the actions that the shell must perform, in order."""
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def due(self) -> float:
        """The time at which `tick` must be called next."""
        due = min(self._probe_at, self._gossip_at, self._push_pull_at, self.beliefs.next_deadline())
        if self._nacks_due:
            due = min(due, self._nacks_due[0][0])
        if self._relays_end:
            due = min(due, self._relays_end[0][0])
        return due

    def tick(self, now: float) -> None:
        self._notice_pause(now)
        if now >= self._probe_at:
            self._advance_probe(now)
        self.beliefs.expire(now)
        if now >= self._gossip_at:
            self._telling.gossip(now)
            self._gossip_at = INF
        if now >= self._push_pull_at:
            self._push_pull_at = now + self.settings.push_pull_interval
            self._telling.push_pull(now)
        if self._nacks_due or self._relays_end:
            self._advance_relays(now)
        self._settle(now)

    def on_packet(self, now: float, source: tuple[str, int], payload: bytes) -> None:
        try:
            packet, strange = wire.decode_packet(payload)
        except (ValueError, RecursionError):
            self.counts.malformed += 1
            return
        self.counts.strange += strange
        self._notice_pause(now)
        self._notice_silence(now)
        if not self._hear(now, source, packet):
            return
        if isinstance(packet, wire.Ping):
            self._on_ping(source, packet)
        elif isinstance(packet, wire.Ack):
            self._on_ack(packet.number)
        elif isinstance(packet, wire.PingFor):
            self._on_ping_for(now, source, packet)
        elif isinstance(packet, wire.Nack):
            self._on_nack(packet)
        self._settle(now)

    def on_stream_probe(self, now: float, probe_id: int, ok: bool) -> None:
        """Report how a `StreamProbe` ended. A failure, or a result that comes too late, changes nothing."""
        if ok:
            self._on_ack(probe_id)

    # Push-pull: see `exchange`

    def push_pull_ask(self, now: float) -> bytes:
        return exchange.ask(self.beliefs)

    def push_pull_answer(self, now: float, ask: bytes) -> bytes:
        """Raises ValueError when `ask` is no ask."""
        answer = exchange.answer(self.beliefs, now, ask)
        self._settle(now)
        return answer

    def push_pull_done(self, now: float, answer: bytes) -> bytes | None:
        """The next request to the same member, or None if the exchange is over. Raises ValueError for a malformed
        `answer`."""
        further = exchange.done(self.beliefs, now, answer)
        self._settle(now)
        return further

    # Probing

    def _advance_probe(self, now: float) -> None:
        probe = self._probe
        if probe is not None and not probe.acked:
            if not probe.asked and now < probe.end:
                self._ask_helpers(probe)
                self._probe_at = probe.end
                return
            self._missed(now, probe)
        self._begin_probe(now)

    def _begin_probe(self, now: float) -> None:
        settings = self.settings
        stretch = 1 + self.health
        view = self._next_target(now)
        self._probe_at = end = now + settings.probe_interval * stretch
        self._probe = None
        if view is None:
            return
        self._probe = Probe(view.member, view.incarnation, self._next_number(), end)
        self._probe_at = min(end, now + settings.probe_timeout * stretch)
        name = view.member.name
        self._telling.send(wire.PING, view.member.address, name, view.member.born, (self._probe.number, name))

    def _next_target(self, now: float) -> View | None:
        """The next live member of the round, or of a new round."""
        beliefs = self.beliefs
        for _ in range(2):
            while (name := beliefs.order.draw(self._rng)) is not None:
                view = beliefs.table.get(name)
                if view is not None and view.status.live and name != self.me.name:
                    return view
            beliefs.begin_round(now)
        return None

    def _ask_helpers(self, probe: Probe) -> None:
        probe.asked = True
        member = probe.member
        fields = (probe.number, member.name, member.host, member.port)
        helpers = self._telling.some_members(self.settings.helpers, but=member.name)
        for helper in helpers:
            self._telling.send(wire.PING_FOR, helper.address, helper.name, helper.born, fields)
        if self.settings.lifeguard:
            probe.helpers = len(helpers)
            self._actions.append(StreamProbe(member, probe.number, probe.end))

    def _next_number(self) -> int:
        self._number = (self._number + 1) % 2**32
        return self._number

    def _missed(self, now: float, probe: Probe) -> None:
        """Nobody heard of the member. If helpers did not even send a nack, the fault may be this member's own."""
        if self.settings.lifeguard:
            self._worsen(max(0, probe.helpers - len(probe.nacks)) if probe.helpers else 1)
        member = probe.member
        self.beliefs.suspect(now, member.name, member.born, probe.incarnation, self.me.name)

    def _worsen(self, by: int) -> None:
        self.health = max(0, min(self.settings.health_max, self.health + by))

    def _on_ack(self, number: int) -> None:
        probe = self._probe
        if probe is not None and probe.number == number and not probe.acked:
            probe.acked = True
            self._probe_at = probe.end
            self._worsen(-1)
        relay = self._relays.pop(number, None)
        if relay is not None:
            self._telling.send(wire.ACK, relay.to, "", 0, (relay.number,))

    def _on_nack(self, packet: wire.Nack) -> None:
        probe = self._probe
        if probe is not None and probe.number == packet.number and packet.sender not in probe.nacks:
            probe.nacks.append(packet.sender)

    def _on_ping(self, source: tuple[str, int], packet: wire.Ping) -> None:
        if packet.target != self.me.name:
            self.counts.misdirected += 1
            return
        self._telling.send(wire.ACK, source, packet.sender, packet.born, (packet.number,))

    def _on_ping_for(self, now: float, source: tuple[str, int], packet: wire.PingFor) -> None:
        if len(self._relays) >= RELAYS_MAX:
            self.counts.overload += 1
            return
        number = self._next_number()
        self._relays[number] = Relay(source, packet.number)
        self._nacks_due.append((now + NACK_AFTER * self.settings.probe_timeout, number))
        name = packet.target
        view = self.beliefs.table.get(name)
        born = view.member.born if view else 0
        self._telling.send(wire.PING, (packet.host, packet.port), name, born, (number, name))

    def _advance_relays(self, now: float) -> None:
        """Send the nacks that are due. An ack that comes after its nack is still passed on for one more period."""
        while self._nacks_due and self._nacks_due[0][0] <= now:
            number = self._nacks_due.popleft()[1]
            relay = self._relays.get(number)
            if relay is not None:
                self._relays_end.append((now + self.settings.probe_interval, number))
                if self.settings.lifeguard:
                    self._telling.send(wire.NACK, relay.to, "", 0, (relay.number,))
        while self._relays_end and self._relays_end[0][0] <= now:
            self._relays.pop(self._relays_end.popleft()[1], None)

    def _notice_pause(self, now: float) -> None:
        """If a probe is long overdue, this process stood still, and what it did not hear meanwhile means nothing."""
        if not self.settings.lifeguard or now - self._probe_at <= self.settings.probe_timeout:
            return
        self.beliefs.postpone(now, now - self._probe_at, silence=False)
        self._worsen(1)
        self._probe = None
        self._probe_at = now

    def _notice_silence(self, now: float) -> None:
        """If this member heard nothing for a while, others probably did not hear it either: it repeats its suspicions
        and gives the suspects more time."""
        silence = now - self._heard_at
        self._heard_at = now
        if silence > SILENCE_PERIODS * self.settings.probe_interval and self.settings.lifeguard:
            self.beliefs.postpone(now, silence, silence=True)
            self.beliefs.repeat_suspicions()

    # Listening

    def _hear(self, now: float, source: tuple[str, int], packet: wire.Packet) -> bool:
        """Take what every packet tells. False if the packet is this member's own, echoed."""
        beliefs = self.beliefs
        if packet.sender == beliefs.me.name and packet.born == beliefs.me.born:
            self.counts.misdirected += 1
            return False
        view = beliefs.table.get(packet.sender)
        if view is not None and view.member.born != packet.born:
            self._check_holder(now, source, packet, view)
        elif packet.note and view is not None and view.status.live:
            self._actions.append(Noted(packet.sender, packet.note))
        beliefs.hear(now, packet.rumours)
        return True

    def _check_holder(self, now: float, source: tuple[str, int], packet: wire.Packet, view: View) -> None:
        """Report a conflict if an older life still sends packets from elsewhere: two members hold the name."""
        older = packet.born < view.member.born
        if older and view.status.live and now - view.since > SETTLED_S and source != view.member.address:
            self.beliefs.conflict(view.member, replace(view.member, born=packet.born, host=source[0], port=source[1]))

    def _settle(self, now: float) -> None:
        """Finish every call: schedule gossip for new rumours, and count refutations against this member's health."""
        beliefs = self.beliefs
        if self._gossip_at == INF and beliefs.rumours:
            interval = self.settings.gossip_interval
            ticks = int((now - self._gossip_phase) / interval) + 1
            self._gossip_at = max(self._gossip_phase + ticks * interval, now + 1e-6)
        if beliefs.refuted != self._refuted:
            if self.settings.lifeguard:
                self._worsen(beliefs.refuted - self._refuted)
            self._refuted = beliefs.refuted

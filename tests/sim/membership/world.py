"""Many members on a bare event heap: the core of `hawker.core.swim`, a lossy network, crashes, stalls; no asyncio.

One seed gives one run. A member is its place in a list. Its packets take 1 to 5 ms or are lost; its streams (probes and
push-pulls) reach whoever runs and is not cut off, later where packets are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

import msgspec
from tests.sim.membership.watch import Watch

from hawker.core.swim import (
    LAN,
    Action,
    Changed,
    Known,
    Member,
    PushPull,
    Send,
    Settings,
    Status,
    StreamProbe,
    Swim,
    View,
)
from hawker.core.swim.beliefs import Beliefs

INF = float("inf")
WAKE, PACKET, ASK, ANSWER, STREAM, FAULT = range(6)
BORN = 1_700_000_000_000
RESEND_S = 0.2
"""A stream waits so long for each of its segments that is lost."""
HELD_MAX = 4_096
"""A socket's buffer is not larger."""
HEADERS = 200
"""Bytes of an HTTP exchange besides its bodies."""


class Plan(msgspec.Struct, frozen=True):
    """What world to make. `streams`: whether stream probes are answered. `watched`: check the invariants, as far as
    they can be checked after every event."""

    members: int
    seed: int = 0
    settings: Settings = LAN
    loss: float = 0.0
    duplicates: float = 0.0
    streams: bool = True
    watched: bool = True
    delay: tuple[float, float] = (0.001, 0.005)


class Death(msgspec.Struct):
    """A crash, and who knows of it since when."""

    at: float
    first: float = INF
    all: float = INF
    known_by: int = 0


class Tally(msgspec.Struct):
    """What happened. `false_deaths`: times a healthy member was held dead by a healthy member that held it alive."""

    packets: int = 0
    packet_bytes: int = 0
    lost: int = 0
    duplicated: int = 0
    streams: int = 0
    stream_bytes: int = 0
    events: int = 0
    false_deaths: int = 0
    suspicions: int = 0
    refutations: int = 0
    victims: dict[int, None] = msgspec.field(default_factory=dict)


class World:
    """Members that all know each other, unless `strangers`. Faults are ordinary calls, at a time given to `at`."""

    def __init__(self, plan: Plan, *, rules: type[Beliefs] = Beliefs, strangers: bool = False) -> None:
        self.plan = plan
        self.now = 0.0
        self.rng = Random(f"{plan.seed}/network")
        self.rules = rules
        self.members = [
            Member(f"m{n}", BORN, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 7946, region="sim")
            for n in range(plan.members)
        ]
        known = Known() if strangers else Known(View(member, Status.alive, 0) for member in self.members)
        self.known = known
        self.place = {member.address: n for n, member in enumerate(self.members)}
        self.nodes = [self._make(member, known) for member in self.members]
        self.up = [True] * plan.members
        self.running = plan.members
        self.healthy = [True] * plan.members
        self.cut = [False] * plan.members
        self.frozen = [False] * plan.members
        self.held: list[deque[tuple[int, int, bytes]] | None] = [None] * plan.members
        self.unsent: list[deque[Send]] = [deque(maxlen=HELD_MAX) for _ in range(plan.members)]
        self.loss = plan.loss
        self.side = [0] * plan.members
        self.one_way = False
        self.tally = Tally()
        self.deaths: dict[int, Death] = {}
        self.log: list[tuple[float, int, Changed]] = []
        self.watch = Watch(self.nodes) if plan.watched else None
        self._heap: list[tuple[float, int, int, int, int, bytes | Callable[[], None]]] = []
        self._count = 0
        self._wakes = [INF] * plan.members
        for n, node in enumerate(self.nodes):
            node.start(0.0)
            self._wake(n, node)

    def _make(self, member: Member, known: Known | None = None) -> Swim:
        rng = Random(f"{self.plan.seed}/{member.name}/{member.born}")
        return Swim(member, self.plan.settings, rng, known=known, rules=self.rules)

    # Faults

    def at(self, time: float, fault: Callable[[], None]) -> None:
        self._push(time, FAULT, 0, 0, fault)

    def crash(self, n: int) -> None:
        self._stop(n)
        self.held[n], self.frozen[n] = None, False
        self.unsent[n].clear()
        self.deaths[n] = Death(self.now)

    def restart(self, n: int, *seeds: int) -> None:
        """A new life at the same address, which knows only these."""
        self.members[n] = msgspec.structs.replace(self.members[n], born=BORN + int(self.now * 1000))
        self.up[n] = True
        self.running += 1
        self.deaths.pop(n, None)
        node = self.nodes[n] = self._make(self.members[n])
        if self.watch:
            self.watch.restarted(n)
        node.start(self.now)
        node.join(self.now, [(self.members[seed], 0, Status.alive) for seed in seeds])
        self._act(n, node)

    def join(self, n: int, *seeds: int) -> None:
        self.nodes[n].join(self.now, [(self.members[seed], 0, Status.alive) for seed in seeds])
        self._act(n, self.nodes[n])

    def leave(self, n: int, stays_s: float = 2.0) -> None:
        self.nodes[n].leave(self.now)
        self._act(n, self.nodes[n])
        self.at(self.now + stays_s, lambda: self._stop(n))

    def _stop(self, n: int) -> None:
        self.running -= self.up[n]
        self.up[n] = False

    def cut_off(self, n: int, cut: bool) -> None:
        """Its messages are lost, either way; its timers run."""
        self.cut[n] = cut

    def pause(self, n: int, paused: bool) -> None:
        """The process stands still. On resuming it first gets what came meanwhile, then its overdue timers run."""
        self.frozen[n] = paused
        self.block(n, paused)
        if not paused and self.up[n]:
            self._tick(n)

    def block(self, n: int, blocked: bool) -> None:
        """Its messages wait, either way, until this ends; its timers run. (The fault of the Lifeguard paper.)"""
        if blocked:
            self.held[n] = deque(maxlen=HELD_MAX)
            return
        held, self.held[n] = self.held[n], None
        unsent = self.unsent[n]
        while unsent:
            self._send(n, unsent.popleft())
        for kind, source, payload in held or ():
            self._receive(kind, n, source, payload)

    def part(self, side: Sequence[int], *, one_way: bool = False) -> None:
        """Members of different sides do not hear each other; with `one_way` the higher side still reaches the lower."""
        self.side = list(side)
        self.one_way = one_way

    def heal(self) -> None:
        """Of parts and of loss."""
        self.side = [0] * len(self.nodes)
        self.loss = 0.0

    def reaches(self, source: int, target: int) -> bool:
        if self.cut[source] or self.cut[target]:
            return False
        here, there = self.side[source], self.side[target]
        return here == there or (self.one_way and here > there)

    # Running

    def run(self, until: float) -> None:
        heap, tally = self._heap, self.tally
        while heap and heap[0][0] <= until:
            self.now, _, kind, n, source, payload = heappop(heap)
            tally.events += 1
            if kind == FAULT:
                payload()  # type: ignore[operator]
            elif kind == WAKE:
                if self._wakes[n] == self.now:
                    self._wakes[n] = INF
                    if self.up[n] and not self.frozen[n]:
                        self._tick(n)
            elif self.held[n] is not None:
                self.held[n].append((kind, source, payload))  # type: ignore[union-attr, arg-type]
            else:
                self._receive(kind, n, source, payload)  # type: ignore[arg-type]
        self.now = until

    def _tick(self, n: int) -> None:
        node = self.nodes[n]
        if node.due() <= self.now:
            node.tick(self.now)
            self._act(n, node)
        else:
            self._wake(n, node)

    def _receive(self, kind: int, n: int, source: int, payload: bytes) -> None:
        """What arrives is lost on a member that is down or cut off by now."""
        if not self.up[n] or not self.reaches(source, n):
            self.tally.lost += 1
            return
        node = self.nodes[n]
        if kind == PACKET:
            node.on_packet(self.now, self.members[source].address, payload)
        elif kind == STREAM:
            node.on_stream_probe(self.now, int.from_bytes(payload, "big"), True)
        elif kind == ASK:
            self._stream(n, source, ANSWER, node.push_pull_answer(self.now, payload))
        else:
            further = node.push_pull_done(self.now, payload)
            if further is not None:
                self._stream(n, source, ASK, further)
        self._act(n, node)

    def _act(self, n: int, node: Swim) -> None:
        for action in node.take():
            if type(action) is Send:
                self.tally.packets += 1
                self.tally.packet_bytes += len(action.payload)
                if self.held[n] is None:
                    self._send(n, action)
                else:
                    self.unsent[n].append(action)
            else:
                self._do(n, action)
        if self.watch:
            self.watch.after(n)
        self._wake(n, node)

    def _send(self, n: int, packet: Send) -> None:
        plan, random, loss = self.plan, self.rng.random, self.loss
        low, high = plan.delay
        target = self.place[packet.to]
        if random() < loss or not self.reaches(n, target):
            self.tally.lost += 1
            return
        self._push(self.now + low + random() * (high - low), PACKET, target, n, packet.payload)
        if plan.duplicates and random() < plan.duplicates:
            self.tally.duplicated += 1
            self._push(self.now + 2 * high * random(), PACKET, target, n, packet.payload)

    def _do(self, n: int, action: Action) -> None:
        if isinstance(action, Changed):
            self._changed(n, action)
        elif isinstance(action, PushPull):
            self._stream(n, self.place[action.member.address], ASK, self.nodes[n].push_pull_ask(self.now))
        elif isinstance(action, StreamProbe):
            target = self.place[action.member.address]
            if self.plan.streams and self.up[target] and self.held[target] is None and self.reaches(n, target):
                self._stream(target, n, STREAM, action.probe_id.to_bytes(4, "big"))

    def _stream(self, n: int, target: int, kind: int, body: bytes) -> None:
        """Lost segments are sent again, so a stream is late and not lost, unless somebody is cut off."""
        self.tally.streams += 1
        self.tally.stream_bytes += len(body) + HEADERS
        if not self.reaches(n, target) or self.held[n] is not None:
            return
        delay = 3 * self.rng.uniform(*self.plan.delay)
        while self.rng.random() < self.loss:
            delay += RESEND_S
        self._push(self.now + delay, kind, target, n, body)

    def _changed(self, n: int, changed: Changed) -> None:
        subject = int(changed.name[1:])
        if self.watch:
            self.watch.believed(n, changed.name)
            self.log.append((self.now, n, changed))
        if changed.after is Status.suspect:
            self.tally.suspicions += 1
        elif changed.before is Status.suspect and changed.after is Status.alive:
            self.tally.refutations += 1
        if changed.after is not Status.dead or changed.member.born != self.members[subject].born:
            return
        if self.up[subject]:
            if self.healthy[subject] and self.healthy[n]:
                self.tally.false_deaths += 1
                self.tally.victims[subject] = None
            return
        death = self.deaths.get(subject)
        if death is not None:
            death.first = min(death.first, self.now)
            death.known_by += 1
            if death.known_by >= self.running:
                death.all = min(death.all, self.now)

    def _wake(self, n: int, node: Swim) -> None:
        due = node.due()
        if due < self._wakes[n]:
            self._wakes[n] = due = max(due, self.now)
            self._push(due, WAKE, n, 0, b"")

    def _push(self, time: float, kind: int, n: int, source: int, payload: bytes | Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, kind, n, source, payload))

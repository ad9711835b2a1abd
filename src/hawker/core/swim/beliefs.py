"""The rules of belief: which word about a member counts, what is passed on, when a suspect is dead.

Within one life (name, born), a higher incarnation beats a lower one; at the same incarnation, dead beats suspect and
suspect beats alive. Only the subject itself raises its incarnation, to refute. `left` is final for a life, and a later
life beats an earlier one, whatever was said of that. Each new belief becomes a rumour to pass on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec
from msgspec.structs import replace

from hawker.core.swim import wire
from hawker.core.swim.actions import Action, Changed, Conflict
from hawker.core.swim.members import INCARNATION_MAX, Known, Member, Order, Status, Table, View, bucket_of
from hawker.core.swim.rumours import Rumours
from hawker.core.swim.settings import Settings

INF = float("inf")
DEAD_MAX = 16_384
"""If more dead members are known, the oldest are forgotten before their time."""
CONFLICTS_MAX = 256


class Suspicion(msgspec.Struct):
    """A suspicion, which ends in death at `deadline` unless it is refuted. Independent accusers bring the deadline
    forward."""

    began: float
    members: int
    wanted: int
    accusers: list[str]
    deadline: float = INF
    silence: float = 0.0


class Grave(msgspec.Struct, frozen=True):
    at: float
    name: str
    born: int


class Beliefs:
    """What one member believes of all members. Adds changes to `actions`; `refuted` counts answers to accusations."""

    def __init__(self, me: Member, settings: Settings, known: Known, actions: list[Action]) -> None:
        self.me = me
        self.settings = settings
        self.table = Table(known)
        self.order = Order(known.names)
        self.rumours = Rumours()
        self.incarnation = 0
        self.leaving = False
        self.refuted = 0
        self.refused = 0
        self.actions = actions
        self._suspicions: dict[str, Suspicion] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; what no longer matches a suspicion is skipped
        self._graves: deque[Grave] = deque()
        self._absent: dict[str, None] = {}  # in the table, but not in this round's order
        self._reported: dict[Member, None] = {}
        if self.table.get(me.name) is None:
            self.table.put(View(me, Status.alive, 0))

    # What is said of others

    def alive(self, now: float, member: Member, incarnation: int) -> None:
        view = self.table.get(member.name)
        if member.name == self.me.name:
            self._called_alive(now, member, incarnation)
            return
        if view is not None:
            if member.born < view.member.born:
                return
            if member.born == view.member.born:
                if incarnation <= view.incarnation or view.status is Status.left:
                    if view.status.live and member.address != view.member.address:
                        self.conflict(view.member, member)
                    return
                if member.address != view.member.address:
                    self.conflict(view.member, member)
                    return
        encoded = wire.alive(member, incarnation)
        if len(encoded) > wire.RUMOUR_BYTES_MAX or (view is None and len(self.table) >= self.settings.members_max):
            self.refused += 1
            return
        if view is None:
            self.order.add(member.name)
        elif member.name in self._absent:
            del self._absent[member.name]
            self.order.add(member.name)
        self._believe(now, member, Status.alive, incarnation)
        self.rumours.put(member.name, encoded)

    def suspect(self, now: float, name: str, born: int, incarnation: int, accuser: str) -> None:
        if name == self.me.name:
            self._accused(now, born, incarnation)
            return
        view = self.table.get(name)
        if view is None or born != view.member.born or incarnation < view.incarnation or not view.status.live:
            return
        suspicion = self._suspicions.get(name)
        if suspicion is None or incarnation > view.incarnation:
            view = self._believe(now, view.member, Status.suspect, incarnation)
            members = self.table.live
            suspicion = Suspicion(now, members, self.settings.confirmations(members), [accuser])
            self._suspicions[name] = suspicion
        elif not self._confirms(suspicion, accuser):
            return
        self._time(name, suspicion)
        self.rumours.put(name, wire.accusation(view, accuser))

    def dead(self, now: float, name: str, born: int, incarnation: int, accuser: str) -> None:
        if name == self.me.name:
            self._called_dead(now, born, incarnation, accuser)
            return
        view = self.table.get(name)
        if view is None or born != view.member.born or view.status is Status.left:
            return
        status = Status.left if accuser == name else Status.dead
        if status is Status.dead and (incarnation, status) <= (view.incarnation, view.status):
            return
        incarnation = max(incarnation, view.incarnation)
        self._bury(now, self._believe(now, view.member, status, incarnation), accuser)

    def merge(self, now: float, sender: str, entries: Sequence[wire.Entry]) -> None:
        """Take what a push-pull or a seed says of members. Those that others hold dead are only suspect here, because
        they may be able to answer."""
        for entry in entries:
            member, status = entry.member, entry.status
            if status.live:
                self.alive(now, member, entry.incarnation)
            if status is Status.left:
                self.dead(now, member.name, member.born, entry.incarnation, member.name)
            elif status is not Status.alive:
                self.doubt(now, member, entry.incarnation, sender)

    def hear(self, now: float, rumours: Sequence[wire.Rumour]) -> None:
        for rumour in rumours:
            if isinstance(rumour, wire.Alive):
                self.alive(now, rumour.member, rumour.incarnation)
            elif isinstance(rumour, wire.Suspect):
                self.suspect(now, rumour.name, rumour.born, rumour.incarnation, rumour.accuser)
            else:
                self.dead(now, rumour.name, rumour.born, rumour.incarnation, rumour.accuser)

    def doubt(self, now: float, member: Member, incarnation: int, sender: str) -> None:
        """Suspect a member that `sender` holds suspect or dead."""
        self.suspect(now, member.name, member.born, incarnation, sender)

    def conflict(self, ours: Member, theirs: Member) -> None:
        """Report a conflict once for each other holder of the name."""
        if theirs in self._reported:
            return
        if len(self._reported) >= CONFLICTS_MAX:
            self._reported.clear()
        self._reported[theirs] = None
        self.actions.append(Conflict(ours, theirs))

    # What is said of me

    def _called_alive(self, now: float, member: Member, incarnation: int) -> None:
        me = self.me
        if self.leaving or member.born < me.born:
            return
        if member.address != me.address:
            self.conflict(me, member)
        elif member.born > me.born:  # this member's former life, whose clock was ahead
            self.renew(now, member.born)
        elif incarnation > self.incarnation or (incarnation == self.incarnation and member != me):
            self.announce(now, incarnation + 1)

    def _called_dead(self, now: float, born: int, incarnation: int, accuser: str) -> None:
        """Begin another life if one left, or ended although it began after this one: that cannot be refuted."""
        if not self.leaving and (born > self.me.born or (born == self.me.born and accuser == self.me.name)):
            self.renew(now, born)
        else:
            self._accused(now, born, incarnation)

    def _accused(self, now: float, born: int, incarnation: int) -> None:
        if self.leaving or born != self.me.born:
            return
        if incarnation >= self.incarnation:
            self.refute(now, incarnation)
        elif self.me.name not in self.rumours:  # the earlier answer did not reach everybody
            self.announce(now, self.incarnation)

    def refute(self, now: float, incarnation: int) -> None:
        self.refuted += 1
        self.announce(now, incarnation + 1)

    def announce(self, now: float, incarnation: int) -> None:
        """Announce this member's present state with this incarnation."""
        if incarnation > INCARNATION_MAX:
            self.renew(now, self.me.born)
            return
        self.incarnation = incarnation
        self._believe(now, self.me, Status.alive, incarnation)
        self.rumours.put(self.me.name, wire.alive(self.me, incarnation))

    def renew(self, now: float, born: int) -> None:
        """Begin a new life, later than `born`."""
        self.me = replace(self.me, born=born + 1)
        self.announce(now, 0)

    def leave(self, now: float) -> None:
        self.leaving = True
        view = self._believe(now, self.me, Status.left, self.incarnation)
        self.rumours.put(self.me.name, wire.accusation(view, self.me.name))

    # What time does

    def next_deadline(self) -> float:
        """The time at which `expire` has something to do."""
        deadlines = self._deadlines
        while deadlines and not self._timed(*deadlines[0]):
            heappop(deadlines)
        soonest = deadlines[0][0] if deadlines else INF
        graves = self._graves
        return min(soonest, graves[0].at + self.settings.remember_dead) if graves else soonest

    def expire(self, now: float) -> None:
        """Declare suspects dead whose time is up, and forget those that have long been dead."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            deadline, name = heappop(deadlines)
            if self._timed(deadline, name):
                view = self.table[name]
                self._bury(now, self._believe(now, view.member, Status.dead, view.incarnation), self.me.name)
        graves = self._graves
        while graves and (graves[0].at + self.settings.remember_dead <= now or len(graves) > DEAD_MAX):
            self._forget(graves.popleft())

    def postpone(self, now: float, seconds: float, *, silence: bool) -> None:
        """Extend suspicions by a time in which this member did not run, or heard nothing. Silence extends them by the
        longest timeout at most, because where most members are dead there is little to hear."""
        for suspicion in self._suspicions.values():
            later = min(seconds, now - suspicion.began)
            if silence:
                later = min(later, self.settings.suspicion_max(suspicion.members) - suspicion.silence)
                suspicion.silence += later
            suspicion.began += later
            suspicion.deadline += later
        self._deadlines = [(suspicion.deadline, name) for name, suspicion in self._suspicions.items()]
        heapify(self._deadlines)

    def repeat_suspicions(self) -> None:
        """Send suspicions again, because those sent while nobody heard this member must reach their subjects in
        time."""
        for name, suspicion in self._suspicions.items():
            if name not in self.rumours:
                self.rumours.put(name, wire.accusation(self.table[name], suspicion.accusers[0]))

    def suspects(self) -> list[wire.Suspect]:
        """Some of the suspects, for a push-pull, since digests do not show them."""
        some = islice(self._suspicions.items(), wire.RUMOURS_MAX)
        views = ((self.table[name], suspicion.accusers[0]) for name, suspicion in some)
        return [wire.Suspect(v.member.name, v.member.born, v.incarnation, accuser) for v, accuser in views]

    def begin_round(self, now: float) -> None:
        """Draw a new order of the live members, and of the dead that still get gossip."""
        names: list[str] = []
        self._absent = {}
        for name, view in self.table.items():
            if view.status.live or self.recently_dead(now, view):
                names.append(name)
            else:
                self._absent[name] = None
        self.order.begin(tuple(names))

    def recently_dead(self, now: float, view: View) -> bool:
        return view.status is Status.dead and now - view.since <= self.settings.gossip_to_dead

    def graves(self) -> Sequence[Grave]:
        """Forget the dead, the oldest first. Some may have come back since."""
        return self._graves

    def entries_in(self, parts: Sequence[int]) -> list[View]:
        wanted = frozenset(parts)
        return [view for name, view in self.table.items() if bucket_of(name) in wanted]

    # Keeping account

    def _believe(self, now: float, member: Member, status: Status, incarnation: int) -> View:
        before = self.table.get(member.name)
        same_life = before is not None and before.member.born == member.born
        since = before.since if before is not None and same_life and before.status is status else now
        view = View(member, status, incarnation, since)
        self.table.put(view)
        if status is not Status.suspect:
            self._suspicions.pop(member.name, None)
        if before is None or before.status is not status or before.member != member:
            self.actions.append(Changed(member.name, before.status if before else None, status, member))
        return view

    def _bury(self, now: float, view: View, accuser: str) -> None:
        member = view.member
        self._graves.append(Grave(now, member.name, member.born))
        self.rumours.put(member.name, wire.accusation(view, accuser))

    def _forget(self, grave: Grave) -> None:
        view = self.table.get(grave.name)
        if view is None or view.status.live or view.member.born != grave.born or view.since > grave.at:
            return
        self.table.forget(grave.name)
        self.rumours.drop(grave.name)
        self._absent.pop(grave.name, None)
        self.actions.append(Changed(grave.name, view.status, None, view.member))

    def _confirms(self, suspicion: Suspicion, accuser: str) -> bool:
        """Whether this accuser is a new one, and new ones still count."""
        accusers = suspicion.accusers
        if accuser in accusers or len(accusers) > suspicion.wanted:
            return False
        accusers.append(accuser)
        return True

    def _time(self, name: str, suspicion: Suspicion) -> None:
        confirmed = len(suspicion.accusers) - 1
        timeout = self.settings.suspicion_timeout(confirmed, suspicion.wanted, suspicion.members)
        suspicion.deadline = suspicion.began + timeout
        heappush(self._deadlines, (suspicion.deadline, name))

    def _timed(self, deadline: float, name: str) -> bool:
        suspicion = self._suspicions.get(name)
        return suspicion is not None and suspicion.deadline == deadline

"""Which machine takes a request, and which is started when none can.

    pool = Pool("web", "ams", random=rng.random)
    pool.put(Candidate(machine="...", region="ams", state="started", ...))     # as rows change
    seat = pool.take(now)                           # in flight there from now on, or None:
    decision = pool.decide(now)                     # Take, Start or Nothing; nothing is counted yet
    pool.enter(decision.seat) ... pool.leave(seat)

A pool has the machines of one service of one app, sorted by how loaded they are (below the soft limit, below the hard
one, full), and keeps them sorted as requests come and go: to choose looks at two of them, however many there are. The
nearest region that can take a request does. Within it a machine at its soft limit is chosen only when all are, one at
its hard limit never, and of two drawn at random the less loaded (Mitzenmacher 2001, "The power of two choices").

What is started is the same for all proxies that see the same rows: a suspended machine before a stopped one, then by
rendezvous. While a machine is on its way that has room for the request, no other is started. Requests that wait for it
are in flight there already, and find it loaded as they left it.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf

import msgspec

from hawker.core.rendezvous import weight
from hawker.core.seats import Candidate as Candidate
from hawker.core.seats import Region, has_room, is_coming, is_open, is_spare, less_loaded, list_of, to_start
from hawker.core.seats import Seat as Seat
from hawker.model.regions import expand

LOAD_KNOWN_S = 1.0
"""What another proxy said of its machine's load counts for so long: without news of it, the machine is tried again."""
LAPSE_S = 0.05
"""Seats whose rest or whose news is over are looked for at most so often."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about who is to take it (fly-force-instance-id, fly-prefer-instance-id, fly-prefer-region,
    fly-force-region) or what a replay said. Empty: nothing. Regions are codes or aliases ("eu", "any")."""

    force_machine: str = ""
    prefer_machine: str = ""
    force_regions: tuple[str, ...] = ()
    prefer_regions: tuple[str, ...] = ()
    not_machine: str = ""
    """`elsewhere=true` of a replay: any but the one that said so."""


ANY = Wishes()


class Take(msgspec.Struct, frozen=True):
    """This machine runs and has room. `starting` is to be started meanwhile: all that run here are at their soft
    limits, or farther away."""

    seat: Seat
    starting: Seat | None = None


class Start(msgspec.Struct, frozen=True):
    """None that runs can take the request: it waits for this one. `pending`: it is on its way already."""

    seat: Seat
    pending: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """`code` is one of the documented ones. `wait`: another row, or a request that ends, may change it."""

    code: str
    message: str
    wait: bool


Decision = Take | Start | Nothing

GONE = Nothing("PR02", "the machine that was asked for is not there", False)
NOT_HERE = Nothing("PR01", "no machine of the app serves this, and none may be started", False)
UNWELL = Nothing("PR01", "no healthy machine: those that run fail their checks, or failed lately", True)
FULL = Nothing("PR03", "all machines are at their hard limits", True)
TRIED = Nothing("PC07", "all machines were tried", True)


class Pool:
    """The machines of a service. `region` is where this proxy is, `regions` are others, the nearest first; regions of
    machines that are in neither come last. `random` gives numbers from 0 to below 1."""

    def __init__(self, app: str, region: str, regions: Sequence[str] = (), *, random: Callable[[], float]) -> None:
        self.app = app
        self.seats: dict[str, Seat] = {}
        self._random = random
        self._here = Region(region)
        self._order = list(dict.fromkeys((region, *regions)))
        self._regions = {region: self._here}
        self._parted: dict[str, Seat] = {}  # machines whose rows are gone, with requests still in flight
        self._timed: dict[Seat, None] = {}
        self._due = inf
        self._looked = -inf

    @property
    def busy(self) -> bool:
        """Whether any machine has requests in flight, or places that are lent."""
        return bool(self._parted) or any(seat.own or seat.lent for seat in self.seats.values())

    # --- what rows say ---

    def put(self, row: Candidate) -> Seat:
        """A machine that is new or has changed. Whatever changed ends its rest."""
        seat = self.seats.get(row.machine)
        if seat is None:
            seat = self._parted.pop(row.machine, None) or Seat(row, weight(self.app, row.machine))
            self.seats[row.machine] = seat
        elif seat.row == row:
            return seat
        home = self._regions.get(row.region)
        if home is None:
            home = self._regions[row.region] = Region(row.region)
            if row.region not in self._order:
                self._order.append(row.region)
        if seat.home is not home:
            self._leave_home(seat)
            seat.home = home
            home.seats += 1
        seat.row, seat.region, seat.soft = row, row.region, row.soft
        seat.limit()
        seat.rests_until = 0.0
        self._place(seat)
        return seat

    def remove(self, machine: str) -> None:
        """A machine that is gone. Requests in flight there may still leave, and count again if it comes back."""
        seat = self.seats.pop(machine, None)
        if seat is None:
            return
        self._leave_home(seat)
        self._timed.pop(seat, None)
        seat.waking = seat.closing = False
        if seat.own:
            self._parted[machine] = seat

    # --- what happens ---

    def enter(self, seat: Seat) -> None:
        """Another request in flight there, or waiting for it to start."""
        seat.own += 1
        seat.in_flight += 1
        if seat.in_flight == seat.soft or seat.in_flight == seat.hard:
            self._place(seat)

    def leave(self, seat: Seat) -> None:
        seat.own -= 1
        seat.in_flight -= 1
        if seat.in_flight == seat.soft - 1 or seat.in_flight == seat.hard - 1:
            self._place(seat)
        if not seat.own and self._parted:
            self._parted.pop(seat.machine, None)

    def told(self, seat: Seat, in_flight: int, now: float) -> None:
        """All that is in flight at a machine, as its own proxy says, this proxy's requests among it."""
        seat.told_until = now + LOAD_KNOWN_S
        others = in_flight - seat.own if in_flight > seat.own else 0
        if others != seat.others:
            seat.in_flight += others - seat.others
            seat.others = others
            self._place(seat)
        if others and seat not in self._timed:
            self._watch(seat, seat.told_until)

    def lend(self, seat: Seat, places: int, filled: int) -> None:
        """Somebody carries requests past this proxy, and may fill so many places without asking; `filled` are, as far
        as is known. 0 places: it fills no more, and `filled` only gets smaller. What is said holds until it is said
        anew. Places are fewer than the hard limit (`lendable`)."""
        seat.told_until = inf
        seat.lent = places
        seat.in_flight += filled - seat.others
        seat.others = filled
        seat.limit()
        self._place(seat)

    def rest(self, seat: Seat, until: float, *, spare: bool = False) -> None:
        """It failed, or its row is wrong: it is neither chosen nor started before then, unless its row changes.
        `spare`: it is chosen all the same where no other can take the request, and none can be started."""
        seat.rests_until, seat.spare = until, spare
        self._place(seat)
        self._watch(seat, until)

    def waking(self, seat: Seat, on: bool) -> None:
        """Its start is under way, whatever its row says, until it is known to take requests."""
        seat.waking = on
        self._place(seat)

    def doubt(self, seat: Seat, on: bool) -> None:
        """Its worker may be gone, as others say: it is left alone where another machine takes the request."""
        if seat.doubtful is not on:
            seat.doubtful = on
            self._place(seat)

    def closing(self, seat: Seat, on: bool) -> None:
        """It is about to be stopped: it takes no request that another machine can. Once the stop can not be taken back
        any more, `put` it as stopping."""
        seat.closing = on
        self._place(seat)

    # --- the choice ---

    def take(self, now: float, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Seat | None:
        """A machine below its soft limit, where nothing is to be started: the request is in flight there now. None:
        `decide`."""
        if now >= self._due:
            self._lapse(now)
        free = self._here.free
        count = len(free)
        if tried or not count or (wishes is not ANY and wishes != ANY):
            found = self.decide(now, wishes, tried)
            if not isinstance(found, Take) or found.starting is not None or found.seat.in_flight >= found.seat.soft:
                return None
            seat = found.seat
        elif count == 1:
            seat = free[0]
        else:
            one = int(self._random() * count)
            two = int(self._random() * (count - 1))
            seat = less_loaded(free[one], free[two if two < one else two + 1])
        seat.own += 1
        seat.in_flight += 1
        if seat.in_flight == seat.soft or seat.in_flight == seat.hard:
            self._place(seat)
        return seat

    def decide(self, now: float, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Decision:
        """What is best for the request now. Counts nothing: `enter` the seat of what is done."""
        if now >= self._due:
            self._lapse(now)
        regions = self._wanted(wishes)
        if wishes.force_machine:
            return self._forced(wishes, regions, tried)
        if wishes.prefer_machine not in tried and wishes.prefer_machine != wishes.not_machine:
            seat = self.seats.get(wishes.prefer_machine)
            if seat is not None and is_open(seat) and (not wishes.force_regions or seat.region in regions):
                return Take(seat)
        out = {*tried, wishes.not_machine}
        waited: Seat | None = None
        for name in regions:
            home = self._regions.get(name)
            if home is None or not home.seats:
                continue
            start = None
            seat = self._draw(home.free, out)
            if seat is None:
                start = to_start(home, out)
                seat = self._draw(home.busy, out) or self._draw(filter(has_room, home.leaving), out)
            waited = waited or start
            if seat is not None:
                return Take(seat, None if waited is None or is_coming(waited) else waited)
        if waited is not None:
            return Start(waited, is_coming(waited))
        homes = [home for name in regions if (home := self._regions.get(name))]
        for home in homes:
            if spare := self._draw(filter(is_spare, home.unwell), out):
                return Take(spare)
        for home in homes:
            if waited := to_start(home, out, doubtful=True):
                return Start(waited, is_coming(waited))
        return self._why(regions, out)

    def _forced(self, wishes: Wishes, regions: Sequence[str], tried: Collection[str]) -> Decision:
        seat = self.seats.get(wishes.force_machine)
        if seat is None or seat.machine == wishes.not_machine or (wishes.force_regions and seat.region not in regions):
            return GONE
        if seat.machine in tried:
            return TRIED
        home = seat.home
        assert home is not None  # every seat of `seats` has one
        if is_open(seat) or is_spare(seat) or (seat.list is home.leaving and not seat.full):
            return Take(seat)
        if seat.list is home.coming or seat.list is home.asleep:
            return FULL if seat.full else Start(seat, is_coming(seat))
        if seat.list is home.full or seat.list is home.leaving:
            return FULL
        return UNWELL if seat.list is home.unwell else NOT_HERE

    def _why(self, regions: Sequence[str], out: Collection[str]) -> Nothing:
        homes = [home for name in regions if (home := self._regions.get(name))]
        # One that sleeps and was not started has all the requests already that it takes.
        lists = [seats for home in homes for seats in (home.full, home.leaving, home.coming, home.asleep)]
        if any(seat.machine not in out for seats in lists for seat in seats):
            return FULL
        if any(seat.machine not in out for home in homes for seat in home.unwell):
            return UNWELL
        return TRIED if any(machine in self.seats for machine in out) else NOT_HERE

    def _wanted(self, wishes: Wishes) -> Sequence[str]:
        """The regions that may take it, the best first."""
        if wishes.force_regions:
            return expand(",".join(wishes.force_regions), self._order)
        if wishes.prefer_regions:
            return expand(",".join((*wishes.prefer_regions, "any")), self._order)
        return self._order

    def _draw(self, seats: Iterable[Seat], out: Collection[str]) -> Seat | None:
        """The less loaded of two drawn at random, of those that are not `out`."""
        left = [seat for seat in seats if seat.machine not in out]
        count = len(left)
        if count < 2:
            return left[0] if left else None
        one = int(self._random() * count)
        two = int(self._random() * (count - 1))
        return less_loaded(left[one], left[two if two < one else two + 1])

    # --- where a seat is ---

    def _place(self, seat: Seat) -> None:
        """Into the list where it belongs now."""
        home = seat.home
        if home is None:
            return
        there = list_of(seat, home)
        if there is seat.list:
            return
        self._take_out(seat)
        if there is not None:
            seat.list, seat.place = there, len(there)
            there.append(seat)

    def _take_out(self, seat: Seat) -> None:
        if seat.list is not None:
            last = seat.list.pop()
            if last is not seat:
                seat.list[seat.place] = last
                last.place = seat.place
            seat.list = None

    def _leave_home(self, seat: Seat) -> None:
        self._take_out(seat)
        if seat.home is not None:
            seat.home.seats -= 1
            seat.home = None

    # --- time ---

    def _watch(self, seat: Seat, until: float) -> None:
        self._timed[seat] = None
        self._due = min(self._due, max(until, self._looked + LAPSE_S))

    def _lapse(self, now: float) -> None:
        """End the rests and forget the news whose time is over."""
        self._looked, self._due = now, inf
        for seat in [*self._timed]:
            if seat.rests_until <= now:
                seat.rests_until = 0.0
            if seat.told_until <= now:
                seat.in_flight -= seat.others
                seat.others = 0
            self._place(seat)
            untils = [*([seat.rests_until] if seat.rests_until else []), *([seat.told_until] if seat.others else [])]
            untils = [until for until in untils if until < inf]
            if untils:
                self._watch(seat, min(untils))
            else:
                self._timed.pop(seat, None)


def lendable(soft: int, hard: int) -> int:
    """Places of a machine that may be filled without asking, so that its hard limit holds, 0: none. What is over its
    soft limit is decided one by one, and so is the last one."""
    return min(soft, hard - 1) if hard else soft

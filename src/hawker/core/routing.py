"""Which machine takes a request, and which is started when none can.

    pool = Pool("web", "ams", random=rng.random)
    pool.put(Candidate(machine="...", region="ams", state="started", ...))     # as rows change
    entry = pool.take(now)                          # in flight there from now on, or None:
    decision = pool.decide(now)                     # Take, Start or Nothing; nothing is counted yet
    pool.enter(decision.entry) ... pool.leave(entry)

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

from hawker.core.pool_entries import Candidate as Candidate
from hawker.core.pool_entries import PoolEntry as PoolEntry
from hawker.core.pool_entries import Region, has_room, is_coming, is_open, is_spare, less_loaded, list_of, to_start
from hawker.core.rendezvous import weight
from hawker.model.regions import expand

LOAD_KNOWN_S = 1.0
"""For this long it counts what another proxy said of its machine's load: without news of it, the machine is tried
again."""
LAPSE_S = 0.05
"""How often entries are looked for whose rest or whose news is over."""


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

    entry: PoolEntry
    starting: PoolEntry | None = None


class Start(msgspec.Struct, frozen=True):
    """None that runs can take the request: it waits for this one. `pending`: it is on its way already."""

    entry: PoolEntry
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
        self.entries: dict[str, PoolEntry] = {}
        self._random = random
        self._here = Region(region)
        self._order = list(dict.fromkeys((region, *regions)))
        self._regions = {region: self._here}
        self._leaving: dict[str, PoolEntry] = {}  # machines whose rows are gone, with requests still in flight
        self._timed: dict[PoolEntry, None] = {}
        self._due = inf
        self._looked = -inf

    @property
    def busy(self) -> bool:
        """Whether any machine has requests in flight, or slots that are delegated."""
        return bool(self._leaving) or any(entry.own or entry.delegated for entry in self.entries.values())

    # --- what rows say ---

    def put(self, row: Candidate) -> PoolEntry:
        """A machine that is new or has changed. Whatever changed ends its rest."""
        entry = self.entries.get(row.machine)
        if entry is None:
            entry = self._leaving.pop(row.machine, None) or PoolEntry(row, weight(self.app, row.machine))
            self.entries[row.machine] = entry
        elif entry.row == row:
            return entry
        home = self._regions.get(row.region)
        if home is None:
            home = self._regions[row.region] = Region(row.region)
            if row.region not in self._order:
                self._order.append(row.region)
        if entry.home is not home:
            self._leave_home(entry)
            entry.home = home
            home.entries += 1
        entry.row, entry.region, entry.soft = row, row.region, row.soft
        entry.limit()
        entry.rests_until = 0.0
        self._place(entry)
        return entry

    def remove(self, machine: str) -> None:
        """A machine that is gone. Requests in flight there may still leave, and count again if it comes back."""
        entry = self.entries.pop(machine, None)
        if entry is None:
            return
        self._leave_home(entry)
        self._timed.pop(entry, None)
        entry.waking = entry.closing = False
        if entry.own:
            self._leaving[machine] = entry

    # --- what happens ---

    def enter(self, entry: PoolEntry) -> None:
        """Another request is in flight there, or waits for the machine to start."""
        entry.own += 1
        entry.in_flight += 1
        if entry.in_flight == entry.soft or entry.in_flight == entry.hard:
            self._place(entry)

    def leave(self, entry: PoolEntry) -> None:
        entry.own -= 1
        entry.in_flight -= 1
        if entry.in_flight == entry.soft - 1 or entry.in_flight == entry.hard - 1:
            self._place(entry)
        if not entry.own and self._leaving:
            self._leaving.pop(entry.machine, None)

    def told(self, entry: PoolEntry, in_flight: int, now: float) -> None:
        """The machine's own proxy says how much is in flight there, this proxy's requests among it."""
        entry.told_until = now + LOAD_KNOWN_S
        others = in_flight - entry.own if in_flight > entry.own else 0
        if others != entry.others:
            entry.in_flight += others - entry.others
            entry.others = others
            self._place(entry)
        if others and entry not in self._timed:
            self._watch(entry, entry.told_until)

    def delegate(self, entry: PoolEntry, slots: int, filled: int) -> None:
        """A delegate may fill so many slots of this machine without asking; `filled` are, as far as is known. With 0
        slots it fills no more, and `filled` only gets smaller. What is said holds until it is said again. Slots are
        fewer than the hard limit (`delegable`)."""
        entry.told_until = inf
        entry.delegated = slots
        entry.in_flight += filled - entry.others
        entry.others = filled
        entry.limit()
        self._place(entry)

    def rest(self, entry: PoolEntry, until: float, *, spare: bool = False) -> None:
        """The machine failed, or its row is wrong: it is neither chosen nor started before then, unless its row
        changes. `spare`: it is chosen all the same where no other can take the request, and none can be started."""
        entry.rests_until, entry.spare = until, spare
        self._place(entry)
        self._watch(entry, until)

    def waking(self, entry: PoolEntry, on: bool) -> None:
        """The machine's start is under way, whatever its row says, until it is known to take requests."""
        entry.waking = on
        self._place(entry)

    def doubt(self, entry: PoolEntry, on: bool) -> None:
        """Others say that the machine's worker may be gone: it is left alone where another machine takes the
        request."""
        if entry.doubtful is not on:
            entry.doubtful = on
            self._place(entry)

    def closing(self, entry: PoolEntry, on: bool) -> None:
        """The machine is about to be stopped: it takes no request that another machine can. Once the stop can not be
        taken back any more, `put` it as stopping."""
        entry.closing = on
        self._place(entry)

    # --- the choice ---

    def take(self, now: float, wishes: Wishes = ANY, tried: Collection[str] = ()) -> PoolEntry | None:
        """Take a machine below its soft limit, where nothing is to be started: the request is in flight there now.
        None: `decide`."""
        if now >= self._due:
            self._lapse(now)
        free = self._here.free
        count = len(free)
        if tried or not count or (wishes is not ANY and wishes != ANY):
            found = self.decide(now, wishes, tried)
            if not isinstance(found, Take) or found.starting is not None or found.entry.in_flight >= found.entry.soft:
                return None
            entry = found.entry
        elif count == 1:
            entry = free[0]
        else:
            one = int(self._random() * count)
            two = int(self._random() * (count - 1))
            entry = less_loaded(free[one], free[two if two < one else two + 1])
        entry.own += 1
        entry.in_flight += 1
        if entry.in_flight == entry.soft or entry.in_flight == entry.hard:
            self._place(entry)
        return entry

    def decide(self, now: float, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Decision:
        """Decide what is best for the request now. This counts nothing: `enter` the entry that is used."""
        if now >= self._due:
            self._lapse(now)
        regions = self._wanted(wishes)
        if wishes.force_machine:
            return self._forced(wishes, regions, tried)
        if wishes.prefer_machine not in tried and wishes.prefer_machine != wishes.not_machine:
            entry = self.entries.get(wishes.prefer_machine)
            if entry is not None and is_open(entry) and (not wishes.force_regions or entry.region in regions):
                return Take(entry)
        out = {*tried, wishes.not_machine}
        waited: PoolEntry | None = None
        for name in regions:
            home = self._regions.get(name)
            if home is None or not home.entries:
                continue
            start = None
            entry = self._draw(home.free, out)
            if entry is None:
                start = to_start(home, out)
                entry = self._draw(home.busy, out) or self._draw(filter(has_room, home.leaving), out)
            waited = waited or start
            if entry is not None:
                return Take(entry, None if waited is None or is_coming(waited) else waited)
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
        entry = self.entries.get(wishes.force_machine)
        if (
            entry is None
            or entry.machine == wishes.not_machine
            or (wishes.force_regions and entry.region not in regions)
        ):
            return GONE
        if entry.machine in tried:
            return TRIED
        home = entry.home
        assert home is not None  # every entry of `entries` has one
        if is_open(entry) or is_spare(entry) or (entry.list is home.leaving and not entry.full):
            return Take(entry)
        if entry.list is home.coming or entry.list is home.asleep:
            return FULL if entry.full else Start(entry, is_coming(entry))
        if entry.list is home.full or entry.list is home.leaving:
            return FULL
        return UNWELL if entry.list is home.unwell else NOT_HERE

    def _why(self, regions: Sequence[str], out: Collection[str]) -> Nothing:
        homes = [home for name in regions if (home := self._regions.get(name))]
        # A machine that sleeps and was not started has all the requests already that it takes.
        lists = [entries for home in homes for entries in (home.full, home.leaving, home.coming, home.asleep)]
        if any(entry.machine not in out for entries in lists for entry in entries):
            return FULL
        if any(entry.machine not in out for home in homes for entry in home.unwell):
            return UNWELL
        return TRIED if any(machine in self.entries for machine in out) else NOT_HERE

    def _wanted(self, wishes: Wishes) -> Sequence[str]:
        """The regions that may take it, the best first."""
        if wishes.force_regions:
            return expand(",".join(wishes.force_regions), self._order)
        if wishes.prefer_regions:
            return expand(",".join((*wishes.prefer_regions, "any")), self._order)
        return self._order

    def _draw(self, entries: Iterable[PoolEntry], out: Collection[str]) -> PoolEntry | None:
        """The less loaded of two drawn at random, of those that are not `out`."""
        left = [entry for entry in entries if entry.machine not in out]
        count = len(left)
        if count < 2:
            return left[0] if left else None
        one = int(self._random() * count)
        two = int(self._random() * (count - 1))
        return less_loaded(left[one], left[two if two < one else two + 1])

    # --- where an entry is ---

    def _place(self, entry: PoolEntry) -> None:
        """Put the entry into the list where it belongs now."""
        home = entry.home
        if home is None:
            return
        there = list_of(entry, home)
        if there is entry.list:
            return
        self._take_out(entry)
        if there is not None:
            entry.list, entry.index = there, len(there)
            there.append(entry)

    def _take_out(self, entry: PoolEntry) -> None:
        if entry.list is not None:
            last = entry.list.pop()
            if last is not entry:
                entry.list[entry.index] = last
                last.index = entry.index
            entry.list = None

    def _leave_home(self, entry: PoolEntry) -> None:
        self._take_out(entry)
        if entry.home is not None:
            entry.home.entries -= 1
            entry.home = None

    # --- time ---

    def _watch(self, entry: PoolEntry, until: float) -> None:
        self._timed[entry] = None
        self._due = min(self._due, max(until, self._looked + LAPSE_S))

    def _lapse(self, now: float) -> None:
        """End the rests and forget the news whose time is over."""
        self._looked, self._due = now, inf
        for entry in [*self._timed]:
            if entry.rests_until <= now:
                entry.rests_until = 0.0
            if entry.told_until <= now:
                entry.in_flight -= entry.others
                entry.others = 0
            self._place(entry)
            untils = [
                *([entry.rests_until] if entry.rests_until else []),
                *([entry.told_until] if entry.others else []),
            ]
            untils = [until for until in untils if until < inf]
            if untils:
                self._watch(entry, min(untils))
            else:
                self._timed.pop(entry, None)


def delegable(soft: int, hard: int) -> int:
    """How many slots of a machine may be filled without asking, so that its hard limit holds, 0: none. Requests over
    its soft limit are decided one by one, and so is the last one."""
    return min(soft, hard - 1) if hard else soft

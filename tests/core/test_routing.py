"""Which machine takes a request, and which is started when none can."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.kit.tiers import costly

from hawker.core.pool_entries import ASLEEP, COMING, Candidate, PoolEntry, list_of
from hawker.core.rendezvous import ranked
from hawker.core.routing import (
    ANY,
    FULL,
    GONE,
    LOAD_KNOWN_S,
    NOT_HERE,
    TRIED,
    UNWELL,
    Decision,
    Nothing,
    Pool,
    Start,
    Take,
    Wishes,
)

NAMES = ("m1", "m2", "m3", "m4", "m5")


def candidate(machine: str, **fields: Any) -> Candidate:
    return Candidate(**{"machine": machine, "region": "ams", "state": "started", "soft": 2, "hard": 3, **fields})


def pool_of(*rows: Candidate, regions: Collection[str] = (), seed: int = 0) -> Pool:
    pool = Pool("web", "ams", [*regions], random=random.Random(seed).random)
    for row in rows:
        pool.put(row)
    return pool


def load(pool: Pool, **in_flight: int) -> Pool:
    for machine, count in in_flight.items():
        for _ in range(count):
            pool.enter(pool.entries[machine])
    return pool


def decided(
    pool: Pool, wishes: Wishes = ANY, tried: Collection[str] = (), now: float = 0.0
) -> tuple[str, ...] | Nothing:
    """("take", machine), ("take", machine, the one that is started) or ("start"|"wait", machine)."""
    found = pool.decide(now, wishes, tried)
    match found:
        case Take(entry, starting):
            return ("take", entry.machine, *([starting.machine] if starting else []))
        case Start(entry, pending):
            return ("wait" if pending else "start", entry.machine)
        case Nothing():
            return found


def taken(pool: Pool, wishes: Wishes = ANY, tried: Collection[str] = (), now: float = 0.0) -> str | None:
    entry = pool.take(now, wishes, tried)
    return entry.machine if entry else None


# --- load ---


def test_requests_spread_and_none_goes_over_a_soft_limit_while_another_is_below() -> None:
    pool = pool_of(*(candidate(name, soft=10, hard=0) for name in NAMES))
    assert Counter(taken(pool) for _ in range(50)) == dict.fromkeys(NAMES, 10)
    assert taken(pool) is None


def test_of_two_machines_the_less_loaded_for_its_size_takes_it() -> None:
    pool = load(pool_of(candidate("small", soft=4, hard=0), candidate("large", soft=40, hard=0)), small=1, large=9)
    assert taken(pool) == "large"
    assert taken(pool) == "small"


def test_of_two_machines_it_is_always_the_less_loaded() -> None:
    pool = load(pool_of(candidate("m1", soft=200, hard=0), candidate("m2", soft=200, hard=0)), m1=100)
    assert {taken(pool) for _ in range(99)} == {"m2"}


def test_two_drawn_at_random_are_far_more_even_than_one() -> None:
    pool = pool_of(*(candidate(f"m{n}", soft=1000, hard=0) for n in range(100)))
    for _ in range(1000):
        pool.take(0)
    counts = [entry.in_flight for entry in pool.entries.values()]
    assert max(counts) <= 13, "one at random: 20 or more"
    assert min(counts) >= 4


def test_above_the_soft_limit_requests_go_on_to_the_hard_one_when_all_are_there() -> None:
    pool = load(pool_of(candidate("m1"), candidate("m2")), m1=2, m2=2)
    assert taken(pool) is None, "to be decided: something may be started"
    for _ in range(2):
        found = pool.decide(0)
        assert isinstance(found, Take)
        pool.enter(found.entry)
    assert {entry.in_flight for entry in pool.entries.values()} == {3}
    assert decided(pool) is FULL


def test_a_request_that_ends_makes_room() -> None:
    pool = load(pool_of(candidate("m1")), m1=3)
    assert decided(pool) is FULL
    pool.leave(pool.entries["m1"])
    assert decided(pool) == ("take", "m1")
    assert taken(pool) is None
    pool.leave(pool.entries["m1"])
    assert taken(pool) == "m1"


def test_a_limit_that_is_lowered_below_what_is_in_flight_holds_at_once() -> None:
    pool = load(pool_of(candidate("m1", hard=0)), m1=5)
    assert decided(pool) == ("take", "m1")
    pool.put(candidate("m1", soft=1, hard=2))
    assert decided(pool) is FULL


def test_a_hard_limit_below_the_soft_one_holds() -> None:
    assert decided(load(pool_of(candidate("m1", soft=5, hard=2)), m1=2)) is FULL


# --- starting ---


def test_a_sleeping_app_has_one_machine_started_and_the_rest_of_the_requests_wait_for_it() -> None:
    pool = pool_of(*(candidate(name, state="stopped", hard=0) for name in NAMES))
    first = ranked("web", NAMES)[0]
    assert decided(pool) == ("start", first)
    pool.waking(pool.entries[first], True)
    for _ in range(1000):
        assert decided(pool) == ("wait", first)
        pool.enter(pool.entries[first])
    pool.put(candidate(first, hard=0))
    assert decided(pool) == ("wait", first), "it is said to run, but not known to take requests"
    pool.waking(pool.entries[first], False)
    assert decided(pool)[:2] == ("take", first)  # type: ignore[index]


def test_when_more_wait_than_a_machine_may_ever_take_another_is_started() -> None:
    pool = pool_of(*(candidate(name, state="stopped", hard=3) for name in NAMES))
    first, second = ranked("web", NAMES)[:2]
    pool.waking(pool.entries[first], True)
    load(pool, **{first: 3})
    assert decided(pool) == ("start", second)


def test_while_a_machine_runs_below_its_hard_limit_the_start_is_beside_the_request() -> None:
    pool = load(pool_of(candidate("m1"), candidate("m2", state="stopped"), candidate("m3", state="stopped")), m1=2)
    second = ranked("web", ["m2", "m3"])[0]
    assert decided(pool) == ("take", "m1", second)
    pool.put(candidate(second, state="starting"))
    assert decided(pool) == ("take", "m1"), "one is on its way: no other is started"
    load(pool, m1=1)
    assert decided(pool) == ("wait", second)


def test_a_suspended_machine_is_woken_before_a_stopped_one_and_that_before_one_that_is_still_stopping() -> None:
    states = ["suspended", "stopped", "stopping"]
    for order in permutations(states):
        rows = [candidate(f"m{n}", state=state) for n, state in enumerate(order)]
        for expected in states:
            found = pool_of(*rows).decide(0)
            assert isinstance(found, Start)
            assert found.entry.row.state == expected
            rows = [row for row in rows if row.state != expected]


@given(st.sets(st.text("abcdef0123456789", min_size=1, max_size=6), min_size=1, max_size=8), st.randoms())
def test_proxies_that_see_the_same_machines_start_the_same_one(machines: set[str], shuffled: random.Random) -> None:
    rows = [candidate(machine, state="stopped") for machine in sorted(machines)]
    one = decided(pool_of(*rows))
    shuffled.shuffle(rows)
    assert decided(pool_of(*rows, seed=shuffled.randrange(1000))) == one


def test_a_machine_that_stops_and_was_full_a_moment_ago_is_waited_for() -> None:
    """What another proxy told of its load counts for a while, also when its row is newer."""
    pool = pool_of(candidate("m1", soft=1, hard=1))
    pool.told(pool.entries["m1"], 1, now=0.0)
    pool.put(candidate("m1", soft=1, hard=1, state="stopping"))
    assert decided(pool) == FULL
    assert decided(pool, tried=["m1"]) == TRIED
    assert decided(pool, now=LOAD_KNOWN_S) == ("start", "m1")


def test_a_machine_without_autostart_or_cordoned_is_left_alone() -> None:
    assert decided(pool_of(candidate("m1", state="stopped", autostart=False))) is NOT_HERE
    assert decided(pool_of(candidate("m1", state="suspended", cordoned=True))) is NOT_HERE
    assert decided(pool_of(candidate("m1", cordoned=True))) is NOT_HERE
    assert decided(pool_of(candidate("m1", state="failed"), candidate("m2", state="destroying"))) is NOT_HERE


def test_a_machine_that_somebody_else_brings_up_is_waited_for() -> None:
    for state in COMING:
        assert decided(pool_of(candidate("m1", state=state, autostart=False))) == ("wait", "m1")


def test_of_several_on_their_way_the_one_for_which_fewer_wait_is_waited_for() -> None:
    pool = load(pool_of(*(candidate(name, state="starting") for name in ("m1", "m2", "m3"))), m1=2, m2=1, m3=2)
    assert decided(pool) == ("wait", "m2")


# --- health, failures, staleness ---


def test_a_machine_whose_checks_fail_takes_nothing_and_another_is_started() -> None:
    unwell = candidate("m1", healthy=False)
    assert decided(pool_of(unwell)) is UNWELL
    assert decided(pool_of(unwell, candidate("m2", state="stopped"))) == ("start", "m2")


def test_a_machine_that_failed_rests_until_its_time_or_until_its_row_changes() -> None:
    pool = pool_of(candidate("m1"))
    pool.rest(pool.entries["m1"], 5.0)
    assert decided(pool, now=4.9) is UNWELL
    assert taken(pool, now=5.0) == "m1"
    pool.rest(pool.entries["m1"], 100.0)
    pool.put(candidate("m1"))
    assert taken(pool, now=6.0) is None, "the row is the same"
    pool.put(candidate("m1", soft=3))
    assert taken(pool, now=6.0) == "m1"


def test_a_spare_one_takes_what_no_other_can_and_no_more_than_its_hard_limit() -> None:
    pool = pool_of(candidate("m1"), candidate("m2"), candidate("m3", state="stopped"))
    pool.rest(pool.entries["m1"], 5.0, spare=True)
    assert decided(pool) == ("take", "m2")
    load(pool, m2=3)
    assert decided(pool) == ("start", "m3")
    assert decided(pool, tried=["m3"]) == ("take", "m1")
    assert decided(pool, Wishes(force_machine="m1")) == ("take", "m1")
    load(pool, m1=3)
    assert decided(pool, tried=["m3"]) is FULL
    pool.put(candidate("m1", healthy=False))
    pool.rest(pool.entries["m1"], 5.0, spare=True)
    assert decided(pool, tried=["m2", "m3"]) is UNWELL


def test_each_rest_ends_at_its_own_time() -> None:
    pool = pool_of(candidate("m1"), candidate("m2"))
    pool.rest(pool.entries["m1"], 1.0)
    pool.rest(pool.entries["m2"], 100.0)
    assert taken(pool, now=0.5) is None
    assert taken(pool, now=1.0) == "m1"


def test_a_machine_that_failed_to_start_lately_is_not_the_one_to_start() -> None:
    pool = pool_of(*(candidate(name, state="stopped") for name in NAMES))
    first, second = ranked("web", NAMES)[:2]
    pool.rest(pool.entries[first], 10.0)
    assert decided(pool) == ("start", second)
    assert decided(pool, now=10.0) == ("start", first)


def test_what_was_tried_is_not_tried_again() -> None:
    pool = pool_of(candidate("m1"), candidate("m2"))
    assert taken(pool, tried=["m1"]) == "m2"
    assert decided(pool, tried=["m1", "m2"]) is TRIED
    assert decided(pool_of(), tried=["m1"]) is NOT_HERE


# --- what another proxy says ---


def test_load_that_another_proxy_tells_of_counts_beside_our_own_and_is_forgotten() -> None:
    pool = load(pool_of(candidate("m1")), m1=1)
    entry = pool.entries["m1"]
    pool.told(entry, 3, now=0.0)
    assert (entry.in_flight, decided(pool)) == (3, FULL)
    pool.leave(entry)
    assert (entry.in_flight, decided(pool)) == (2, ("take", "m1"))
    assert taken(pool, now=LOAD_KNOWN_S - 0.01) is None
    assert taken(pool, now=LOAD_KNOWN_S + 0.1) == "m1", "nothing was heard of it for long"
    assert entry.in_flight == 1


def test_news_of_load_that_comes_again_keeps_it_known() -> None:
    pool = pool_of(candidate("m1"))
    for n in range(50):
        pool.told(pool.entries["m1"], 3, now=n * LOAD_KNOWN_S / 2)
        assert decided(pool, now=n * LOAD_KNOWN_S / 2) is FULL


# --- being stopped ---


def test_a_machine_about_to_stop_takes_only_what_no_other_can() -> None:
    pool = load(pool_of(candidate("m1"), candidate("m2")), m2=2)
    pool.closing(pool.entries["m1"], True)
    assert decided(pool) == ("take", "m2")
    load(pool, m2=1)
    assert decided(pool) == ("take", "m1")
    load(pool, m1=3)
    assert decided(pool) is FULL
    assert decided(pool, Wishes(force_machine="m1")) is FULL
    for _ in range(3):
        pool.leave(pool.entries["m1"])
    assert decided(pool, Wishes(force_machine="m1")) == ("take", "m1")
    pool.put(candidate("m1", state="stopping"))
    assert decided(pool) == ("start", "m1"), "once it has stopped"
    pool.put(candidate("m1"))
    pool.closing(pool.entries["m1"], False)
    assert taken(pool) == "m1"


# --- regions ---


def test_another_region_takes_a_request_only_when_none_here_can() -> None:
    pool = pool_of(
        candidate("near"), candidate("far", region="ord"), candidate("farther", region="syd"), regions=["ord"]
    )
    assert [taken(pool), taken(pool)] == ["near", "near"]
    assert decided(pool) == ("take", "near"), "up to the hard limit"
    load(pool, near=1)
    assert [taken(pool), taken(pool)] == ["far", "far"]
    load(pool, far=1)
    assert taken(pool) == "farther"


def test_a_machine_near_by_is_started_while_one_far_away_takes_the_request() -> None:
    pool = pool_of(candidate("near", state="stopped"), candidate("far", region="ord"))
    assert taken(pool) is None
    assert decided(pool) == ("take", "far", "near")
    pool.waking(pool.entries["near"], True)
    assert decided(pool) == ("take", "far")
    load(pool, far=3)
    assert decided(pool) == ("wait", "near")


def test_what_is_started_is_in_the_nearest_region() -> None:
    rows = [candidate(name, state="stopped", region=region) for name, region in zip(NAMES, "abcde", strict=True)]
    for _ in range(len(rows)):
        assert decided(pool_of(*rows, regions="edcba")) == ("start", rows[-1].machine)
        rows.pop()
        if not rows:
            break


# --- doubt ---


def doubting(pool: Pool, *machines: str) -> Pool:
    for machine in machines:
        pool.doubt(pool.entries[machine], True)
    return pool


def test_a_machine_whose_worker_may_be_gone_takes_only_what_no_other_can() -> None:
    pool = doubting(pool_of(candidate("m1"), candidate("m2")), "m1")
    assert [taken(pool) for _ in range(3)] == ["m2", "m2", None]
    assert decided(pool) == ("take", "m2")
    load(pool, m2=1)
    assert decided(pool) == ("take", "m1"), "the other one is full"
    pool.leave(pool.entries["m2"])
    pool.doubt(pool.entries["m1"], False)
    assert taken(pool) == "m1"


def test_one_that_sleeps_where_all_is_well_is_started_before_one_in_doubt_is_asked() -> None:
    pool = doubting(pool_of(candidate("m1"), candidate("m2", state="stopped")), "m1")
    assert decided(pool) == ("start", "m2")
    assert decided(pool, tried=["m2"]) == ("take", "m1")
    assert decided(doubting(pool, "m2")) == ("take", "m1"), "with both in doubt, the one that runs"
    assert decided(pool, tried=["m1"]) == ("start", "m2")


def test_one_in_doubt_that_a_request_must_have_gets_it() -> None:
    pool = doubting(pool_of(candidate("m1"), candidate("m2")), "m1")
    assert decided(pool, Wishes(force_machine="m1")) == ("take", "m1")
    assert decided(pool, Wishes(prefer_machine="m1")) == ("take", "m2")
    pool.rest(pool.entries["m1"], 5.0)
    assert decided(pool, Wishes(force_machine="m1")) is UNWELL, "it has failed here, too"


# --- wishes ---


def test_a_forced_machine_takes_it_or_nobody() -> None:
    pool = pool_of(
        candidate("m1"), candidate("m2", state="stopped"), candidate("m3", state="starting"), candidate("m4")
    )
    pool.put(candidate("m5", healthy=False))

    def forced(machine: str, **more: Any) -> tuple[str, ...] | Nothing:
        return decided(pool, Wishes(force_machine=machine, **more))

    assert taken(pool, Wishes(force_machine="m4")) == "m4"
    assert forced("m2") == ("start", "m2")
    assert forced("m3") == ("wait", "m3")
    assert forced("m5") is UNWELL
    assert forced("other") is GONE
    assert forced("m1", force_regions=("ord",)) is GONE
    assert decided(pool, Wishes(force_machine="m1"), ["m1"]) is TRIED
    load(pool, m1=2)
    assert forced("m1") == ("take", "m1")
    load(pool, m1=1)
    assert forced("m1") is FULL


def test_a_preferred_machine_takes_it_up_to_its_hard_limit_and_then_any_does() -> None:
    pool = load(pool_of(candidate("m1"), candidate("m2")), m1=2)
    wishes = Wishes(prefer_machine="m1")
    assert decided(pool, wishes) == ("take", "m1")
    load(pool, m1=1)
    assert taken(pool, wishes) == "m2"
    assert decided(pool, Wishes(prefer_machine="gone")) == ("take", "m2")
    assert decided(pool, Wishes(prefer_machine="m2"), ["m2"]) is FULL
    pool.put(candidate("m3", region="ord"))
    assert decided(pool, Wishes(prefer_machine="m3", force_regions=("ams",))) == ("take", "m2")
    assert decided(pool, Wishes(prefer_machine="m3")) == ("take", "m3")


def test_regions_are_forced_or_preferred_by_code_or_alias() -> None:
    pool = pool_of(candidate("here"), candidate("us", region="ord"), candidate("eu", region="fra"))
    assert taken(pool, Wishes(force_regions=("syd", "na"))) == "us"
    assert decided(pool, Wishes(force_regions=("syd",))) is NOT_HERE
    assert taken(pool, Wishes(prefer_regions=("syd", "fra"))) == "eu"
    assert taken(pool, Wishes(prefer_regions=("syd",))) == "here"
    assert taken(pool, Wishes(force_regions=("syd", "any"))) == "here"


def test_elsewhere_is_anywhere_but_there() -> None:
    pool = pool_of(candidate("m1"), candidate("m2"))
    assert {taken(pool, Wishes(not_machine="m1")) for _ in range(2)} == {"m2"}
    assert decided(pool_of(candidate("m1")), Wishes(not_machine="m1")) is TRIED
    assert decided(pool, Wishes(not_machine="m1", prefer_machine="m1")) == ("take", "m2")
    assert decided(pool, Wishes(not_machine="m1", force_machine="m1")) is GONE


# --- rows that come and go ---


def test_requests_of_a_machine_whose_row_goes_and_comes_back_still_count() -> None:
    pool = load(pool_of(candidate("m1")), m1=3)
    entry = pool.entries["m1"]
    pool.remove("m1")
    assert decided(pool) is NOT_HERE
    pool.leave(entry)
    pool.put(candidate("m1"))
    assert pool.entries["m1"].in_flight == 2
    pool.remove("m1")
    for _ in range(2):
        pool.leave(entry)
    assert pool.put(candidate("m1")) is not entry, "nothing is kept of what is over"


def test_a_machine_that_is_in_another_region_now_is_chosen_there() -> None:
    pool = load(pool_of(candidate("m1"), candidate("m2", region="ord")), m1=1)
    pool.put(candidate("m1", region="ord"))
    pool.put(candidate("m2"))
    assert taken(pool) == "m2"
    assert taken(pool, Wishes(force_regions=("ord",))) == "m1"


# --- the rules, whatever happens ---

ROWS = st.builds(
    candidate,
    st.sampled_from(NAMES),
    region=st.sampled_from(["ams", "ord", "syd"]),
    state=st.sampled_from(["started"] * 4 + ["stopped", "suspended", "starting", "stopping", "failed"]),
    cordoned=st.sampled_from([False, False, False, True]),
    healthy=st.sampled_from([True, True, True, False]),
    soft=st.integers(1, 3),
    hard=st.sampled_from([0, 3, 4]),
    autostart=st.booleans(),
)
REGIONS = st.lists(st.sampled_from(["ams", "ord", "syd", "fra", "eu", "any"]), max_size=2).map(tuple)
WISHES = st.just(ANY) | st.builds(
    Wishes,
    force_machine=st.sampled_from(["", "", *NAMES]),
    prefer_machine=st.sampled_from(["", "", *NAMES]),
    force_regions=REGIONS,
    prefer_regions=REGIONS,
    not_machine=st.sampled_from(["", "", *NAMES]),
)
ORDER = ["ams", "ord", "syd"]


def can_take(entry: PoolEntry, now: float) -> bool:
    """What the rules say of a machine, from its row and from what happened, without any list."""
    row = entry.row
    runs = row.state == "started" and row.healthy and not row.cordoned
    return runs and not (entry.waking or entry.closing) and entry.rests_until <= now and not entry.full


class Rules(RuleBasedStateMachine):
    """Any pool after any history keeps the rules of the choice."""

    @initialize(seed=st.integers(0, 99), rows=st.lists(ROWS, max_size=8))
    def begin(self, seed: int, rows: list[Candidate]) -> None:
        self.pool = pool_of(*rows, regions=ORDER[1:], seed=seed)
        self.now = 0.0
        self.in_flight: list[PoolEntry] = []

    @rule(row=ROWS)
    def put(self, row: Candidate) -> None:
        self.pool.put(row)

    @rule(machine=st.sampled_from(NAMES))
    def remove(self, machine: str) -> None:
        self.pool.remove(machine)

    @rule(machine=st.sampled_from(NAMES), what=st.sampled_from(["waking", "closing", "doubt"]), on=st.booleans())
    def mark(self, machine: str, what: str, on: bool) -> None:
        if entry := self.pool.entries.get(machine):
            getattr(self.pool, what)(entry, on)

    @rule(machine=st.sampled_from(NAMES), seconds=st.floats(0.001, 3))
    def rest(self, machine: str, seconds: float) -> None:
        if entry := self.pool.entries.get(machine):
            self.pool.rest(entry, self.now + seconds)

    @rule(machine=st.sampled_from(NAMES), count=st.integers(0, 6))
    def told(self, machine: str, count: int) -> None:
        if entry := self.pool.entries.get(machine):
            self.pool.told(entry, count, self.now)

    @rule(seconds=st.floats(0.1, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(n=st.integers(0, 20))
    def leave(self, n: int) -> None:
        if self.in_flight:
            self.pool.leave(self.in_flight.pop(n % len(self.in_flight)))

    @rule(wishes=WISHES, tried=st.sets(st.sampled_from(NAMES), max_size=2), quick=st.booleans())
    def request(self, wishes: Wishes, tried: set[str], quick: bool) -> None:
        if quick:
            found = self.pool.decide(self.now, wishes, tried)
            entry = self.pool.take(self.now, wishes, tried)
            if entry is not None:
                self.in_flight.append(entry)
                assert isinstance(found, Take)
                assert found.starting is None
                assert entry.in_flight <= entry.soft
                self.pool.leave(entry)
                self.check(Take(entry), wishes, tried)
                self.pool.enter(entry)
            return
        decision = self.pool.decide(self.now, wishes, tried)
        self.check(decision, wishes, tried)
        if not isinstance(decision, Nothing):
            self.pool.enter(decision.entry)
            self.in_flight.append(decision.entry)

    def check(self, decision: Decision, wishes: Wishes, tried: set[str]) -> None:
        allowed = self.pool._wanted(wishes)
        entries = [
            entry
            for entry in self.pool.entries.values()
            if entry.region in allowed and entry.machine not in tried and entry.machine != wishes.not_machine
        ]
        if wishes.force_machine:
            entries = [entry for entry in entries if entry.machine == wishes.force_machine]
        able = [entry for entry in entries if can_take(entry, self.now)]
        if isinstance(decision, Nothing):
            assert not able
            return
        if not decision.entry.doubtful:
            able = [entry for entry in able if not entry.doubtful]
        elif entries and not wishes.force_machine:
            assert all(entry.doubtful for entry in able), "one without doubts can take it"
        entry = decision.entry
        assert entry in entries
        assert not entry.full
        if isinstance(decision, Start):
            assert not able
            row = entry.row
            assert not row.cordoned
            assert entry.rests_until <= self.now
            assert decision.pending == (entry.waking or row.state in COMING)
            assert decision.pending or (row.autostart and row.state in ASLEEP)
            return
        if decision.starting:
            assert decision.starting.row.state in ASLEEP
            assert decision.starting.row.autostart
            assert not decision.starting.waking
        if entry.machine in (wishes.prefer_machine, wishes.force_machine):
            return
        if not entry.closing:
            assert can_take(entry, self.now)
        nearer = allowed[: allowed.index(entry.region)]
        assert not [other for other in able if other.region in nearer], "a nearer region can take it"
        beside = [other for other in able if other.region == entry.region]
        if entry.closing:
            assert not beside
        elif entry.in_flight >= entry.soft and not entry.doubtful:
            assert all(other.in_flight >= other.soft for other in beside), "over soft only if all are"

    @invariant()
    def every_count_is_what_is_in_flight(self) -> None:
        counts = Counter(entry.machine for entry in self.in_flight)
        for entry in self.pool.entries.values():
            assert entry.own == counts[entry.machine]
            assert entry.in_flight == entry.own + entry.others

    @invariant()
    def every_seat_is_where_its_own_list_says(self) -> None:
        for home in self.pool._regions.values():
            lists = (home.free, home.busy, home.full, home.leaving, home.coming, home.asleep, home.unwell)
            placed = [entry for each in lists for entry in each]
            assert all(entry.list is each and each[entry.index] is entry for each in lists for entry in each)
            assert set(placed) <= {entry for entry in self.pool.entries.values() if entry.home is home}
            assert all(entry.list is list_of(entry, home) for entry in self.pool.entries.values() if entry.home is home)
            assert home.entries == sum(entry.home is home for entry in self.pool.entries.values())


TestRules = Rules.TestCase
TestRules.settings = settings(max_examples=costly(15), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_choosing_looks_at_two_machines_however_many_there_are(count: int) -> None:
    drawn = 0

    def draw() -> float:
        nonlocal drawn
        drawn += 1
        return 0.5

    pool = Pool("web", "ams", random=draw)
    for n in range(count):
        pool.put(candidate(f"m{n}"))
    pool.take(0.0)
    assert drawn == (2 if count > 1 else 0)

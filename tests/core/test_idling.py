"""When a machine that is not needed is stopped or suspended."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hawker.core.idling import Close, Idler, Pace, Reopen, Running, Stop, Use, Wish
from hawker.core.rendezvous import ranked
from hawker.core.routing import Candidate, Nothing, Pool, PoolEntry, Start, Take

PACE = Pace(idle_s=60, drain_s=30, headroom=0.7)
NAMES = ranked("web", [f"m{n}" for n in range(5)])
"""As all proxies rank them: the first is kept longest."""


def machine(name: str, **fields: Any) -> Running:
    return Running(**{"machine": name, "autostop": "stop", "in_flight": 0, **fields})


def busy(name: str, load: float, **fields: Any) -> Running:
    return machine(name, in_flight=max(1, round(load * 10)), load=load, **fields)


def looked(idler: Idler, running: list[Running], *, since: float, until: float) -> list[tuple[float, Wish]]:
    """What is wished in looks five seconds apart."""
    found = [(now, idler.look(now, running)) for now in [since + 5.0 * n for n in range(int((until - since) / 5) + 1)]]
    return [(now, wish) for now, wish in found if wish]


def test_a_machine_in_which_nothing_happened_for_long_is_stopped() -> None:
    idler = Idler("web", PACE)
    assert idler.look(159, [machine("m1", used_at=100.0)]) is None
    assert idler.look(160, [machine("m1", used_at=100.0)]) == Stop("m1", "stop")
    assert idler.look(160, [machine("m1", used_at=100.0, autostop="suspend")]) == Stop("m1", "suspend")
    assert idler.look(160, [machine("m1", used_at=100.0, autostop="off")]) is None
    assert idler.look(160, [machine("m1", used_at=100.0, in_flight=1)]) is None
    assert idler.look(160, [machine("m1", used_at=100.0, in_flight=None)]) is None, "another proxy is its door"


def test_machines_go_one_at_a_look_the_last_in_rank_first_down_to_the_minimum() -> None:
    idler = Idler("web", PACE)
    running = [machine(name, minimum=2) for name in sorted(NAMES)]
    stopped = []
    for now in range(100, 120):
        wish = idler.look(now, running)
        if isinstance(wish, Stop):
            stopped.append(wish.machine)
            running = [each for each in running if each.machine != wish.machine]
    assert stopped == NAMES[:1:-1]
    assert {each.machine for each in running} == set(NAMES[:2])


def test_one_idle_machine_is_left_to_an_app_whose_others_are_full() -> None:
    full = [busy(name, 1.0) for name in NAMES[:2]]
    assert Idler("web", PACE).look(100, [*full, machine(NAMES[2])]) is None
    assert Idler("web", PACE).look(100, [*full, machine(NAMES[2]), machine(NAMES[3])]) == Stop(NAMES[3], "stop")


def test_nothing_is_stopped_while_a_machine_is_on_its_way() -> None:
    assert Idler("web", PACE).look(100, [machine("m1"), machine("m2")], coming=True) is None


def test_of_machines_that_are_all_used_the_last_is_closed_when_fewer_were_enough_for_long() -> None:
    idler = Idler("web", PACE)
    running = [busy(name, 0.4) for name in NAMES[:3]]
    assert looked(idler, running, since=100, until=160) == [(160, Close(NAMES[2]))]
    assert idler.look(165, running) is None, "requests are still in flight there"
    running[2] = machine(NAMES[2], used_at=166)
    assert idler.look(170, running) == Stop(NAMES[2], "stop")
    assert looked(idler, running[:2], since=175, until=300) == [], "0.8 do not fit into 0.7 of one"


def test_load_that_comes_back_within_the_time_begins_it_anew() -> None:
    idler = Idler("web", PACE)
    few = [busy(name, 0.2) for name in NAMES[:2]]
    many = [busy(name, 0.9) for name in NAMES[:2]]
    for begin in (100, 200, 300):
        assert looked(idler, few, since=begin, until=begin + 50) == []
        assert idler.look(begin + 55, many) is None
    assert looked(idler, few, since=400, until=460) == [(460, Close(NAMES[1]))]


def test_a_machine_that_comes_or_goes_begins_it_anew() -> None:
    idler = Idler("web", PACE)
    assert looked(idler, [busy(name, 0.1) for name in NAMES[:3]], since=100, until=155) == []
    assert looked(idler, [busy(name, 0.1) for name in NAMES[:4]], since=160, until=215) == []
    assert looked(idler, [busy(name, 0.1) for name in NAMES[:2]], since=220, until=280) == [(280, Close(NAMES[1]))]


def test_a_closed_machine_is_opened_again_when_it_is_needed_or_does_not_come_to_rest() -> None:
    for after, running, wish in [
        (5, [busy(NAMES[0], 0.8), busy(NAMES[1], 0.1)], Reopen(NAMES[1])),
        (5, [busy(NAMES[0], 0.2, minimum=2), busy(NAMES[1], 0.1)], Reopen(NAMES[1])),
        (5, [busy(NAMES[0], 0.2), busy(NAMES[1], 0.1, autostop="off")], Reopen(NAMES[1])),
        (30, [busy(NAMES[0], 0.2), busy(NAMES[1], 0.1)], None),
        (31, [busy(NAMES[0], 0.2), busy(NAMES[1], 0.1)], Reopen(NAMES[1])),
        (5, [busy(NAMES[0], 0.2)], None),
    ]:
        idler = Idler("web", PACE)
        assert looked(idler, [busy(name, 0.2) for name in NAMES[:2]], since=0, until=60) == [(60, Close(NAMES[1]))]
        assert idler.look(60 + after, running) == wish
        assert (idler.closed == "") == (after != 30)
    idler = Idler("web", PACE)
    few = [busy(name, 0.2) for name in NAMES[:2]]
    assert looked(idler, few, since=0, until=60) == [(60, Close(NAMES[1]))]
    assert idler.look(65, few, coming=True) == Reopen(NAMES[1])
    assert looked(idler, few, since=70, until=150) == [(130, Close(NAMES[1]))]


def test_machines_that_are_used_now_and_then_come_to_be_one_that_stays() -> None:
    idler = Idler("web", PACE)
    now_and_then = [machine(name, used_at=1000.0) for name in NAMES[:2]]
    assert looked(idler, now_and_then, since=1000, until=1055) == []
    used_again = [machine(name, used_at=1050.0) for name in NAMES[:2]]
    assert idler.look(1060, used_again) == Close(NAMES[1])
    assert idler.look(1065, used_again) == Stop(NAMES[1], "stop")
    assert looked(idler, used_again[:1], since=1070, until=1105) == []


def test_what_other_doors_machines_are_loaded_with_is_taken_to_be_as_here() -> None:
    mine, other = busy(NAMES[1], 0.3), machine(NAMES[0], in_flight=None)
    assert looked(Idler("web", PACE), [mine, other], since=0, until=60) == [(60, Close(NAMES[1]))]
    mine = busy(NAMES[1], 0.5)
    assert looked(Idler("web", PACE), [mine, other], since=0, until=100) == []


def test_only_the_door_of_the_last_in_rank_closes_it() -> None:
    mine, other = busy(NAMES[0], 0.1), machine(NAMES[1], in_flight=None)
    assert looked(Idler("web", PACE), [mine, other], since=0, until=100) == []


def test_of_several_services_the_least_aggressive_and_the_most_used_count() -> None:
    uses = [
        Use(in_flight=1, soft=10, autostop="stop", minimum=1),
        Use(in_flight=3, soft=4, autostop="suspend"),
    ]
    assert Running.of("m", uses, 5.0) == Running(
        machine="m", autostop="suspend", minimum=1, in_flight=4, load=0.75, used_at=5.0
    )
    assert Running.of("m", [*uses, Use(in_flight=0, soft=1, autostop="off")], 5.0).autostop == "off"
    assert Running.of("m", uses, 5.0, mine=False).in_flight is None


RUNNING = st.builds(
    Running,
    machine=st.sampled_from([f"m{n}" for n in range(8)]),
    autostop=st.sampled_from(["off", "stop", "suspend"]),
    minimum=st.integers(0, 3),
    in_flight=st.integers(0, 3) | st.just(0),
    load=st.floats(0, 2),
    used_at=st.floats(0, 50),
)


@given(
    st.lists(st.lists(RUNNING, max_size=8, unique_by=lambda each: each.machine), max_size=30),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_whatever_they_see_doors_together_keep_the_minimum_and_stop_nothing_in_use(
    history: list[list[Running]], doors: int, owners: list[int]
) -> None:
    idlers = [Idler("web", Pace(idle_s=10, drain_s=20)) for _ in range(doors)]
    for n, all_of_them in enumerate(history):
        now = 50.0 + 5 * n
        running = [each if each.in_flight else with_load(each, 0.0) for each in all_of_them]
        stopped = set()
        for door, idler in enumerate(idlers):
            view = [
                each if owners[int(each.machine[1:])] % doors == door else with_load(each, 0.0, in_flight=None)
                for each in running
            ]
            wish = idler.look(now, view)
            if wish is None:
                continue
            seen = {each.machine: each for each in view}[wish.machine]
            assert seen.in_flight is not None, "another's door"
            if isinstance(wish, Stop):
                assert seen.in_flight == 0
                assert wish.how == seen.autostop
                stopped.add(wish.machine)
        least = max((each.minimum for each in running), default=0)
        assert len(running) - len(stopped) >= min(least, len(running))


def with_load(each: Running, load: float, **fields: Any) -> Running:
    return replace(each, load=load, **fields)


# --- under a load that comes and goes ---


class World:
    """Machines of an app behind one door, on a clock that is only a number: requests come, take their time and go;
    machines boot and stop in theirs."""

    BOOT_S, STOP_S, LOOK_S, STEP_S = 0.5, 1.0, 5.0, 0.1
    SOFT, MACHINES = 10, 12

    def __init__(self, pace: Pace, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.pool = Pool("web", "ams", random=self.rng.random)
        self.idler = Idler("web", pace)
        self.state = {f"m{n}": "stopped" for n in range(self.MACHINES)}
        self.used_at = dict.fromkeys(self.state, 0.0)
        self.until: dict[str, float] = {}  # of starts and stops under way
        self.ends: list[tuple[float, PoolEntry]] = []
        self.waiting: list[tuple[float, PoolEntry]] = []
        self.machine_s = self.ideal_s = 0.0
        self.served = self.held = self.starts = self.stops = self.closed = 0
        for name in self.state:
            self.row(name)

    def row(self, name: str) -> None:
        self.pool.put(Candidate(machine=name, region="ams", state=self.state[name], soft=self.SOFT, hard=2 * self.SOFT))

    def run(self, seconds: float, load: Any) -> None:
        look_at = 0.0
        for _ in range(int(seconds / self.STEP_S)):
            self.now += self.STEP_S
            self.moves()
            wanted = load(self.now)
            for _ in range(round(wanted) - len(self.ends) - len(self.waiting)):
                self.request()
            if self.now >= look_at:
                look_at = self.now + self.LOOK_S
                self.look()
            self.machine_s += self.STEP_S * sum(state != "stopped" for state in self.state.values())
            self.ideal_s += self.STEP_S * ceil(round(wanted) / self.SOFT)

    def moves(self) -> None:
        """Whatever ends by now."""
        for name, until in [*self.until.items()]:
            if until <= self.now:
                del self.until[name]
                self.state[name] = "started" if self.state[name] == "starting" else "stopped"
                self.used_at[name] = self.now
                self.row(name)
                self.pool.waking(self.pool.entries[name], False)
        waiting, self.waiting = self.waiting, []
        for since, entry in waiting:
            if self.state[entry.machine] == "started":
                self.serve(entry)
            elif self.state[entry.machine] == "stopped":
                self.start(entry)
                self.waiting.append((since, entry))
            else:
                self.waiting.append((since, entry))
                assert self.now - since < 2 * (self.BOOT_S + self.STOP_S), "it waits for ever"
        for end in [end for end in self.ends if end[0] <= self.now]:
            self.ends.remove(end)
            self.pool.leave(end[1])
            self.used_at[end[1].machine] = self.now

    def request(self) -> None:
        entry = self.pool.take(self.now)
        if entry is not None:
            self.serve(entry)
            return
        found = self.pool.decide(self.now)
        assert not isinstance(found, Nothing), "there are machines enough"
        if isinstance(found, Take) and found.starting is not None:
            self.start(found.starting)
        self.pool.enter(found.entry)
        if isinstance(found, Take):
            self.serve(found.entry)
            return
        assert isinstance(found, Start)
        if not found.pending and self.state[found.entry.machine] == "stopped":
            self.start(found.entry)
        self.held += 1
        self.waiting.append((self.now, found.entry))

    def serve(self, entry: PoolEntry) -> None:
        """Its count was entered before."""
        assert self.state[entry.machine] == "started", "a request met a machine that is not up"
        self.served += 1
        self.ends.append((self.now + self.rng.uniform(0.2, 2.0), entry))

    def start(self, entry: PoolEntry) -> None:
        assert self.state[entry.machine] == "stopped"
        self.starts += 1
        self.state[entry.machine] = "starting"
        self.until[entry.machine] = self.now + self.BOOT_S
        self.pool.waking(entry, True)

    def look(self) -> None:
        running = [
            Running.of(name, [Use(in_flight=entry.in_flight, soft=self.SOFT, autostop="stop")], self.used_at[name])
            for name, entry in self.pool.entries.items()
            if self.state[name] == "started"
        ]
        wish = self.idler.look(self.now, running, coming="starting" in self.state.values())
        if wish is None:
            return
        entry = self.pool.entries[wish.machine]
        self.closed += isinstance(wish, Close)
        self.pool.closing(entry, isinstance(wish, Close))
        if isinstance(wish, Stop):
            assert entry.in_flight == 0, "a request is in flight there"
            assert not [end for end in self.ends if end[1] is entry]
            self.stops += 1
            self.state[wish.machine] = "stopping"
            self.until[wish.machine] = self.now + self.STOP_S
            self.row(wish.machine)


def sudden(now: float) -> float:
    """Requests in flight: from none to 80 in 200 s, back in 50, nothing for 150."""
    at = now % 400
    return at * 0.4 if at < 200 else max(0.0, 80 - (at - 200) * 1.6)


def slow(now: float) -> float:
    """The same with a fall of 400 s."""
    at = now % 700
    return at * 0.4 if at < 200 else max(0.0, 80 - (at - 200) * 0.2)


@pytest.mark.parametrize(("saw_tooth", "closed"), [(sudden, 0), (slow, 10)])
def test_under_a_saw_tooth_machines_follow_the_load_and_no_request_meets_one_that_stops(
    saw_tooth: Callable[[float], float], closed: int
) -> None:
    world = World(Pace(idle_s=20, drain_s=30), 1)
    world.run(2100 if saw_tooth is slow else 1200, saw_tooth)
    ratio = world.machine_s / world.ideal_s
    print(
        f"machine-seconds {world.machine_s:.0f} beside an ideal of {world.ideal_s:.0f}: {ratio:.2f}; {world.served} "
        f"requests, {world.held} held, {world.starts} starts, {world.closed} closed, {world.stops} stops"
    )
    assert 1 <= ratio < 1.5
    assert world.starts == world.stops + sum(state == "started" for state in world.state.values())
    assert world.starts <= 30, "three teeth of eight machines: it does not start and stop all the time"
    assert world.closed >= closed


def test_when_nothing_happens_nothing_runs_and_the_next_request_is_held_until_something_does() -> None:
    world = World(Pace(idle_s=20, drain_s=30), 1)
    world.run(250, sudden)
    world.run(100, lambda now: 0)
    assert set(world.state.values()) == {"stopped"}
    held = world.held
    world.run(1, lambda now: 1)
    assert world.held == held + 1
    assert [*world.state.values()].count("started") == 1


def test_a_load_that_is_steady_starts_and_stops_nothing() -> None:
    world = World(Pace(idle_s=20, drain_s=30), 1)
    world.run(60, lambda now: 35)
    before = world.starts, world.stops
    assert before == (4, 0)
    world.run(600, lambda now: 35)
    assert (world.starts, world.stops) == before

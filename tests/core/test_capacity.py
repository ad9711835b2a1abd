"""The ledger's arithmetic: never oversold and never negative, whoever reserves and releases in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hawker.core import capacity
from hawker.model.guest import RESOURCES, Resources

FULL = Resources(cpus_shared=8, cpus_dedicated=4, memory_mib=4096, disk_mib=8192, machines=6)


def amounts(most: int = 12) -> st.SearchStrategy[Resources]:
    unit = {"cpus_shared": 1, "cpus_dedicated": 1, "memory_mib": 256, "disk_mib": 512, "machines": 1}
    return st.builds(Resources, **{name: st.integers(0, most).map(unit[name].__mul__) for name in RESOURCES})


def test_what_fits_exactly_fits() -> None:
    held = Resources(cpus_shared=7, memory_mib=2048)
    assert capacity.shortfall(FULL, held, capacity.free(FULL, held)) is None


@pytest.mark.parametrize("name", RESOURCES)
def test_one_too_many_of_a_resource_is_refused_with_its_figures(name: str) -> None:
    held = Resources(**{name: 1})
    room = getattr(FULL, name) - 1
    short = capacity.shortfall(FULL, held, Resources(**{name: room + 1}))
    assert short == capacity.Shortfall(resource=name, wanted=room + 1, free=room)


def test_the_first_short_resource_is_named_in_the_fixed_order() -> None:
    everything = Resources(**dict.fromkeys(RESOURCES, 10**6))
    short = capacity.shortfall(FULL, Resources(), everything)
    assert short is not None
    assert short.resource == RESOURCES[0]


def test_a_resource_that_is_not_wanted_is_not_checked() -> None:
    over = Resources(cpus_dedicated=9)  # the worker's capacity was lowered below what it holds
    assert capacity.shortfall(FULL, over, Resources(memory_mib=256)) is None
    short = capacity.shortfall(FULL, over, Resources(cpus_dedicated=1))
    assert short == capacity.Shortfall(resource="cpus_dedicated", wanted=1, free=0)


def test_the_check_names_what_is_oversold_or_negative() -> None:
    with pytest.raises(AssertionError, match="machines oversold: 7 of 6"):
        capacity.check(FULL, Resources(machines=7))
    with pytest.raises(AssertionError, match="disk_mib held is -1"):
        capacity.check(FULL, Resources(disk_mib=-1))


@given(amounts(), amounts())
def test_amounts_add_and_subtract_resource_by_resource(a: Resources, b: Resources) -> None:
    assert a + b - b == a
    assert all(getattr(a + b, name) == getattr(a, name) + getattr(b, name) for name in RESOURCES)


@given(amounts(), amounts(), amounts())
def test_a_shortfall_is_reported_exactly_when_a_wanted_resource_does_not_fit(
    full: Resources, held: Resources, wanted: Resources
) -> None:
    after = held + wanted
    short = [n for n in RESOURCES if getattr(wanted, n) and getattr(after, n) > getattr(full, n)]
    found = capacity.shortfall(full, held, wanted)
    assert ([found.resource] if found else []) == short[:1]
    if found:
        assert found.wanted == getattr(wanted, found.resource)
        assert found.free == max(0, getattr(full, found.resource) - getattr(held, found.resource))


class Ledger(RuleBasedStateMachine):
    """Reservations come, are confirmed, released or lapse; machines stop, start and are destroyed."""

    @initialize(full=amounts(20))
    def begin(self, full: Resources) -> None:
        self.full = full
        self.held = Resources()
        self.reservations: list[tuple[int, Resources]] = []  # (when it lapses, what it holds)
        self.machines: list[tuple[bool, Resources]] = []  # (running, what it takes)
        self.now = 0

    def book(self, wanted: Resources) -> bool:
        if capacity.shortfall(self.full, self.held, wanted):
            return False
        self.held += wanted
        return True

    @rule(wanted=amounts(6), for_s=st.integers(1, 30))
    def reserve(self, wanted: Resources, for_s: int) -> None:
        if self.book(wanted):
            self.reservations.append((self.now + for_s, wanted))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        _, wanted = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        self.machines.append((True, wanted))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, wanted = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        self.held -= wanted

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        for reservation in [r for r in self.reservations if r[0] <= self.now]:
            self.reservations.remove(reservation)
            self.held -= reservation[1]

    @precondition(lambda self: self.machines)
    @rule(data=st.data())
    def stop_or_start(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.machines) - 1))
        running, wanted = self.machines[at]
        moving = wanted - wanted.at_rest()
        if running:
            self.held -= moving
            self.machines[at] = (False, wanted)
        elif self.book(moving):
            self.machines[at] = (True, wanted)

    @precondition(lambda self: self.machines)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        running, wanted = self.machines.pop(data.draw(st.integers(0, len(self.machines) - 1)))
        self.held -= wanted if running else wanted.at_rest()

    @invariant()
    def never_oversold_and_never_negative(self) -> None:
        capacity.check(self.full, self.held)

    @invariant()
    def what_is_held_is_the_sum_of_its_parts(self) -> None:
        total = Resources()
        for _, wanted in self.reservations:
            total += wanted
        for running, wanted in self.machines:
            total += wanted if running else wanted.at_rest()
        assert self.held == total

    @invariant()
    def what_is_free_can_be_had_and_no_more(self) -> None:
        room = capacity.free(self.full, self.held)
        assert capacity.shortfall(self.full, self.held, room) is None
        for name in RESOURCES:
            short = capacity.shortfall(self.full, self.held, Resources(**{name: getattr(room, name) + 1}))
            assert short is not None
            assert short.free == getattr(room, name)


TestLedger = Ledger.TestCase

"""Membership in simulation: what holds under faults, how fast, at what cost, and that breaking a rule is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.kit.tiers import full
from tests.sim.membership.runs import check_speed, crashes, isolation, stalls, storm
from tests.sim.membership.settling import check_settled, settles_in
from tests.sim.membership.watch import Broken
from tests.sim.membership.world import Plan, World

from hawker.core.swim import LAN, Member, Status, plain
from hawker.core.swim.beliefs import Beliefs, Suspicion

Rules = type[Beliefs]


@pytest.mark.parametrize("loss", [0.05, *full(0.0, 0.1)])
def test_a_crash_is_known_to_all_in_time_and_nobody_else_is_held_dead(loss: float) -> None:
    found = crashes(150, 40.0, loss=loss, watched=True)
    check_speed(found, 150)
    assert found.false_deaths == 0


def test_a_quiet_group_costs_each_member_one_ping_and_one_ack_a_second_whatever_its_size() -> None:
    few, many = (crashes(members, 11.0, crashed=1) for members in (30, 300))
    assert few.quiet_packets == pytest.approx(2.0, rel=0.05)
    assert many.quiet_packets == pytest.approx(few.quiet_packets, rel=0.05)


@pytest.mark.parametrize("fault", ["cut", *full("block")])
def test_stalling_members_make_plain_swim_bury_the_healthy_and_ours_does_not(fault: str) -> None:
    ours, theirs = (
        stalls(settings, members=40, stalling=4, seconds=100.0, fault=fault) for settings in (LAN, plain(LAN))
    )
    assert theirs.tally.false_deaths >= 200
    assert ours.tally.false_deaths == 0
    assert ours.tally.refutations > 0  # there was something to refute


def test_half_of_all_members_crash_at_once_and_the_others_know_it_in_time() -> None:
    world = World(Plan(40))
    for n in range(20):
        world.at(5.0, lambda n=n: world.crash(n))  # type: ignore[misc]
    world.run(5.0 + settles_in(LAN, 40))
    check_settled(world)
    assert world.tally.false_deaths == 0


def test_halves_that_were_parted_until_they_buried_each_other_find_back() -> None:
    world = World(Plan(20))
    world.at(5.0, lambda: world.part([0] * 10 + [1] * 10))
    world.run(200.0)
    assert sum(view.status is Status.dead for view in world.nodes[0].members.values()) == 10
    world.heal()
    world.run(200.0 + settles_in(LAN, 20))
    check_settled(world)


def test_a_process_that_stood_still_suspects_nobody_for_it() -> None:
    world = World(Plan(20))
    world.healthy[3] = False
    world.at(5.0, lambda: world.pause(3, True))
    world.at(65.0, lambda: world.pause(3, False))
    world.run(120.0)
    check_settled(world)
    assert [c.name for _, n, c in world.log if n == 3 and c.after is Status.suspect] == []


def test_one_member_cut_off_for_long_believes_all_dead_and_makes_nobody_else_believe_it() -> None:
    world = isolation()
    alone = [changed.name for _, n, changed in world.log if n == 0 and changed.after is Status.dead]
    assert len(set(alone)) == 19


@pytest.mark.parametrize("seed", [0, 1, *full(*range(2, 12))])
def test_after_all_faults_at_once_the_living_are_alive_everywhere_and_the_dead_nowhere(seed: int) -> None:
    world = storm(seed=seed)
    assert world.tally.lost > 0


@pytest.mark.full
def test_twenty_five_more_storms() -> None:
    """Together they take every path that has a name here."""
    taken: set[str] = set()
    for seed in range(100, 125):
        world = storm(seed=seed)
        tally = world.tally
        taken.update(name for name in ("lost", "duplicated", "false_deaths", "refutations") if getattr(tally, name))
        for _, _, changed in world.log:
            if changed.after in (Status.dead, Status.left):
                taken.add(changed.after.name)
            if changed.before is Status.dead and changed.after is Status.alive:
                taken.add("back from the dead" if changed.member.born == 1_700_000_000_000 else "born again")
            if changed.before is Status.dead and changed.after is Status.left:
                taken.add("left after all")
    assert taken >= {"lost", "duplicated", "false_deaths", "refutations", "dead", "left"}
    assert taken >= {"back from the dead", "born again"}


def test_one_seed_gives_one_run() -> None:
    first, second, other = (storm(seed=seed) for seed in (5, 5, 6))
    assert first.log == second.log
    assert first.tally == second.tally
    assert first.log != other.log


# The invariants have teeth: each of these cores has one rule wrong


class Unrefuted(Beliefs):
    """Accusations are not answered."""

    def refute(self, now: float, incarnation: int) -> None:
        return


class Revived(Beliefs):
    """Alive beats dead at equal incarnation."""

    def alive(self, now: float, member: Member, incarnation: int) -> None:
        view = self.table.get(member.name)
        if view is not None and view.status is Status.dead and member.born == view.member.born:
            self.table.forget(member.name)
        super().alive(now, member, incarnation)


class ComesBack(Beliefs):
    """Who left is alive again by stale gossip."""

    def alive(self, now: float, member: Member, incarnation: int) -> None:
        view = self.table.get(member.name)
        if view is not None and view.status is Status.left and member.name != self.me.name:
            self.table.forget(member.name)
        super().alive(now, member, incarnation)


class Unconfirmed(Beliefs):
    """Further accusers do not hasten a suspicion."""

    def _confirms(self, suspicion: Suspicion, accuser: str) -> bool:
        return False


class Credulous(Beliefs):
    """Push-pull believes the dead of others at once."""

    def doubt(self, now: float, member: Member, incarnation: int, sender: str) -> None:
        self.dead(now, member.name, member.born, incarnation, sender)


class Meddling(Beliefs):
    """Whoever passes word of a member on raises its incarnation."""

    def alive(self, now: float, member: Member, incarnation: int) -> None:
        super().alive(now, member, incarnation + (member.name not in self.table))


class Resigned(Beliefs):
    """A member believes that it is dead when others say so."""

    def refute(self, now: float, incarnation: int) -> None:
        self._believe(now, self.me, Status.dead, incarnation)


class Forgetful(Beliefs):
    """Those suspected while nobody heard are not told again, and get no time back."""

    def repeat_suspicions(self) -> None:
        return

    def postpone(self, now: float, seconds: float, *, silence: bool) -> None:
        return


def in_storms(rules: Rules) -> None:
    for seed in range(40):
        storm(seed=seed, rules=rules)


def when_isolated(rules: Rules) -> None:
    for seed in range(3):
        isolation(seed=seed, rules=rules)


def in_speed(rules: Rules) -> None:
    check_speed(crashes(150, 40.0, watched=True, rules=rules), 150)


def in_stalls(rules: Rules) -> None:
    world = stalls(LAN, members=40, stalling=4, seconds=100.0, rules=rules)
    if world.tally.false_deaths:
        raise Broken(f"{world.tally.false_deaths} false deaths")


@pytest.mark.parametrize(
    ("rules", "run"),
    [
        (Unrefuted, in_storms),
        (Revived, in_storms),
        (ComesBack, in_storms),
        (Unconfirmed, in_speed),
        (Credulous, when_isolated),
        (Meddling, in_storms),
        (Resigned, in_storms),
        (Forgetful, in_stalls),
    ],
    ids=lambda of: of.__name__ if isinstance(of, type) else "",
)
def test_a_core_with_one_rule_wrong_is_found_out(rules: Rules, run: Callable[[Rules], None]) -> None:
    with pytest.raises(Broken):
        run(rules)


@pytest.mark.parametrize("run", [when_isolated, *full(in_speed, in_stalls)])
def test_what_finds_them_out_passes_the_right_core(run: Callable[[Rules], None]) -> None:
    run(Beliefs)

"""What is believed of a member, and when it changes."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.swim.group import known, member
from tests.sim.membership.watch import rank

from hawker.core.swim import LAN, Action, Changed, Conflict, Known, Member, Status, View, plain
from hawker.core.swim.beliefs import INF, Beliefs
from hawker.core.swim.wire import Alive, Dead, Entry, Rumour, Suspect

ALIVE, SUSPECT, DEAD, LEFT = Status
PEERS = ("me", "x", "a", "b", "c", "d")


def beliefs(*names: str, me: str = "me") -> Beliefs:
    return Beliefs(member(me), LAN, known(*(names or PEERS)), [])


def view_of(of: Beliefs, name: str = "x") -> View:
    return of.table[name]


def told(of: Beliefs) -> dict[str, Rumour]:
    """The rumours that wait, by member."""
    decode = msgspec.msgpack.Decoder(Rumour).decode
    levels = of.rumours._levels
    return {name: decode(raw) for level in levels for name, (raw, _) in level.items()}


def changes(of: Beliefs) -> list[tuple[str, Status | None, Status | None]]:
    return [(a.name, a.before, a.after) for a in of.actions if isinstance(a, Changed)]


def hear(of: Beliefs, word: Status, incarnation: int, born: int = 1_000, now: float = 1.0) -> None:
    if word is ALIVE:
        of.alive(now, member("x", born), incarnation)
    elif word is SUSPECT:
        of.suspect(now, "x", born, incarnation, "a")
    else:
        of.dead(now, "x", born, incarnation, "x" if word is LEFT else "a")


@pytest.mark.parametrize(
    ("believed", "word", "then"),
    [
        ((ALIVE, 2), (ALIVE, 2), (ALIVE, 2)),
        ((ALIVE, 2), (ALIVE, 3), (ALIVE, 3)),
        ((ALIVE, 2), (SUSPECT, 1), (ALIVE, 2)),
        ((ALIVE, 2), (SUSPECT, 2), (SUSPECT, 2)),
        ((ALIVE, 2), (DEAD, 1), (ALIVE, 2)),
        ((ALIVE, 2), (DEAD, 2), (DEAD, 2)),
        ((SUSPECT, 2), (ALIVE, 2), (SUSPECT, 2)),
        ((SUSPECT, 2), (ALIVE, 3), (ALIVE, 3)),
        ((SUSPECT, 2), (SUSPECT, 3), (SUSPECT, 3)),
        ((SUSPECT, 2), (DEAD, 2), (DEAD, 2)),
        ((DEAD, 2), (ALIVE, 2), (DEAD, 2)),
        ((DEAD, 2), (ALIVE, 3), (ALIVE, 3)),
        ((DEAD, 2), (SUSPECT, 3), (DEAD, 2)),
        ((DEAD, 2), (DEAD, 3), (DEAD, 3)),
        ((DEAD, 2), (LEFT, 2), (LEFT, 2)),
        ((LEFT, 2), (ALIVE, 3), (LEFT, 2)),
        ((LEFT, 2), (DEAD, 2), (LEFT, 2)),
    ],
)
def test_of_one_life_a_higher_incarnation_wins_and_at_equal_ones_the_graver_word(
    believed: tuple[Status, int], word: tuple[Status, int], then: tuple[Status, int]
) -> None:
    of = beliefs()
    hear(of, ALIVE, believed[1])
    if believed[0] is not ALIVE:
        hear(of, *believed)
    hear(of, *word)
    assert (view_of(of).status, view_of(of).incarnation) == then


WORDS = st.tuples(st.sampled_from(list(Status)), st.integers(0, 4))


@given(st.lists(WORDS.filter(lambda word: word[0] is not SUSPECT), max_size=8), st.randoms(use_true_random=False))
def test_who_heard_the_same_of_a_life_in_whatever_order_believes_the_same(
    words: list[tuple[Status, int]], rng: Random
) -> None:
    """Suspicion aside: it ends by itself, one way or the other."""
    orderly, shuffled = beliefs(), beliefs()
    for word in words:
        hear(orderly, *word)
    rng.shuffle(words)
    for word in words:
        hear(shuffled, *word)
    assert view_of(orderly).status is view_of(shuffled).status
    if view_of(orderly).status is not LEFT:
        assert view_of(orderly).incarnation == view_of(shuffled).incarnation


@given(st.lists(st.tuples(WORDS, st.integers(998, 1_002)), max_size=12))
def test_what_is_believed_of_a_name_only_rises(words: list[tuple[tuple[Status, int], int]]) -> None:
    of = beliefs()
    before = rank(view_of(of))
    for (word, incarnation), born in words:
        hear(of, word, incarnation, born)
        assert before <= (before := rank(view_of(of)))


@given(st.lists(st.tuples(WORDS, st.integers(998, 1_002), st.booleans()), max_size=12))
def test_i_never_believe_myself_dead_and_my_incarnation_only_rises(
    words: list[tuple[tuple[Status, int], int, bool]],
) -> None:
    of = beliefs(me="x")
    before = (of.me.born, of.incarnation)
    for (word, incarnation), born, elsewhere in words:
        if word is ALIVE:
            of.alive(1.0, member("x", born, "elsewhere" if elsewhere else ""), incarnation)
        else:
            hear(of, word, incarnation, born)
        assert view_of(of).status is ALIVE
        assert view_of(of).member == of.me
        assert before <= (before := (of.me.born, of.incarnation))


def test_an_accusation_of_me_is_answered_with_a_higher_incarnation_and_an_old_one_with_the_answer_it_had() -> None:
    of = beliefs(me="x")
    of.suspect(1.0, "x", 1_000, 4, "a")
    assert told(of)["x"] == Alive(of.me, 5)
    of.rumours.drop("x")
    of.dead(1.0, "x", 1_000, 4, "a")
    assert told(of)["x"] == Alive(of.me, 5)
    assert (of.incarnation, of.refuted) == (5, 1)


def test_an_accusation_of_my_former_life_is_none_of_me() -> None:
    of = beliefs(me="x")
    of.suspect(1.0, "x", 999, 9, "a")
    assert told(of) == {}


def test_who_leaves_says_so_itself_and_answers_no_accusation() -> None:
    of = beliefs(me="x")
    of.leave(1.0)
    of.dead(2.0, "x", 1_000, 0, "a")
    assert told(of)["x"] == Dead("x", 1_000, 0, "x")
    assert view_of(of).status is LEFT


def test_a_later_life_replaces_an_earlier_one_even_one_that_left() -> None:
    of = beliefs()
    hear(of, LEFT, 7)
    hear(of, ALIVE, 0, born=1_001)
    assert (view_of(of).status, view_of(of).incarnation) == (ALIVE, 0)
    hear(of, ALIVE, 9, born=1_000)
    assert view_of(of).member.born == 1_001
    assert changes(of) == [("x", ALIVE, LEFT), ("x", LEFT, ALIVE)]


def test_a_life_that_others_know_to_have_left_is_followed_by_a_later_one() -> None:
    of = beliefs(me="x")
    of.dead(1.0, "x", 1_000, 0, "x")
    assert told(of)["x"] == Alive(member("x", 1_001), 0)


def test_after_the_clock_went_back_i_begin_later_than_my_former_life() -> None:
    of = beliefs(me="x")
    of.alive(1.0, member("x", 5_000), 3)
    assert of.me.born == 5_001
    of.dead(1.0, "x", 6_000, 0, "a")
    assert of.me.born == 6_001
    assert [a for a in of.actions if isinstance(a, Conflict)] == []


def test_another_holder_of_my_name_is_reported_once() -> None:
    of = beliefs(me="x")
    other = member("x", 5_000, "elsewhere")
    for _ in range(3):
        of.alive(1.0, other, 0)
    assert [a for a in of.actions if isinstance(a, Conflict)] == [Conflict(of.me, other)]
    assert of.me.born == 1_000


def test_one_life_at_two_addresses_is_a_conflict_and_the_first_stays() -> None:
    of = beliefs()
    of.alive(1.0, member("x", 1_000, "elsewhere"), 1)
    assert view_of(of).member == member("x")
    assert [type(a) for a in of.actions] == [Conflict]


def test_new_particulars_come_with_a_higher_incarnation() -> None:
    of = beliefs()
    of.alive(1.0, replace(member("x"), meta="new"), 1)
    of.alive(1.0, replace(member("x"), meta="old"), 1)
    assert view_of(of).member.meta == "new"
    assert changes(of) == [("x", ALIVE, ALIVE)]


# Suspicion


def deadline(accusers: list[str], members: int = 6) -> float:
    of = beliefs(*PEERS[:members])
    for accuser in accusers:
        of.suspect(10.0, "x", 1_000, 0, accuser)
    return of.next_deadline() - 10.0


def test_a_suspicion_ends_sooner_the_more_agree() -> None:
    assert deadline(["a"]) == pytest.approx(24.0)
    assert deadline(["a", "b"]) == pytest.approx(24.0 - 20.0 * 0.63093, abs=1e-4)
    assert deadline(["a", "b", "c"]) == pytest.approx(4.0)
    assert deadline(["a", "b", "c", "d"]) == pytest.approx(4.0)
    assert deadline(["a", "a", "a"]) == pytest.approx(24.0)


def test_where_there_are_too_few_to_agree_it_ends_after_the_shortest_time() -> None:
    assert deadline(["a"], members=3) == pytest.approx(4.0)


def test_plain_swim_waits_as_long_whoever_agrees() -> None:
    of = Beliefs(member("me"), plain(LAN), known(*PEERS), [])
    for accuser in ("a", "b", "c"):
        of.suspect(10.0, "x", 1_000, 0, accuser)
    assert of.next_deadline() == pytest.approx(14.0)


@pytest.mark.parametrize(("members", "least", "most"), [(100, 8, 48), (1_000, 12, 72), (10_000, 16, 96)])
def test_the_timeouts_are_those_of_memberlist(members: int, least: float, most: float) -> None:
    assert LAN.suspicion_timeout(2, LAN.confirmations(members), members) == pytest.approx(least)
    assert LAN.suspicion_timeout(0, LAN.confirmations(members), members) == pytest.approx(most)


def test_rumours_are_sent_as_often_as_memberlist_sends_them() -> None:
    assert [LAN.retransmits(members) for members in (100, 1_000, 5_000, 10_000)] == [12, 16, 16, 20]


def test_each_further_accuser_that_counts_is_passed_on() -> None:
    of = beliefs()
    for accuser in ("a", "b", "c", "d"):
        of.suspect(10.0, "x", 1_000, 0, accuser)
    assert told(of)["x"] == Suspect("x", 1_000, 0, "c")


def test_a_suspect_whose_time_is_up_is_dead_and_one_that_answered_is_not() -> None:
    of = beliefs()
    of.suspect(10.0, "x", 1_000, 0, "a")
    of.suspect(10.0, "a", 1_000, 0, "me")
    of.alive(11.0, member("a"), 1)
    of.expire(33.9)
    assert view_of(of).status is SUSPECT
    of.expire(34.0)
    assert view_of(of).status is DEAD
    assert told(of)["x"] == Dead("x", 1_000, 0, "me")
    assert view_of(of, "a").status is ALIVE


def test_an_accusation_of_a_newer_incarnation_begins_anew() -> None:
    of = beliefs()
    of.suspect(10.0, "x", 1_000, 0, "a")
    of.suspect(20.0, "x", 1_000, 1, "b")
    assert of.next_deadline() == pytest.approx(44.0)


def test_time_in_which_nothing_was_heard_is_given_back_up_to_once_the_longest_timeout() -> None:
    of = beliefs()
    of.suspect(10.0, "x", 1_000, 0, "a")
    of.postpone(16.0, 5.0, silence=True)
    assert of.next_deadline() == pytest.approx(39.0)
    of.postpone(17.0, 30.0, silence=True)  # longer than it is suspect: begins anew
    assert of.next_deadline() == pytest.approx(41.0)
    for at in range(20, 400, 10):
        of.postpone(at, 10.0, silence=True)
    assert of.next_deadline() == pytest.approx(34.0 + 24.0)


def test_time_in_which_i_stood_still_is_given_back_whole() -> None:
    of = beliefs()
    for accuser in ("a", "b", "c"):
        of.suspect(10.0, "x", 1_000, 0, accuser)
    of.postpone(200.0, 189.0, silence=False)
    of.expire(200.0)
    assert of.next_deadline() == pytest.approx(203.0)


# Memory


def test_the_dead_are_remembered_for_a_while_and_then_forgotten() -> None:
    of = beliefs()
    hear(of, DEAD, 0, now=100.0)
    hear(of, LEFT, 0, now=200.0)
    assert of.next_deadline() == 100.0 + LAN.remember_dead
    of.expire(150.0 + LAN.remember_dead)
    assert view_of(of).status is LEFT
    of.expire(200.0 + LAN.remember_dead)
    assert "x" not in of.table
    assert changes(of)[-1] == ("x", LEFT, None)
    assert "x" not in of.rumours
    assert of.next_deadline() == INF


def test_who_came_back_is_not_forgotten_for_having_been_dead() -> None:
    of = beliefs()
    hear(of, DEAD, 0, now=100.0)
    hear(of, ALIVE, 1, now=101.0)
    of.expire(200.0 + LAN.remember_dead)
    assert view_of(of).status is ALIVE


def test_more_members_than_a_table_may_hold_are_refused() -> None:
    of = Beliefs(member("me"), replace(LAN, members_max=len(PEERS)), known(*PEERS), [])
    of.alive(1.0, member("late"), 0)
    assert "late" not in of.table
    assert of.refused == 1


# The word of a whole table


def merged(status: Status, incarnation: int = 0, name: str = "x") -> Beliefs:
    of = beliefs()
    of.merge(1.0, "a", [Entry(member(name), status, incarnation)])
    return of


def test_the_dead_of_a_push_pull_are_only_suspect() -> None:
    of = merged(DEAD)
    assert view_of(of).status is SUSPECT
    assert told(of)["x"] == Suspect("x", 1_000, 0, "a")


def test_who_left_according_to_a_push_pull_has_left() -> None:
    assert view_of(merged(LEFT)).status is LEFT


def test_an_unknown_dead_member_of_a_push_pull_stays_unknown_and_an_unknown_suspect_does_not() -> None:
    assert "new" not in merged(DEAD, name="new").table
    assert "new" not in merged(LEFT, name="new").table
    assert view_of(merged(SUSPECT, name="new"), "new").status is SUSPECT


def test_i_answer_a_push_pull_that_has_me_dead() -> None:
    of = merged(DEAD, 3, name="me")
    assert told(of)["me"] == Alive(of.me, 4)


def test_a_table_laid_over_a_shared_one_leaves_that_alone() -> None:
    shared = known(*PEERS)
    actions: list[Action] = []
    of = Beliefs(Member("me", 1_000, "me.sim", 7946), LAN, shared, actions)
    hear(of, DEAD, 0)
    of.alive(1.0, member("new"), 0)
    assert shared.views["x"].status is ALIVE
    assert isinstance(shared, Known)
    assert "new" not in shared.views

"""How fresh a view is, and when a node should get no traffic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.freshness import BEHIND_S, ISOLATED_S, Freshness, Standing, unfit
from hawker.model.catalog import LogId, Position

LOG = LogId("ord-1", "region")


def at(head: int, epoch: int = 1) -> Position:
    return Position(epoch, head)


def test_a_log_nobody_spoke_of_was_never_confirmed() -> None:
    assert Freshness().standing(LOG, at(3), 5.0) == Standing(None, 0.0)


def test_an_owner_that_tells_of_nothing_new_confirms_what_is_there() -> None:
    freshness = Freshness()
    freshness.told(LOG, at(3), at(3), 10.0)
    assert freshness.standing(LOG, at(3), 14.0) == Standing(4.0, 0.0)


def test_an_owner_that_tells_of_more_leaves_the_replica_behind_until_it_has_caught_up() -> None:
    freshness = Freshness()
    freshness.told(LOG, at(3), at(3), 10.0)
    freshness.told(LOG, at(5), at(3), 20.0)
    freshness.told(LOG, at(7), at(4), 25.0)
    assert freshness.standing(LOG, at(6), 30.0) == Standing(20.0, 10.0)
    assert freshness.standing(LOG, at(7), 31.0) == Standing(6.0, 0.0), "as of when it was told"
    freshness.told(LOG, at(7), at(7), 40.0)
    assert freshness.standing(LOG, at(7), 41.0) == Standing(1.0, 0.0)


def test_a_new_epoch_is_ahead_of_every_number_of_the_old_one() -> None:
    freshness = Freshness()
    freshness.told(LOG, at(2, epoch=2), at(900, epoch=1), 10.0)
    assert freshness.standing(LOG, at(900, epoch=1), 11.0) == Standing(None, 1.0)


def test_what_was_told_late_confirms_nothing_and_takes_nothing_back() -> None:
    freshness = Freshness()
    freshness.told(LOG, at(9), at(3), 10.0)
    freshness.told(LOG, at(8), at(3), 12.0)
    assert freshness.standing(LOG, at(8), 13.0) == Standing(None, 3.0)
    freshness.told(LOG, at(8), at(8), 14.0)
    assert freshness.standing(LOG, at(8), 15.0) == Standing(None, 5.0)
    freshness.told(LOG, at(8), at(9), 16.0)
    assert freshness.standing(LOG, at(9), 17.0) == Standing(7.0, 0.0)


def test_a_forgotten_owner_leaves_nothing_behind() -> None:
    freshness = Freshness()
    freshness.told(LOG, at(9), at(3), 10.0)
    freshness.forget("ord-1")
    assert freshness.standing(LOG, at(3), 13.0) == Standing()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20))
def test_a_replica_is_never_called_current_as_of_a_time_when_it_lacked_what_it_was_told(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Heads only grow, the owner tells of its head or does not, the replica gets some of it."""
    freshness = Freshness()
    head, mine = 0, 0
    heads: list[int] = []
    for now, (written, got, tells) in enumerate(steps):
        head += written
        mine = min(head, mine + got)
        heads.append(head)
        if tells:
            freshness.told(LOG, at(head), at(mine), float(now))
        standing = freshness.standing(LOG, at(mine), float(now))
        if standing.confirmed_s is not None:
            assert mine >= heads[now - int(standing.confirmed_s)]


@pytest.mark.parametrize(
    ("behind_s", "others", "silent_s", "why"),
    [
        (0.0, 0, 1e9, ""),
        (BEHIND_S, 5, ISOLATED_S, ""),
        (BEHIND_S + 1, 5, 0.0, "behind: it has known for 31 s of versions that it lacks"),
        (0.0, 5, ISOLATED_S + 1, "isolated: it has heard from none of 5 other nodes for 61 s"),
    ],
    ids=["alone in the world", "at both limits", "behind", "isolated"],
)
def test_a_node_that_is_behind_or_isolated_says_why_it_should_get_no_traffic(
    behind_s: float, others: int, silent_s: float, why: str
) -> None:
    assert unfit(behind_s=behind_s, others=others, silent_s=silent_s) == why


def test_silence_is_counted_from_the_last_word_of_anybody() -> None:
    freshness = Freshness()
    assert freshness.silent_s(100.0) == 0.0
    assert freshness.silent_s(130.0) == 30.0
    freshness.reached(140.0)
    assert freshness.silent_s(145.0) == 5.0

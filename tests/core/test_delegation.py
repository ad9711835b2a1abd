"""Places that somebody fills without asking, and those that are given here, are together below the hard limit."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.routing import Candidate, Pool, PoolEntry, Take, delegable

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.just(0)),
        st.tuples(st.just("end"), st.just(0)),
        st.tuples(st.just("fill"), st.integers(0, 30)),
        st.tuples(st.just("tell"), st.just(0)),
        st.tuples(st.just("take back"), st.just(0)),
        st.tuples(st.just("lend"), st.just(0)),
    ),
    max_size=80,
)


def pool(soft: int, hard: int) -> tuple[Pool, PoolEntry]:
    made = Pool("web", "ams", random=lambda: 0.5)
    return made, made.put(Candidate(machine="m1", region="ams", state="started", soft=soft, hard=hard))


@given(soft=st.integers(1, 12), hard=st.integers(1, 14), steps=STEPS)
def test_the_hard_limit_holds_whatever_is_lent(soft: int, hard: int, steps: list[tuple[str, int]]) -> None:
    made, entry = pool(soft, hard)
    delegated = filled = own = 0
    for step, number in steps:
        if step == "ask":
            if made.take(0.0) is not None:
                own += 1
            elif isinstance(decision := made.decide(0.0), Take):
                made.enter(decision.entry)
                own += 1
        elif step == "end" and own:
            made.leave(entry)
            own -= 1
        elif step == "fill":
            filled = min(number, delegated) if delegated else min(filled, number)
        elif step == "tell":
            made.delegate(entry, delegated, filled)
        elif step == "take back":
            delegated = 0
            made.delegate(entry, delegated, filled)
        elif step == "lend":
            delegated = max(0, min(delegable(soft, hard), hard - own))
            made.delegate(entry, delegated, filled)
        assert own + filled <= hard
        assert entry.own == own


def test_something_is_left_that_is_decided_here() -> None:
    for soft, hard in product(range(1, 31), range(31)):
        slots = delegable(soft, hard)
        assert 0 <= slots <= soft
        assert not hard or slots < hard


def test_what_is_filled_counts_to_the_soft_limit() -> None:
    made, entry = pool(2, 0)
    made.delegate(entry, 2, 2)
    assert made.take(0.0) is None
    made.delegate(entry, 2, 1)
    assert made.take(0.0) is entry


def test_what_is_filled_does_not_lapse() -> None:
    made, entry = pool(2, 4)
    made.delegate(entry, 2, 2)
    made.rest(entry, 1.0)
    made.decide(1e6)
    assert entry.in_flight == 2

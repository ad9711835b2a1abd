"""Which worker decides: the same for everybody who knows the same workers, and seldom another one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.rendezvous import LOOKED_AT, SETTLED_MS, ranked, settled

names = st.lists(st.from_regex("[a-z]{3}-[0-9]", fullmatch=True), min_size=1, max_size=12, unique=True)


@given(workers=names, key=st.text(max_size=20))
def test_the_order_does_not_depend_on_who_is_known_first(workers: list[str], key: str) -> None:
    shuffled = sorted(workers, reverse=True)
    assert ranked(key, shuffled) == ranked(key, workers)
    assert sorted(ranked(key, workers)) == sorted(workers)


@given(workers=names, newcomers=names, key=st.text(max_size=20))
def test_what_was_decided_is_found_after_as_many_workers_have_come_as_are_looked_at_beside_the_first(
    workers: list[str], newcomers: list[str], key: str
) -> None:
    before = ranked(key, workers)[0]
    come = [name for name in newcomers if name not in workers][: LOOKED_AT - 1]
    assert before in ranked(key, [*workers, *come])[:LOOKED_AT]


@given(workers=names, key=st.text(max_size=20))
def test_a_worker_that_goes_hands_over_nothing_but_its_own_keys(workers: list[str], key: str) -> None:
    first, *rest = ranked(key, workers)
    for gone in rest:
        assert ranked(key, [name for name in workers if name != gone])[0] == first


def test_keys_are_shared_out_evenly() -> None:
    workers = [f"ord-{n}" for n in range(5)]
    shares = Counter(ranked(f"key-{n}", workers)[0] for n in range(5000))
    assert all(850 < shares[name] < 1150 for name in workers)


def test_a_newcomer_decides_nothing_until_everybody_has_heard_of_it() -> None:
    since_ms = {"ord-1": 0, "ord-2": 10 * SETTLED_MS}
    assert settled(since_ms, 10 * SETTLED_MS + 1) == ["ord-1"]
    assert settled(since_ms, 11 * SETTLED_MS) == ["ord-1", "ord-2"]


def test_in_a_fleet_that_is_new_as_a_whole_everybody_decides() -> None:
    since_ms = {"ord-1": 5_000_000, "ord-2": 5_000_000 + SETTLED_MS}
    assert settled(since_ms, 5_000_001) == ["ord-1", "ord-2"]
    assert settled({}, 0) == []

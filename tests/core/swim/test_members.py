"""The table of beliefs and the order of probing."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.core.swim.group import known, member

from hawker.core.swim import Known, Status, View
from hawker.core.swim.members import Order, Table

NAMES = [f"n{n}" for n in range(8)]
VIEWS = st.builds(
    lambda name, born, status, incarnation: View(member(name, born), status, incarnation),
    st.sampled_from(NAMES),
    st.integers(1, 2),
    st.sampled_from(list(Status)),
    st.integers(0, 2),
)


@given(st.lists(VIEWS | st.sampled_from(NAMES), max_size=30))
def test_a_table_over_a_shared_one_is_as_good_as_one_of_its_own(does: list[View | str]) -> None:
    """A view is put, a name forgotten."""
    shared = known(*NAMES[:4])
    table, model = Table(shared), dict(shared.views)
    for one in does:
        if isinstance(one, View):
            assert table.put(one) == model.get(one.member.name)
            model[one.member.name] = one
        else:
            assert table.forget(one) == model.pop(one, None)
        assert dict(table.items()) == model
        assert len(table) == len(model)
        assert table.live == sum(view.status.live for view in model.values())
        assert table.digests == Known(model.values()).digests


def test_digests_tell_lives_and_incarnations_apart_and_neither_suspicion_nor_the_dead() -> None:
    def digest(*views: View) -> int:
        return Table(Known(views)).digest()

    alive = View(member("x"), Status.alive, 1)
    assert digest(alive) == digest(View(member("x"), Status.suspect, 1, since=9.0))
    assert digest() == digest(View(member("x"), Status.dead, 1)) == digest(View(member("y"), Status.left, 1))
    others = [alive, View(member("x"), Status.alive, 2), View(member("x", 2), Status.alive, 1)]
    assert len({digest(), *map(digest, others), digest(View(member("y"), Status.alive, 1))}) == 5


def round_of(order: Order, rng: Random) -> list[str]:
    return list(iter(lambda: order.draw(rng), None))


@given(st.integers(0, 40), st.integers(0, 2**32))
def test_a_round_draws_each_once(size: int, seed: int) -> None:
    names = tuple(map(str, range(size)))
    order = Order(names)
    assert sorted(round_of(order, Random(seed))) == sorted(names)
    order.begin(names[1:])
    assert sorted(round_of(order, Random(seed))) == sorted(names[1:])


def test_every_place_in_a_round_is_as_likely_for_a_newcomer_as_for_anyone_still_to_come() -> None:
    places: Counter[int] = Counter()
    for seed in range(3_000):
        rng = Random(seed)
        order = Order(("a", "b", "c"))
        order.draw(rng)
        order.add("new")
        places[round_of(order, rng).index("new")] += 1
    assert set(places) == {0, 1, 2}
    assert min(places.values()) > 850


def test_names_at_random_are_any_of_many_and_all_of_a_few() -> None:
    rng = Random(1)
    few, many = Order(("a", "b", "c")), Order(tuple(map(str, range(1_000))))
    assert sorted(few.some(rng, 24)) == ["a", "b", "c"]
    assert len(list(many.some(rng, 24))) == 24
    assert len({name for _ in range(500) for name in many.some(rng, 24)}) == 1_000

"""Two members compare their tables."""

from __future__ import annotations

from random import Random

import pytest
from tests.core.swim.group import known, member

from hawker.core.swim import LAN, Known, Status, Swim, View

NAMES = [f"n{n}" for n in range(60)]


def node(name: str, table: Known | None = None) -> Swim:
    swim = Swim(member(name), LAN, Random(name), known=table)
    swim.start(0.0)
    return swim


def exchange(asker: Swim, answerer: Swim) -> list[int]:
    """Sizes of what went over, asks and answers."""
    sizes = []
    body: bytes | None = asker.push_pull_ask(1.0)
    while body is not None:
        answer = answerer.push_pull_answer(1.0, body)
        sizes += [len(body), len(answer)]
        body = asker.push_pull_done(1.0, answer)
    return sizes


def pair() -> tuple[Swim, Swim]:
    table = known("a", "b", *NAMES)
    return node("a", table), node("b", table)


def test_tables_that_agree_cost_a_hundred_bytes() -> None:
    sizes = exchange(*pair())
    assert len(sizes) == 2
    assert sum(sizes) < 100


def test_only_the_parts_that_differ_go_over() -> None:
    a, b = pair()
    a.beliefs.alive(1.0, member("of a"), 0)
    b.beliefs.alive(1.0, member("n7"), 5)
    sizes = exchange(a, b)
    assert len(sizes) == 4
    assert sum(sizes[2:]) < 400
    assert b.members["of a"].status is Status.alive
    assert a.members["n7"].incarnation == 5
    assert len(exchange(a, b)) == 2


def test_a_newcomer_that_knows_one_address_knows_all_afterwards_and_is_known_there() -> None:
    new, seed = node("new"), node("b", known("b", *NAMES))
    exchange(new, seed)
    assert sorted(new.members) == sorted(seed.members) == sorted(["new", "b", *NAMES])


def test_the_dead_of_one_become_suspect_to_the_other_and_who_left_is_believed() -> None:
    a, b = pair()
    a.beliefs.dead(1.0, "n1", 1_000, 0, "c")
    a.beliefs.dead(1.0, "n2", 1_000, 0, "n2")
    exchange(b, a)
    assert b.members["n1"].status is Status.suspect
    assert b.members["n2"].status is Status.left
    assert a.members["n1"].status is Status.dead


def test_suspicions_go_both_ways_though_digests_agree() -> None:
    a, b = pair()
    a.beliefs.suspect(1.0, "n1", 1_000, 0, "c")
    b.beliefs.suspect(1.0, "n2", 1_000, 0, "c")
    assert len(exchange(a, b)) == 2
    assert a.members["n2"].status is b.members["n1"].status is Status.suspect


def test_who_is_held_dead_hears_it_and_answers() -> None:
    a, b = pair()
    a.beliefs.dead(1.0, "b", 1_000, 0, "c")
    exchange(a, b)
    exchange(a, b)
    assert a.members["b"] == View(member("b"), Status.alive, 1, since=1.0)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xc1", b"\x91" * 5_000, b"\x94\x00\x00\x00\x00", b"\x92\x01\x01"])
def test_a_body_of_no_known_form_raises_value_error(body: bytes) -> None:
    a, _ = pair()
    with pytest.raises(ValueError):  # noqa: PT011  # every kind of it
        a.push_pull_answer(1.0, body)
    with pytest.raises(ValueError):  # noqa: PT011
        a.push_pull_done(1.0, body)

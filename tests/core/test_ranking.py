"""Ranking is a pure function of the offers, the order and the policy; every term of a score is kept."""

from __future__ import annotations

import random
from math import fsum, inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core import ranking
from hawker.core.ranking import HEADROOM, POLICIES, CurvePolicy, check_curve, policy, used_after, utility
from hawker.errors import Invalid
from hawker.model.guest import RESOURCES, Resources
from hawker.model.market import Offer, Scored, Term

FULL = Resources(cpus_shared=16, cpus_dedicated=8, memory_mib=8192, disk_mib=65536, machines=50)
SMALL = Resources(cpus_shared=1, memory_mib=256, disk_mib=1024, machines=1)
DEDICATED = Resources(cpus_dedicated=2, memory_mib=4096, disk_mib=1024, machines=1)


def an_offer(worker: str = "w", *, used: float = 0.0, capacity: Resources = FULL, **fields: Any) -> Offer:
    """An offer of a worker whose every resource is used by that part."""
    free = Resources(**{name: int(getattr(capacity, name) * (1 - used)) for name in RESOURCES})
    return Offer(**{"worker": worker, "region": "ord", "capacity": capacity, "free": free, **fields})


def workers(scored: list[Scored]) -> list[str]:
    return [one.worker for one in scored]


amounts = st.builds(Resources, **{name: st.integers(0, 20) for name in RESOURCES})


@st.composite
def offer_lists(draw: st.DrawFn) -> list[Offer]:
    offers = []
    for n in range(draw(st.integers(0, 6))):
        capacity = draw(amounts)
        free = Resources(**{name: draw(st.integers(-2, getattr(capacity, name))) for name in RESOURCES})
        missing = draw(st.integers(0, 2 << 30))
        offers.append(
            Offer(
                worker=f"w{n}",
                region="ord",
                capacity=capacity,
                free=free,
                image_missing_bytes=missing,
                image_known=draw(st.booleans()),
                image_transfer_ms=draw(st.integers(0, 600_000)),
                app_machines=draw(st.integers(0, 5)),
            )
        )
    return offers


@given(offer_lists(), amounts, st.sampled_from(sorted(POLICIES)), st.integers())
def test_whatever_the_policy_all_offers_are_ranked_and_scores_are_the_sums_of_their_terms(
    offers: list[Offer], wanted: Resources, name: str, seed: int
) -> None:
    ranked = policy(name).rank(offers, wanted, random.Random(seed))
    assert sorted(workers(ranked)) == sorted(offer.worker for offer in offers)
    assert all(one.score == fsum(term.points for term in one.terms) for one in ranked)
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)


@given(offer_lists(), amounts, st.sampled_from(sorted(POLICIES)), st.integers())
def test_equal_seeds_give_equal_orders(offers: list[Offer], wanted: Resources, name: str, seed: int) -> None:
    one = policy(name).rank(offers, wanted, random.Random(seed))
    assert one == policy(name).rank(offers, wanted, random.Random(seed))


@given(offer_lists(), amounts, st.sampled_from(sorted(POLICIES)), st.integers())
def test_no_worker_without_room_is_ranked_before_one_that_has_it(
    offers: list[Offer], wanted: Resources, name: str, seed: int
) -> None:
    by_name = {offer.worker: offer for offer in offers}
    ranked = policy(name).rank(offers, wanted, random.Random(seed))
    fits = [
        all(getattr(wanted, r) <= 0 or getattr(wanted, r) <= getattr(by_name[w].free, r) for r in RESOURCES)
        for w in workers(ranked)
    ]
    assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_worker_without_dedicated_cpus_loses_to_a_nearly_full_one_that_has_them(name: str) -> None:
    none = an_offer("none", capacity=Resources(cpus_shared=64, memory_mib=65536, disk_mib=65536, machines=99))
    nearly_full = an_offer("has", used=0.5, image_missing_bytes=1 << 30, app_machines=20)
    for seed in range(20):
        ranked = policy(name).rank([none, nearly_full], DEDICATED, random.Random(seed))
        assert workers(ranked) == ["has", "none"]
        assert [term.name for term in ranked[1].terms if term.utility < 0][-1] == "no_room"


@pytest.mark.parametrize("name", ["curve", "pack", "spread", "random"])
def test_ties_are_shared_out(name: str) -> None:
    offers = [an_offer(f"w{n}") for n in range(3)]
    rng = random.Random(7)
    firsts = [policy(name).rank(offers, SMALL, rng)[0].worker for _ in range(300)]
    assert all(60 < firsts.count(worker) < 140 for worker in ("w0", "w1", "w2"))


# --- the curve ---


@pytest.mark.parametrize(
    ("used", "expected"),
    [(-1.0, 0.7), (0.0, 0.7), (0.25, 0.85), (0.5, 1.0), (0.65, 0.8), (0.8, 0.6), (0.9, 0.3), (1.0, 0.0), (2.0, 0.0)],
)
def test_utility_is_interpolated_between_the_points_of_the_curve(used: float, expected: float) -> None:
    assert utility(HEADROOM, used) == pytest.approx(expected)


@given(st.floats(0, 1))
def test_utility_stays_between_its_neighbours(used: float) -> None:
    at = max(n for n, (x, _) in enumerate(HEADROOM) if x <= used)
    ys = [y for _, y in HEADROOM[at : at + 2]]
    assert min(ys) - 1e-9 <= utility(HEADROOM, used) <= max(ys) + 1e-9


@pytest.mark.parametrize(
    "curve",
    [
        (),
        ((0.0, 1.0),),
        ((0.1, 1.0), (1.0, 0.0)),
        ((0.0, 1.0), (0.9, 0.0)),
        ((0.0, 1.0), (0.5, 0.5), (0.5, 0.2), (1.0, 0.0)),
        ((0.0, 1.0), (0.7, 0.5), (0.5, 0.2), (1.0, 0.0)),
        ((0.0, 1.0), (nan, 0.5), (1.0, 0.0)),
        ((nan, 1.0), (1.0, 0.0)),
        ((0.0, 1.0), (1.0, nan)),
        ((0.0, inf), (1.0, 0.0)),
    ],
)
def test_a_curve_that_does_not_rise_from_0_to_1_is_refused(curve: ranking.Curve) -> None:
    with pytest.raises(Invalid, match="utilisation rises from 0 to 1"):
        check_curve(curve)
    with pytest.raises(Invalid, match="utilisation rises from 0 to 1"):
        CurvePolicy(curve=curve)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weights": {"memory_mb": 1.0}}, "memory_mb"),
        ({"weights": {"memory_mib": nan}}, "weights.memory_mib"),
        ({"image_weight": inf}, "weights.image"),
        ({"spread_weight": nan}, "weights.spread"),
        ({"image_half_ms": 0.0}, "image_half_ms"),
        ({"image_half_ms": nan}, "image_half_ms"),
    ],
)
def test_a_wrong_weight_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        CurvePolicy(**fields)


def test_a_worker_that_has_none_of_a_resource_counts_as_full() -> None:
    nothing = an_offer(capacity=Resources(memory_mib=1024))
    assert used_after(nothing, SMALL, "cpus_shared") == 1.0
    assert used_after(nothing, SMALL, "memory_mib") == 0.25


@given(offer_lists(), amounts, st.sampled_from(RESOURCES))
def test_utilisation_is_between_0_and_1(offers: list[Offer], wanted: Resources, name: str) -> None:
    assert all(0.0 <= used_after(offer, wanted, name) <= 1.0 for offer in offers)


# --- what each policy prefers ---


def test_curve_prefers_the_half_used_worker_to_the_empty_and_the_nearly_full_one() -> None:
    offers = [an_offer("empty"), an_offer("half", used=0.45), an_offer("nearly full", used=0.9)]
    ranked = CurvePolicy().rank(offers, SMALL, random.Random(0))
    assert workers(ranked) == ["half", "empty", "nearly full"]


def test_curve_counts_only_the_resources_that_are_asked_for() -> None:
    [scored] = CurvePolicy().rank([an_offer()], SMALL, random.Random(0))
    asked = ["cpus_shared", "memory_mib", "disk_mib", "machines"]
    assert [term.name for term in scored.terms] == [*asked, "image", "spread"]
    [scored] = CurvePolicy().rank([an_offer()], Resources(memory_mib=256), random.Random(0))
    assert [term.name for term in scored.terms] == ["memory_mib", "image", "spread"]


def test_curve_prefers_the_worker_that_has_the_image() -> None:
    offers = [an_offer("far", image_missing_bytes=1 << 30), an_offer("part", image_missing_bytes=1 << 29)]
    offers += [an_offer("here"), an_offer("unknown", image_known=False)]
    offers.append(an_offer("slow", image_missing_bytes=1 << 29, image_transfer_ms=60_000))
    ranked = CurvePolicy().rank(offers, SMALL, random.Random(0))
    assert workers(ranked) == ["here", "part", "far", "slow", "unknown"]
    assert [round(image_term(one).utility, 3) for one in ranked] == [1.0, 0.903, 0.823, 0.077, 0.0]


def image_term(scored: Scored) -> Term:
    return next(term for term in scored.terms if term.name == "image")


@given(
    st.floats(0, 1),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.floats(1e3, 1e10),
    st.floats(0, 10),
    st.floats(1, 1e6),
)
def test_fewer_missing_bytes_never_rank_lower_all_else_equal(
    used: float, fewer: int, more: int, bytes_per_s: float, weight: float, half_ms: float
) -> None:
    fewer, more = sorted((fewer, more))

    def missing(worker: str, count: int) -> Offer:
        ms = int(count * 1000 / bytes_per_s)
        return an_offer(worker, used=used, image_missing_bytes=count, image_transfer_ms=ms)

    offers = [missing("more", more), missing("fewer", fewer), an_offer("unknown", used=used, image_known=False)]
    ranked = CurvePolicy(image_weight=weight, image_half_ms=half_ms).rank(offers, SMALL, random.Random(0))
    score = {one.worker: one.score for one in ranked}
    assert score["fewer"] >= score["more"] >= score["unknown"]


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 600_000), st.floats(0, 5))
def test_an_image_that_is_there_outweighs_load_by_its_weight_and_no_more(
    used: float, other: float, ms: int, weight: float
) -> None:
    """Whatever the loads: the difference of two scores is that of their loads and the image's share, at most its
    weight."""
    policy = CurvePolicy(image_weight=weight)
    here, far = an_offer("here", used=used), an_offer("far", used=other, image_transfer_ms=ms)
    with_term = {one.worker: one.score for one in policy.rank([here, far], SMALL, random.Random(0))}
    loads = [msgspec.structs.replace(offer, image_transfer_ms=0) for offer in (here, far)]
    load = {one.worker: one.score for one in policy.rank(loads, SMALL, random.Random(0))}
    gained = (with_term["here"] - with_term["far"]) - (load["here"] - load["far"])
    assert -1e-9 <= gained <= weight + 1e-9


def test_a_full_worker_with_the_image_does_not_beat_an_empty_one_without() -> None:
    small = Resources(cpus_shared=1, memory_mib=512, disk_mib=4096, machines=3)
    full = an_offer("full", used=0.9375)
    assert workers(CurvePolicy().rank([full, an_offer("empty", image_known=False)], small, random.Random(0))) == [
        "empty",
        "full",
    ]
    busy = an_offer("busy", used=0.6)
    assert workers(CurvePolicy().rank([busy, an_offer("empty", image_known=False)], small, random.Random(0))) == [
        "busy",
        "empty",
    ]


def test_curve_spreads_the_machines_of_an_app() -> None:
    offers = [an_offer("two", app_machines=2), an_offer("none"), an_offer("one", app_machines=1)]
    assert workers(CurvePolicy().rank(offers, SMALL, random.Random(0))) == ["none", "one", "two"]


def test_a_weight_of_zero_takes_a_resource_out() -> None:
    only_memory = CurvePolicy(weights={"memory_mib": 1.0, "cpus_shared": 0.0})
    [scored] = only_memory.rank([an_offer()], SMALL, random.Random(0))
    assert [term.name for term in scored.terms] == ["memory_mib", "image", "spread"]


def test_pack_fills_the_fullest_and_spread_the_emptiest() -> None:
    offers = [an_offer("half", used=0.5), an_offer("empty"), an_offer("most", used=0.8)]
    assert workers(policy("pack").rank(offers, SMALL, random.Random(0))) == ["most", "half", "empty"]
    assert workers(policy("spread").rank(offers, SMALL, random.Random(0))) == ["empty", "half", "most"]


def test_random_takes_no_notice_of_anything() -> None:
    offers = [an_offer("empty"), an_offer("most", used=0.8, image_missing_bytes=1 << 30, app_machines=9)]
    firsts = [policy("random").rank(offers, SMALL, random.Random(seed))[0].worker for seed in range(200)]
    assert 70 < firsts.count("most") < 130


def test_two_choices_takes_the_emptier_of_two_drawn() -> None:
    offers = [an_offer(f"{used}0 %", used=used / 10) for used in range(9)]
    firsts = [policy("two-choices").rank(offers, SMALL, random.Random(seed))[0].worker for seed in range(900)]
    counts = [firsts.count(offer.worker) for offer in offers]
    assert counts[-1] == 0  # the fullest loses every draw
    assert counts[0] == pytest.approx(200, abs=50)  # the emptiest wins whenever it is drawn: 2 of 9


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Invalid, match="use one of curve, pack, random, spread, two-choices"):
        policy("cheapest")


def test_how_much_an_image_counts_is_configured_for_the_policy_that_weighs_it() -> None:
    offers = [an_offer("here", used=0.9), an_offer("empty", image_known=False)]
    firsts = [policy("curve", weight).rank(offers, SMALL, random.Random(0))[0].worker for weight in (None, 0.0, 5.0)]
    assert firsts == ["empty", "empty", "here"]
    with pytest.raises(Invalid, match=r"image_weight.*takes no notice of images"):
        policy("pack", 1.0)

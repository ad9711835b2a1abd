"""The sentences that explain a placement, from decisions that a real auction took."""

from __future__ import annotations

from random import Random

from hawker.cli.explain import differences, term_rows, value_text, verdicts
from hawker.core.auction import Auction, Reserve
from hawker.core.ranking import CurvePolicy
from hawker.model.guest import Resources
from hawker.model.market import Decision, Offer, Reason, Refusal, Scored, Term

WANTED = Resources(cpus_shared=1, memory_mib=256, disk_mib=1024, machines=1)
NOTHING = Resources()
CAPACITY = Resources(cpus_shared=16, cpus_dedicated=2, memory_mib=4096, disk_mib=1024000, machines=1000)


def offer(worker: str, *, app_machines: int = 0, used: Resources = NOTHING) -> Offer:
    return Offer(worker=worker, region="ord", capacity=CAPACITY, free=CAPACITY - used, app_machines=app_machines)


def refusal(worker: str, reason: Reason, **figures: int | str) -> Refusal:
    return Refusal(worker=worker, region="ord", reason=reason, **figures)  # type: ignore[arg-type]  # by name


def decided(
    *answers: Offer | Refusal, silent: tuple[str, ...] = (), at_reserve: dict[str, Refusal | None] | None = None
) -> Decision:
    """An order's way through an auction. `at_reserve`: who refuses the reservation; None leaves it in doubt."""
    auction = Auction(
        "web",
        "ord",
        WANTED,
        CurvePolicy(),
        seed=7,
        rng=Random(7),
        new_order=lambda: "order",
        keyed=False,
        began_s=0.0,
    )
    auction.ask([*(a.worker for a in answers), *silent], (), 0.0)
    *_, step = auction.answered(answers, 0.001)
    while isinstance(step, Reserve):
        if step.worker not in (at_reserve or {}):
            (step,) = auction.reserved(step, 0.002)
        elif (no := (at_reserve or {})[step.worker]) is not None:
            *_, step = auction.refused(step, no, 0.002)
        else:
            *_, step = auction.unanswered(step, 0.002, sent=True)
    return auction.decision(0.002)


def test_the_winner_is_told_with_the_terms_that_made_the_difference() -> None:
    won, lost = verdicts(decided(offer("ord-1"), offer("ord-2", app_machines=1)))
    assert won == "ord-1 won: it scored 3.325, 0.250 more than ord-2: spread +0.250."
    assert lost == "ord-2 lost: it scored 3.075, 0.250 less than ord-1."


def test_a_draw_is_told_as_one() -> None:
    decision = decided(offer("ord-1"), offer("ord-2"))
    won, lost = verdicts(decision)
    other = "ord-2" if decision.winner == "ord-1" else "ord-1"
    assert won == f"{decision.winner} won: it scored 3.325 like {other}, and the draw was for it."
    assert lost == f"{other} lost: it scored 3.325 too, and lost the draw."


def test_an_only_offer_is_told_beside_the_refusals_with_their_figures() -> None:
    full = refusal("ord-2", Reason.full, resource="memory_mib", wanted=256, free=128)
    told = verdicts(decided(offer("ord-1"), full, refusal("ord-3", Reason.cordoned), silent=("ord-4",)))
    assert told == [
        "ord-1 won: the only offer.",
        "ord-2 refused: memory_mib was short, 256 wanted and 128 free.",
        "ord-3 refused: it was cordoned.",
        "ord-4 refused: it gave no answer in time.",
    ]


def test_a_better_offer_that_was_taken_back_at_the_reservation_is_told_as_that() -> None:
    worse = offer("ord-2", app_machines=3)
    taken_back = refusal("ord-1", Reason.full, resource="machines", wanted=1, free=0)
    assert verdicts(decided(offer("ord-1"), worse, at_reserve={"ord-1": taken_back})) == [
        "ord-2 won: the better ones refused when it came to it.",
        "ord-1 lost: it made an offer, and when it was to be reserved on, machines was short, 1 wanted and 0 free.",
    ]
    assert verdicts(decided(offer("ord-1"), worse, at_reserve={"ord-1": None}))[1] == (
        "ord-1 lost: it made an offer, and when it was to be reserved on, "
        "it gave no answer, so the reservation was released."
    )


def test_every_reason_has_its_sentence_and_every_candidate_one() -> None:
    reasons = [reason for reason in Reason if reason is not Reason.outbid]
    answers = [refusal(f"ord-{n}", reason) for n, reason in enumerate(reasons)]
    told = verdicts(decided(offer("winner"), *answers))
    assert [sentence.split()[0] for sentence in told] == ["winner", *(answer.worker for answer in answers)]
    assert not any("_" in sentence for sentence in told if "short" not in sentence)


def test_the_table_adds_up() -> None:
    decision = decided(offer("ord-1"), offer("ord-2", used=Resources(memory_mib=2048, cpus_shared=8)))
    rows = term_rows(decision)
    assert rows[0][0] == f"{decision.winner} (won)"
    total = 0.0
    for _, name, *_, points in rows:
        assert isinstance(points, float)
        if name == "score":
            assert abs(total - points) < 1e-9
            total = 0.0
        else:
            total += points
    assert [row[0] for row in rows if row[0]] == [
        s.worker + (" (won)" if s.worker == decision.winner else "") for s in decision.ranking
    ]


def test_a_value_says_what_it_measures() -> None:
    def text(name: str, value: float) -> str:
        return value_text(Term(name=name, value=value, utility=1.0, weight=1.0))

    assert text("memory_mib", 0.0625) == "6.2% used with it"
    assert text("image", 0.0) == "all of it there"
    assert text("image", 2400.0) == "2.4 s to fetch"
    assert text("image", -1.0) == "not known there"
    assert text("spread", 2.0) == "2 of the app there"


def test_only_the_largest_differences_are_told() -> None:
    def scored(worker: str, *points: float) -> Scored:
        terms = [Term(name=f"t{n}", value=0, utility=p, weight=1) for n, p in enumerate(points)]
        return Scored(worker=worker, score=sum(points), terms=terms)

    apart = differences(scored("a", 1, 2, 3, 4, 5), scored("b", 1, 1, 5, 3.9, 4.5))
    assert apart == "t2 -2.000, t1 +1.000, t4 +0.500"

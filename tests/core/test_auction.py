"""An order as a value: whom it asks for offers, and what it says to do next, whatever comes back and when."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from hawker.core.auction import (
    TRIES,
    Answer,
    Auction,
    Claim,
    Confirm,
    Instruction,
    Outcome,
    Release,
    Reserve,
    candidates,
)
from hawker.core.ranking import SpreadPolicy
from hawker.model.guest import Resources
from hawker.model.market import Decision, Offer, Reason, Refusal

REGION = [f"w{n:03}" for n in range(100)]
WANTED = Resources(cpus_shared=1, memory_mib=256)
CAPACITY = Resources(cpus_shared=16, memory_mib=4096)


def auction_of(*, keyed: bool = False, seed: int = 7, began_s: float = 0.0) -> Auction:
    names = (f"order-{n}" for n in itertools.count(1))
    return Auction(
        "web",
        "ord",
        WANTED,
        SpreadPolicy(),
        seed=seed,
        rng=random.Random(seed),
        new_order=names.__next__,
        keyed=keyed,
        began_s=began_s,
    )


def offer(worker: str, used: int = 0) -> Offer:
    return Offer(worker=worker, region="ord", capacity=CAPACITY, free=CAPACITY - Resources(cpus_shared=used))


def refusal(worker: str, reason: Reason = Reason.full) -> Refusal:
    return Refusal(worker=worker, region="ord", reason=reason)


# --- an order's way, step by step -------------------------------------------------------------------------------------


def test_an_order_is_reserved_on_the_best_offer_confirmed_there_and_answered() -> None:
    auction = auction_of(began_s=10.0)
    assert auction.ask(["a", "b", "c"], (), 10.5) == ["a", "b", "c"]
    (reserve,) = auction.answered([offer("a", used=8), offer("b")], 10.75)
    assert reserve == Reserve("b", "order-1")
    assert isinstance(reserve, Reserve)
    (confirm,) = auction.reserved(reserve, 11.0)
    assert isinstance(confirm, Confirm)
    assert (confirm.worker, confirm.order) == ("b", "order-1")
    assert auction.confirmed(confirm, b"{}", 13.0) == [
        Answer(
            Outcome.filled,
            "b",
            machine=b"{}",
            timings_ms={"offers": 250.0, "reserve": 250.0, "confirm": 2000.0, "total": 3000.0},
        )
    ]
    decision = confirm.decision
    assert (decision.order, decision.winner, decision.seed) == ("order-1", "b", 7)
    assert (decision.offers_ms, decision.total_ms) == (250.0, 1000.0)
    assert [(a.worker, a.outcome, a.ms) for a in decision.attempts] == [("b", "filled", 250.0)]
    assert {r.worker: r.reason for r in decision.refusals} == {"a": Reason.outbid, "c": Reason.no_answer}


def test_a_refusal_and_a_request_that_was_never_sent_lead_to_the_next_offer_under_the_same_name() -> None:
    auction = auction_of()
    auction.ask(["a", "b", "c"], (), 0.0)
    (first,) = auction.answered([offer("a"), offer("b", used=1), offer("c", used=2)], 0.0)
    assert isinstance(first, Reserve)
    (second,) = auction.refused(first, refusal("a"), 0.0)
    assert isinstance(second, Reserve)
    assert auction.unanswered(second, 0.0, sent=False) == [Reserve("c", "order-1")]
    assert [r.reason for r in auction.refusals()] == [Reason.full, Reason.no_answer, Reason.outbid]


def test_a_reservation_in_doubt_is_released_and_the_order_goes_on_under_another_name() -> None:
    """The first worker may hold it: were the name the same, the order could be filled twice."""
    auction = auction_of()
    auction.ask(["a", "b"], (), 0.0)
    (first,) = auction.answered([offer("a"), offer("b", used=1)], 0.0)
    assert isinstance(first, Reserve)
    assert auction.unanswered(first, 0.0, sent=True) == [Release("a", "order-1", undo=True), Reserve("b", "order-2")]


def test_after_three_tries_the_order_is_refused_whoever_else_has_offered() -> None:
    auction = auction_of()
    auction.ask(REGION[:5], (), 0.0)
    (step,) = auction.answered([offer(name) for name in REGION[:5]], 0.0)
    for _ in range(TRIES):
        assert isinstance(step, Reserve)
        (step,) = auction.refused(step, refusal(step.worker), 0.0)
    assert step == Answer(Outcome.refused)
    assert sorted(r.reason for r in auction.refusals()) == [Reason.full] * 3 + [Reason.outbid] * 2


def test_an_order_with_a_key_is_confirmed_once_it_has_the_key_and_its_machine_is_never_undone() -> None:
    auction = auction_of(keyed=True)
    auction.ask(["a"], (), 0.0)
    (reserve,) = auction.answered([offer("a")], 0.0)
    assert isinstance(reserve, Reserve)
    (claim,) = auction.reserved(reserve, 0.0)
    assert claim == Claim("a", "order-1")
    assert isinstance(claim, Claim)
    (confirm,) = auction.claimed(claim, 0.0)
    assert isinstance(confirm, Confirm)
    release, answer = auction.unconfirmed(confirm, "stopped answering")
    assert release == Release("a", "order-1", undo=False), (
        "asking again may have given the machine to the client already"
    )
    assert answer == Answer(Outcome.in_doubt, "a", "stopped answering")


def test_an_order_whose_key_another_one_has_gives_its_reservation_back() -> None:
    auction = auction_of(keyed=True)
    auction.ask(["a"], (), 0.0)
    (reserve,) = auction.answered([offer("a")], 0.0)
    assert isinstance(reserve, Reserve)
    (claim,) = auction.reserved(reserve, 0.0)
    assert isinstance(claim, Claim)
    assert auction.not_claimed(claim) == [Release("a", "order-1", undo=False), Answer(Outcome.not_claimed, "a")]


def test_a_reservation_that_lapsed_needs_no_release() -> None:
    auction = auction_of()
    auction.ask(["a"], (), 0.0)
    (reserve,) = auction.answered([offer("a")], 0.0)
    assert isinstance(reserve, Reserve)
    (confirm,) = auction.reserved(reserve, 0.0)
    assert isinstance(confirm, Confirm)
    assert auction.lapsed(confirm, "gone") == [Answer(Outcome.lapsed, "a", "gone")]


@pytest.mark.parametrize("heard", ["nothing", "offers", "reserved"])
def test_an_order_that_is_abandoned_gives_back_what_may_be_reserved(heard: str) -> None:
    auction = auction_of()
    auction.ask(["a"], (), 0.0)
    releases = []
    if heard != "nothing":
        (reserve,) = auction.answered([offer("a")], 0.0)
        assert isinstance(reserve, Reserve)
        releases = [Release("a", "order-1", undo=True)]
        if heard == "reserved":
            auction.reserved(reserve, 0.0)
    assert auction.abandoned() == [*releases, Answer(Outcome.abandoned)]
    assert auction.abandoned() == [], "it is over"


# --- rules, whatever comes back ---------------------------------------------------------------------------------------


class Market:
    """Carries out an auction's instructions in a world that `data` draws, and keeps what workers hold. No loop, no
    clock: the time is a number."""

    def __init__(self, data: st.DataObject, *, keyed: bool) -> None:
        self._data = data
        self.auction = auction_of(keyed=keyed, seed=data.draw(st.integers(0, 99)))
        self.now_s = 0.0
        self.held: set[tuple[str, str]] = set()  # reservations that workers hold, or may hold
        self.released: set[tuple[str, str]] = set()
        self.confirms: list[Confirm] = []
        self.answers: list[Answer] = []
        self.before: list[Instruction] = []  # instructions that were answered

    def run(self) -> Decision:
        """Until the auction has answered. Returns its record."""
        names = REGION[: self._data.draw(st.integers(0, 6))]
        asked = self.auction.ask(names, (), self.now_s)
        kinds = [self._draw("offer", "refusal", "silent") for _ in asked]
        heard = [
            offer(name, self._data.draw(st.integers(0, 15))) if kind == "offer" else refusal(name, Reason.cordoned)
            for name, kind in zip(asked, kinds, strict=True)
            if kind != "silent"
        ]
        todo = self.auction.answered(self._data.draw(st.permutations(heard)), self._later())
        while not self.answers:
            assert todo, "it says what to do next, or answers"
            self._late()
            for step in todo:
                self._note(step)
            todo = self._answered(todo[-1])
        assert not todo
        self._late()
        return self.auction.decision(self.now_s)

    def _draw(self, *choices: str) -> str:
        return self._data.draw(st.sampled_from(choices))

    def _later(self) -> float:
        self.now_s += self._data.draw(st.floats(0, 2))
        return self.now_s

    def _note(self, step: Instruction) -> None:
        match step:
            case Confirm():
                self.confirms.append(step)
            case Release():
                self.released.add((step.worker, step.order))
            case Answer():
                self.answers.append(step)

    def _answered(self, step: Instruction) -> list[Instruction]:
        self.before.append(step)
        if not isinstance(step, Answer) and self._draw(*["on"] * 9, "abandoned") == "abandoned":
            self.held.add((step.worker, step.order))
            return self.auction.abandoned()
        match step:
            case Reserve():
                told = self._draw("reserved", "refused", "unsent", "lost", "lost and held")
                event(f"reserve: {told}")
                if told in ("reserved", "lost and held"):
                    self.held.add((step.worker, step.order))
                if told == "reserved":
                    return self.auction.reserved(step, self._later())
                if told == "refused":
                    return self.auction.refused(step, refusal(step.worker), self._later())
                return self.auction.unanswered(step, self._later(), sent=told != "unsent")
            case Claim():
                ours = self._draw("ours", "theirs") == "ours"
                return self.auction.claimed(step, self._later()) if ours else self.auction.not_claimed(step)
            case Confirm():
                told = self._draw("confirmed", "lapsed", "failed")
                event(f"confirm: {told}")
                if told == "failed":
                    return self.auction.unconfirmed(step, "stopped answering")
                self.held.remove((step.worker, step.order))
                if told == "lapsed":
                    return self.auction.lapsed(step, "gone")
                return self.auction.confirmed(step, b"{}", self._later())
        return []

    def _late(self) -> None:
        """What comes when its instruction is not the last one any more changes nothing."""
        for step in self.before:
            match step:
                case Reserve():
                    assert self.auction.reserved(step, self.now_s) == []
                    assert self.auction.refused(step, refusal(step.worker), self.now_s) == []
                    assert self.auction.unanswered(step, self.now_s, sent=True) == []
                case Claim():
                    assert self.auction.claimed(step, self.now_s) == []
                    assert self.auction.not_claimed(step) == []
                case Confirm():
                    assert self.auction.confirmed(step, b"", self.now_s) == []
                    assert self.auction.lapsed(step, "") == []
                    assert self.auction.unconfirmed(step, "") == []


@given(st.data(), st.booleans())
def test_an_order_is_answered_once_confirmed_at_most_once_and_leaves_nothing_reserved(
    data: st.DataObject, keyed: bool
) -> None:
    market = Market(data, keyed=keyed)
    market.run()
    (answer,) = market.answers
    event(f"answer: {answer.outcome.name}")
    assert len(market.confirms) <= 1
    assert market.confirms or answer.outcome not in (Outcome.filled, Outcome.lapsed, Outcome.in_doubt)
    assert market.held <= market.released
    if answer.outcome is Outcome.filled:
        (confirm,) = market.confirms
        assert (confirm.worker, confirm.order) not in market.released


@given(st.data(), st.booleans())
def test_the_record_explains_every_candidate_and_each_of_at_most_three_tries(data: st.DataObject, keyed: bool) -> None:
    market = Market(data, keyed=keyed)
    record = market.run()
    explained = [*(r.worker for r in record.refusals), *([record.winner] if record.winner else [])]
    assert set(record.candidates) == set(explained)
    assert len(explained) == len(set(explained)), "each in one way"
    tried = [a.worker for a in record.attempts]
    assert len(tried) == len(set(tried)) <= TRIES
    assert set(tried) <= {o.worker for o in record.offers}
    assert tried == [scored.worker for scored in record.ranking[: len(tried)]], "the best first"
    if market.confirms:
        assert market.confirms[0].decision.winner == record.winner == tried[-1]


@given(st.data(), st.booleans())
def test_the_same_events_lead_to_the_same_instructions(data: st.DataObject, keyed: bool) -> None:
    """So that an order can be replayed from what came back."""
    seed = data.draw(st.integers(0, 99))
    answers = [offer(name, data.draw(st.integers(0, 3))) for name in REGION[:30]]

    def steps() -> list[Instruction]:
        auction = auction_of(keyed=keyed, seed=seed)
        asked = auction.ask(REGION[:30], REGION[20:], 0.0)
        (first,) = auction.answered([a for a in answers if a.worker in asked], 0.1)
        assert isinstance(first, Reserve)
        return [first, *auction.unanswered(first, 0.2, sent=True)]

    assert steps() == steps()


# --- whom to ask ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.sets(st.sampled_from([*REGION, "gone"])), st.integers(0), st.integers(1, 30))
def test_candidates_are_as_many_as_the_fan_out_none_twice_and_all_of_the_region(
    count: int, holders: set[str], seed: int, fanout: int
) -> None:
    workers = REGION[:count]
    asked = candidates(workers, random.Random(seed), fanout, holders)
    assert len(asked) == min(count, fanout) == len(set(asked))
    assert set(asked) <= set(workers)


def test_all_workers_of_a_small_region_are_asked() -> None:
    assert candidates(REGION[:20], random.Random(1), 20, {"w001"}) == REGION[:20]


@given(st.sets(st.sampled_from(REGION), min_size=1), st.integers(0))
def test_some_that_have_the_image_are_among_the_candidates_of_a_large_region(holders: set[str], seed: int) -> None:
    asked = candidates(REGION, random.Random(seed), 20, holders)
    assert len(holders & set(asked)) >= min(5, len(holders))


def test_the_others_are_drawn_from_everybody_so_that_an_old_view_keeps_nobody_out() -> None:
    rng = random.Random(3)
    seen = {name for _ in range(200) for name in candidates(REGION, rng, 20, REGION[:5])}
    assert seen == set(REGION)


def test_without_anybody_who_has_it_the_draw_is_as_it_always_was() -> None:
    assert candidates(REGION, random.Random(9)) == random.Random(9).sample(REGION, 20)

"""Filling one order, immediately or not at all: which workers to ask, whom to try next, when to stop, what to say.

`Auction` is told what came back and says what to do next: reserve on a worker, claim the client's key, confirm,
release, answer. It knows no network, no loop and no clock, so that a broker, a simulation and a replay drive the same
object. A refusal changes the next choice, since that worker is out; so does a reservation in doubt. At most `TRIES`
reservations are asked for. `hawker.broker.orders` carries out for a broker what an auction says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from hawker.core.ranking import Policy
from hawker.model.guest import Resources
from hawker.model.market import Attempt, Decision, Offer, Reason, Refusal, Scored

if TYPE_CHECKING:
    from random import Random

TRIES = 3
FANOUT = 20
"""Offers asked for per order. In a region of up to this many workers all are asked; of more, as many drawn at random.
Twenty of a thousand find nearly as good a place as all; one offer costs about 50 microseconds of a broker's time."""
HOLDERS = 5
"""How many of them are drawn from those that are said to have the image. Few: they are the same ones for every order of
that image, and an old view of them must not keep the others from being asked."""


def candidates(
    workers: Sequence[str], rng: Random, fanout: int = FANOUT, holders: Collection[str] = (), most: int = HOLDERS
) -> list[str]:
    """The workers to ask for offers. They are never "the best of a view": a view a second old wrongly refuses a fifth
    of the orders. If there are more than `fanout`, up to `most` are drawn from the `holders` of the image, the others
    from all the rest."""
    if len(workers) <= fanout:
        return list(workers)
    having = [name for name in workers if name in holders]
    drawn = rng.sample(having, min(most, fanout, len(having))) if having else []
    rest = [name for name in workers if name not in drawn] if drawn else list(workers)
    return drawn + rng.sample(rest, fanout - len(drawn))


NO_TIMINGS: Mapping[str, float] = MappingProxyType({})


class Reserve(msgspec.Struct, frozen=True):
    """Ask this worker to hold room for the order. Answer with `reserved`, `refused` or `unanswered`."""

    worker: str
    order: str


class Claim(msgspec.Struct, frozen=True):
    """Claim the client's idempotency key for the order. Answer with `claimed` or `not_claimed`."""

    worker: str
    order: str


class Confirm(msgspec.Struct, frozen=True):
    """Turn the reservation into a machine. Answer with `confirmed`, `lapsed` or `unconfirmed`."""

    worker: str
    order: str
    decision: Decision


class Release(msgspec.Struct, frozen=True):
    """Release the order on this worker until the worker acknowledges that; nobody waits for it. With `undo` a machine
    that was made all the same is destroyed."""

    worker: str
    order: str
    undo: bool


class Outcome(Enum):
    filled = "filled"
    refused = "refused"  # no worker of the region holds room for it
    not_claimed = "not_claimed"  # another order has the client's key, or nobody could tell
    lapsed = "lapsed"  # the reservation was gone before it was confirmed
    in_doubt = "in_doubt"  # the worker may have filled it
    abandoned = "abandoned"  # whoever ordered waits no longer


class Answer(msgspec.Struct, frozen=True):
    """The auction is over. When the order was filled, `machine` is what the worker wrote about it, and `timings_ms` has
    how long each phase took; when it failed, `problem` says what the worker did."""

    outcome: Outcome
    worker: str = ""
    problem: str = ""
    machine: bytes = b""
    timings_ms: Mapping[str, float] = NO_TIMINGS


Request = Reserve | Claim | Confirm
Instruction = Request | Release | Answer


class Auction:
    """One order in one region, as a value: events in, instructions out.

    The events are methods. Each is given the time in seconds, on any clock that does not go back, and returns the
    instructions to carry out next: any number of `Release`, then at most one other. An event that answers an
    instruction names it. What answers another instruction than the last one comes too late and changes nothing: the
    auction has dealt with that reservation already.

    `order` is the name of the reservation that was asked for last, `region` the auction's, `offers` what was offered.
    `began_s` is when the order came, which may be before this region's auction. `new_order` names reservations. `keyed`
    says that the client gave an idempotency key: the key is claimed before the order is confirmed, and a machine that
    may have been made is left for the client to find.
    """

    def __init__(
        self,
        app: str,
        region: str,
        wanted: Resources,
        policy: Policy,
        *,
        seed: int,
        rng: Random,
        new_order: Callable[[], str],
        keyed: bool,
        began_s: float,
    ) -> None:
        self._app = app
        self.region = region
        self._wanted = wanted
        self._policy = policy
        self._seed = seed
        self._rng = rng
        self._new_order = new_order
        self._keyed = keyed
        self._began_s = began_s
        self.order = new_order()
        self._asked_s = 0.0
        self._asked: list[str] = []
        self.offers: list[Offer] = []
        self._ranking: list[Scored] = []
        self._refusals: list[Refusal] = []
        self._attempts: list[Attempt] = []
        self._winner = ""
        self._pending: Request | Answer | None = None  # the last instruction that is not a release
        self._pending_s = 0.0
        self._offers_ms = self._reserve_ms = 0.0

    def ask(self, workers: Sequence[str], holders: Collection[str], now_s: float) -> list[str]:
        """The workers to ask for offers. Answer with `answered`."""
        self._asked = candidates(workers, self._rng, holders=holders)
        self._asked_s = now_s
        return self._asked

    def answered(self, answers: Sequence[Offer | Refusal], now_s: float) -> list[Instruction]:
        """The offers' deadline has come, or all have answered. A worker that did not answer counts as a refusal."""
        self.offers = [a for a in answers if isinstance(a, Offer)]
        self._refusals = [a for a in answers if isinstance(a, Refusal)]
        for name in sorted(set(self._asked) - {a.worker for a in answers}):
            self._refusals.append(Refusal(worker=name, region=self.region, reason=Reason.no_answer))
        self._ranking = self._policy.rank(self.offers, self._wanted, self._rng) if self.offers else []
        self._offers_ms = _ms(now_s - self._asked_s)
        return self._next(now_s)

    def reserved(self, asked: Reserve, now_s: float) -> list[Instruction]:
        if asked is not self._pending:
            return []
        self._reserve_ms = self._tried(asked, "filled", now_s)
        self._winner = asked.worker
        if self._keyed:
            return self._await(Claim(asked.worker, asked.order), now_s)
        return self._confirm(now_s, now_s)

    def refused(self, asked: Reserve, refusal: Refusal, now_s: float) -> list[Instruction]:
        if asked is not self._pending:
            return []
        self._refusals.append(refusal)
        self._tried(asked, "refused", now_s, refusal)
        return self._next(now_s)

    def unanswered(self, asked: Reserve, now_s: float, *, sent: bool) -> list[Instruction]:
        """No answer came. Unless the request was never `sent` the worker may hold room for the order, which is released
        and goes on under another name: the doubtful one must not fill on another worker, too."""
        if not sent:
            return self.refused(asked, Refusal(worker=asked.worker, region=self.region, reason=Reason.no_answer), now_s)
        if asked is not self._pending:
            return []
        self._refusals.append(Refusal(worker=asked.worker, region=self.region, reason=Reason.in_doubt))
        self._tried(asked, "in_doubt", now_s)
        self.order = self._new_order()
        return [self._release(asked), *self._next(now_s)]

    def claimed(self, claim: Claim, now_s: float) -> list[Instruction]:
        return self._confirm(now_s, self._pending_s) if claim is self._pending else []

    def not_claimed(self, claim: Claim) -> list[Instruction]:
        """Another order has the client's key, or whether this one has it is not known."""
        return self._end(claim, Answer(Outcome.not_claimed, claim.worker), release=True)

    def confirmed(self, confirm: Confirm, machine: bytes, now_s: float) -> list[Instruction]:
        timings = {
            "offers": self._offers_ms,
            "reserve": self._reserve_ms,
            "confirm": _ms(now_s - self._pending_s),
            "total": _ms(now_s - self._began_s),
        }
        return self._end(confirm, Answer(Outcome.filled, confirm.worker, machine=machine, timings_ms=timings))

    def lapsed(self, confirm: Confirm, problem: str) -> list[Instruction]:
        """The worker holds the reservation no more."""
        return self._end(confirm, Answer(Outcome.lapsed, confirm.worker, problem))

    def unconfirmed(self, confirm: Confirm, problem: str) -> list[Instruction]:
        """The confirmation failed, or was not answered."""
        return self._end(confirm, Answer(Outcome.in_doubt, confirm.worker, problem), release=True)

    def abandoned(self) -> list[Instruction]:
        """Whoever ordered has gone, or the time for the whole order is up. What may be reserved is released."""
        if isinstance(self._pending, Answer):
            return []
        return self._end(self._pending, Answer(Outcome.abandoned), release=True)

    def refusals(self) -> list[Refusal]:
        """A reason for every candidate. Offers that were not tried because the tries were used up say so."""
        named = {r.worker for r in self._refusals}
        untried = [o for o in self.offers if o.worker not in named and o.worker != self._winner]
        return self._refusals + [Refusal(worker=o.worker, region=o.region, reason=Reason.outbid) for o in untried]

    def decision(self, now_s: float) -> Decision:
        """Everything needed to explain the outcome, and to replay it."""
        return Decision(
            order=self.order,
            app=self._app,
            region=self.region,
            policy=self._policy.name,
            seed=self._seed,
            resources=self._wanted,
            candidates=self._asked,
            offers=self.offers,
            ranking=self._ranking,
            refusals=self.refusals(),
            attempts=self._attempts,
            winner=self._winner,
            offers_ms=self._offers_ms,
            total_ms=_ms(now_s - self._began_s),
        )

    def _next(self, now_s: float) -> list[Instruction]:
        """Reserve on the best offer that was not tried yet; give up when none is left or the tries are used up."""
        tried = {a.worker for a in self._attempts}
        if len(tried) < TRIES:
            for scored in self._ranking:
                if scored.worker not in tried:
                    return self._await(Reserve(scored.worker, self.order), now_s)
        return self._await(Answer(Outcome.refused), now_s)

    def _confirm(self, now_s: float, since_s: float) -> list[Instruction]:
        return self._await(Confirm(self._winner, self.order, self.decision(now_s)), since_s)

    def _await(self, instruction: Request | Answer, now_s: float) -> list[Instruction]:
        self._pending, self._pending_s = instruction, now_s
        return [instruction]

    def _tried(self, asked: Reserve, outcome: str, now_s: float, refusal: Refusal | None = None) -> float:
        ms = _ms(now_s - self._pending_s)
        self._attempts.append(Attempt(worker=asked.worker, outcome=outcome, refusal=refusal, ms=ms))
        return ms

    def _end(self, answered: Request | None, answer: Answer, *, release: bool = False) -> list[Instruction]:
        """The answer, unless `answered` is an instruction of before."""
        if answered is not self._pending:
            return []
        self._pending = answer
        return [self._release(answered), answer] if release and answered else [answer]

    def _release(self, doubtful: Request) -> Release:
        return Release(doubtful.worker, doubtful.order, undo=not self._keyed)


def _ms(seconds: float) -> float:
    """Milliseconds, to the microsecond."""
    return round(seconds * 1000, 3)

"""Filling one order, immediately or not at all: which workers to ask, whom to try next, when to stop, what to say.

Pure: `Auction` takes what came back and answers with the next worker to reserve on, or none. A refusal changes the
next choice, since that worker is out; so does a reservation in doubt. At most `TRIES` reservations are asked for.
The shell that talks to workers is `hawker.broker.orders`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hawker.core.ranking import Policy
from hawker.model.guest import Resources
from hawker.model.market import Attempt, Decision, Offer, Reason, Refusal, Scored
from hawker.model.rows import AppRow

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
    """Whom to ask for offers. Never "the best of a view": a view a second old wrongly refuses a fifth of the orders.
    Of more than `fanout`, up to `most` are drawn from the `holders` of the image, the others from all the rest."""
    if len(workers) <= fanout:
        return list(workers)
    having = [name for name in workers if name in holders]
    drawn = rng.sample(having, min(most, fanout, len(having))) if having else []
    rest = [name for name in workers if name not in drawn] if drawn else list(workers)
    return drawn + rng.sample(rest, fanout - len(drawn))


class Auction:
    """One order in one region. Feed `answered`, then alternate `next_worker` with `refused`, `doubted` or `filled`.

    `order` names the reservation to ask for next; `app` is the newest row of the app among the offers, once there
    are any.
    """

    def __init__(self, order: str, app: str, region: str, wanted: Resources, policy: Policy, seed: int) -> None:
        self.order = order
        self._app = app
        self._region = region
        self._wanted = wanted
        self._policy = policy
        self._seed = seed
        self.app: AppRow | None = None
        self.offers: list[Offer] = []
        self._candidates: list[str] = []
        self._ranking: list[Scored] = []
        self._refusals: list[Refusal] = []
        self._attempts: list[Attempt] = []
        self._winner = ""
        self._offers_ms = 0.0

    def answered(self, asked: Sequence[str], answers: Sequence[Offer | Refusal], rng: Random, ms: float) -> None:
        """The offers round is over. Who was asked and did not answer is counted as a refusal."""
        self._candidates = list(asked)
        self.offers = [a for a in answers if isinstance(a, Offer)]
        self._refusals = [a for a in answers if isinstance(a, Refusal)]
        silent = set(asked) - {a.worker for a in answers}
        self._refusals += [
            Refusal(worker=name, region=self._region, reason=Reason.no_answer) for name in sorted(silent)
        ]
        self._ranking = self._policy.rank(self.offers, self._wanted, rng) if self.offers else []
        self._offers_ms = ms

    def next_worker(self) -> str | None:
        """The best offer not tried yet; None when none is left, the tries are used up, or the order is filled."""
        tried = {a.worker for a in self._attempts}
        if self._winner or len(tried) >= TRIES:
            return None
        return next((scored.worker for scored in self._ranking if scored.worker not in tried), None)

    def refused(self, refusal: Refusal, ms: float) -> None:
        self._refusals.append(refusal)
        self._attempts.append(Attempt(worker=refusal.worker, outcome="refused", refusal=refusal, ms=ms))

    def doubted(self, worker: str, ms: float) -> None:
        """A reservation was asked for and no answer came: the caller releases it until that is acknowledged."""
        self._refusals.append(Refusal(worker=worker, region=self._region, reason=Reason.in_doubt))
        self._attempts.append(Attempt(worker=worker, outcome="in_doubt", ms=ms))

    def filled(self, worker: str, ms: float) -> None:
        self._winner = worker
        self._attempts.append(Attempt(worker=worker, outcome="filled", ms=ms))

    def refusals(self) -> list[Refusal]:
        """A reason for every candidate. Offers that were not tried because the tries were used up say so."""
        named = {r.worker for r in self._refusals}
        untried = [o for o in self.offers if o.worker not in named and o.worker != self._winner]
        return self._refusals + [Refusal(worker=o.worker, region=o.region, reason=Reason.outbid) for o in untried]

    def decision(self, total_ms: float) -> Decision:
        """Everything needed to explain the outcome, and to replay it."""
        return Decision(
            order=self.order,
            app=self._app,
            region=self._region,
            policy=self._policy.name,
            seed=self._seed,
            resources=self._wanted,
            candidates=self._candidates,
            offers=self.offers,
            ranking=self._ranking,
            refusals=self.refusals(),
            attempts=self._attempts,
            winner=self._winner,
            offers_ms=self._offers_ms,
            total_ms=total_ms,
        )

"""`hawker explain`: every worker that was asked, every term of every score, and why it went as it did.

The decision was made and kept by the broker and the worker; here it is only told. The sentences are plain functions of
the decision.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.params import machine_argument
from hawker.cli.session import Session, app_of, label, machine_command
from hawker.model.market import Attempt, Decision, Offer, Reason, Refusal, Scored, Term

if TYPE_CHECKING:
    from hawker.model.api import Machine

_REASONS = {
    Reason.cordoned: "it was cordoned",
    Reason.wrong_region: "it is in another region",
    Reason.no_driver: "nothing on it could run the image",
    Reason.disk_full: "its disk was full: it takes nothing new",
    Reason.disk_failed: "its disk had failed: it takes nothing new",
    Reason.no_answer: "it gave no answer in time",
    Reason.invalid: "it did not take what the order says",
    Reason.in_doubt: "it gave no answer, so the reservation was released",
}
_EVEN = 1e-9
_TERMS_TOLD = 3


@click.command()
@machine_argument
@machine_command
def explain(session: Session, found: Machine) -> None:
    """Explain why a machine was placed where it is.

    Who was asked, what they offered, how each offer scored, why the winner won and each other did not. A score is the
    sum of its terms' points; points are weight times utility; the utility of a resource follows from how full the
    worker would be with the machine.
    """
    import msgspec

    told = session.send(calls.ExplainMachine(app_of(found), found.id))
    if session.json:
        output.data(told)
        return
    decision = msgspec.convert(told["decision"], Decision)
    wanted = decision.resources
    kind, count = ("dedicated", wanted.cpus_dedicated) if wanted.cpus_dedicated else ("shared", wanted.cpus_shared)
    cpus = f"{count} {kind} cpu{'' if count == 1 else 's'}"
    output.fields(
        [
            ("machine", label(found).removeprefix("machine ")),
            ("order", f"{decision.order}, app {decision.app}, region {decision.region}"),
            ("wanted", f"{cpus}, {wanted.memory_mib} MiB of memory, {wanted.disk_mib} MiB of disk"),
            ("asked", f"{', '.join(decision.candidates)}; offers came from {len(decision.offers)}"),
            ("times", f"offers {decision.offers_ms:.1f} ms, until it was reserved {decision.total_ms:.1f} ms"),
            ("filled by", decision.winner),
            ("policy", f"{decision.policy}, seed {decision.seed}"),
        ]
    )
    output.say("")
    if decision.ranking:
        output.table(("worker", "term", "value", "utility", "weight", "points"), term_rows(decision))
        output.say("")
    for sentence in verdicts(decision):
        output.say(sentence)


def term_rows(decision: Decision) -> list[tuple[object, ...]]:
    """A row for each term of each offer, best offer first, and one for each sum."""
    rows: list[tuple[object, ...]] = []
    for scored in decision.ranking:
        names = [scored.worker + (" (won)" if scored.worker == decision.winner else "")]
        for name, term in zip_longest(names, scored.terms, fillvalue=""):
            if isinstance(term, Term):
                rows.append((name, term.name, value_text(term), term.utility, term.weight, term.points))
        rows.append(("", "score", "", "", "", scored.score))
    return rows


def value_text(term: Term) -> str:
    """What a utility was read from, in words."""
    if term.name == "spread":
        return f"{term.value:.0f} of the app there"
    if term.name == "image":
        return _image_text(term.value)
    return f"{term.value:.1%} used with it"


def _image_text(ms: float) -> str:
    if ms < 0:
        return "not known there"
    return f"{ms / 1000:.1f} s to fetch" if ms else "all of it there"


def verdicts(decision: Decision) -> list[str]:
    """A sentence for the winner and one for every other worker that was asked."""
    offers = {offer.worker: offer for offer in decision.offers}
    scores = {scored.worker: scored for scored in decision.ranking}
    attempts = {attempt.worker: attempt for attempt in decision.attempts}
    refusals = {refusal.worker: refusal for refusal in decision.refusals}
    told = [_won(decision, scores, attempts)] if decision.winner else []
    for worker in decision.candidates:
        if worker != decision.winner:
            told.append(_lost(worker, decision, offers, scores, attempts, refusals))
    return told


def _won(decision: Decision, scores: dict[str, Scored], attempts: dict[str, Attempt]) -> str:
    winner = scores.get(decision.winner)
    if winner is None:
        return f"{decision.winner} won."
    others = [s for s in decision.ranking if s.worker != decision.winner and s.worker not in attempts]
    if not others:
        only = len(decision.ranking) == 1
        return f"{decision.winner} won: {'the only offer' if only else 'the better ones refused when it came to it'}."
    second = max(others, key=lambda scored: scored.score)
    lead = winner.score - second.score
    if abs(lead) < _EVEN:
        return f"{decision.winner} won: it scored {winner.score:.3f} like {second.worker}, and the draw was for it."
    why = differences(winner, second)
    by = f": {why}" if why else ""
    return f"{decision.winner} won: it scored {winner.score:.3f}, {lead:.3f} more than {second.worker}{by}."


def differences(winner: Scored, other: Scored) -> str:
    """The terms that made the difference, the largest first."""
    points = {term.name: term.points for term in other.terms}
    apart = [(term.points - points.get(term.name, 0.0), term.name) for term in winner.terms]
    largest = sorted((d for d in apart if abs(d[0]) >= 0.0005), key=lambda d: -abs(d[0]))[:_TERMS_TOLD]
    return ", ".join(f"{name} {difference:+.3f}" for difference, name in largest)


def _lost(
    worker: str,
    decision: Decision,
    offers: dict[str, Offer],
    scores: dict[str, Scored],
    attempts: dict[str, Attempt],
    refusals: dict[str, Refusal],
) -> str:
    attempt, refusal = attempts.get(worker), refusals.get(worker)
    if attempt is not None and worker in offers:
        why = _why(attempt.refusal or refusal)
        return f"{worker} lost: it made an offer, and when it was to be reserved on, {why}."
    if worker in scores and worker in offers:
        winner = scores.get(decision.winner)
        behind = winner.score - scores[worker].score if winner else 0.0
        how = " too, and lost the draw" if abs(behind) < _EVEN else f", {behind:.3f} less than {decision.winner}"
        return f"{worker} lost: it scored {scores[worker].score:.3f}{how}."
    return f"{worker} refused: {_why(refusal)}."


def _why(refusal: Refusal | None) -> str:
    if refusal is None:
        return "it gave no reason"
    if refusal.reason is Reason.no_driver and refusal.driver:
        return f"its driver {refusal.driver} could not run it" + (f": {refusal.problem}" if refusal.problem else "")
    if refusal.reason is Reason.full:
        return f"{refusal.resource} was short, {refusal.wanted} wanted and {refusal.free} free"
    if refusal.error is not None:
        return f"it did not take what the order says: {refusal.error.get('error')}"
    return _REASONS.get(refusal.reason, refusal.reason.replace("_", " "))

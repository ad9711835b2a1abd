"""Ranking offers: a pure function of the offers, the order's resources and the policy, with every term kept.

The default policy is the article's: the utility of a resource is a piecewise linear curve over its utilisation
after the fill, so that both an almost empty and an almost full worker can be less desirable than one in between; an
offer's score is the weighted sum over resources, plus terms for the time the image takes to come and for spreading an
app's own machines. Broker, lab and tests call `rank`; curves and weights are configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum, isfinite
from typing import TYPE_CHECKING, Protocol

import msgspec

from hawker.core.capacity import shortfall
from hawker.errors import Invalid
from hawker.model.guest import Resources
from hawker.model.market import Offer, Scored, Term

if TYPE_CHECKING:
    from random import Random

RANKED = ("cpus_shared", "cpus_dedicated", "memory_mib", "disk_mib", "machines")

Curve = tuple[tuple[float, float], ...]
"""Points (utilisation, utility), utilisation rising from 0 to 1."""


class Policy(Protocol):
    """Orders offers, best first. Ties are broken by a draw from `rng`, so that equal workers share the load."""

    @property
    def name(self) -> str: ...

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]: ...


def utility(curve: Curve, utilisation: float) -> float:
    """Linear interpolation; outside the curve, its end points."""
    if utilisation <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if utilisation <= x1:
            return y0 + (y1 - y0) * (utilisation - x0) / (x1 - x0)
    return curve[-1][1]


def check_curve(curve: Curve) -> Curve:
    """Raises `Invalid` unless utilisation rises from 0 to 1, in at least two points, and every figure is finite."""
    xs = [x for x, _ in curve]
    rising = len(xs) >= 2 and xs[0] == 0 and xs[-1] == 1 and all(a < b for a, b in pairwise(xs))
    if not rising or not all(isfinite(y) for _, y in curve):
        raise Invalid("curve", [list(p) for p in curve], "give points whose utilisation rises from 0 to 1")
    return curve


NO_ROOM = 1000.0
"""An offer without room loses so much. Workers refuse what they have no room for, but a broker may rank an outdated
offer, and bin packing must not take a worker without any for one that is nicely full."""


def used_after(offer: Offer, wanted: Resources, resource: str) -> float:
    """Utilisation of one resource after the fill, 0..1. A worker that has none of it counts as full."""
    capacity: int = getattr(offer.capacity, resource)
    if capacity <= 0:
        return 1.0
    left: int = getattr(offer.left, resource) - getattr(wanted, resource)
    return min(1.0, max(0.0, 1.0 - left / capacity))


HEADROOM: Curve = ((0.0, 0.7), (0.5, 1.0), (0.8, 0.6), (1.0, 0.0))
"""Prefer workers about half used: warm ones over empty ones, none over the knee at 80 %."""


WEIGHTS = {"cpus_shared": 1.0, "cpus_dedicated": 1.0, "memory_mib": 1.0, "disk_mib": 0.3, "machines": 0.2}


IMAGE_BYTES_PER_S = 1e9
"""No network brings an image faster than this, whatever an offer says of the time."""
UNKNOWN = -1.0
"""The value of the image's term for a worker that cannot say what it lacks."""


def image_ms(offer: Offer) -> float:
    """How long the image keeps a machine of this offer from starting; `UNKNOWN` when the worker cannot say."""
    if not offer.image_known:
        return UNKNOWN
    return max(0.0, offer.image_transfer_ms, offer.image_missing_bytes * 1000 / IMAGE_BYTES_PER_S)


def image_utility(ms: float, half_ms: float) -> float:
    """1 for an image that is here, 1/2 for one that takes `half_ms` to come, and so on down. It is never 0, which is
    the utility of an unknown one."""
    return 0.0 if ms < 0 else half_ms / (half_ms + ms)


class CurvePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Weighted sum of curve utilities. Only resources the order asks for count; see the module's docstring."""

    name: str = "curve"
    curve: Curve = HEADROOM
    weights: dict[str, float] = msgspec.field(default_factory=lambda: dict(WEIGHTS))
    image_weight: float = 1.0
    image_half_ms: float = 5000.0  # an image that takes so long to come is worth half of one that is here
    spread_weight: float = 0.5

    def __post_init__(self) -> None:
        check_curve(self.curve)
        if unknown := self.weights.keys() - set(RANKED):
            raise Invalid("weights", sorted(unknown), f"weigh some of {', '.join(RANKED)}")
        for name, weight in {**self.weights, "image": self.image_weight, "spread": self.spread_weight}.items():
            if not isfinite(weight):
                raise Invalid(f"weights.{name}", weight, "give a number")
        if not (isfinite(self.image_half_ms) and self.image_half_ms > 0):
            raise Invalid("image_half_ms", self.image_half_ms, "give a time above 0")

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]:
        return _best_first([(offer, self._terms(offer, wanted)) for offer in offers], wanted, rng)

    def _terms(self, offer: Offer, wanted: Resources) -> list[Term]:
        terms = []
        for resource in RANKED:
            weight = self.weights.get(resource, 0.0)
            if weight and getattr(wanted, resource) > 0:
                used = used_after(offer, wanted, resource)
                terms.append(Term(name=resource, value=used, utility=utility(self.curve, used), weight=weight))
        ms = image_ms(offer)
        terms.append(
            Term(name="image", value=ms, utility=image_utility(ms, self.image_half_ms), weight=self.image_weight)
        )
        siblings = offer.app_machines + offer.in_flight.machines
        terms.append(
            Term(name="spread", value=float(siblings), utility=1.0 / (1 + siblings), weight=self.spread_weight)
        )
        return terms


class PackPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bin packing: prefer the worker that is fuller after the fill, as Nomad and Borg do, for those who pay per
    server."""

    name: str = "pack"

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]:
        return _best_first([(o, _mean_use(o, wanted, sign=1.0)) for o in offers], wanted, rng)


class SpreadPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Prefer the worker that is emptier after the fill."""

    name: str = "spread"

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]:
        return _best_first([(o, _mean_use(o, wanted, sign=-1.0)) for o in offers], wanted, rng)


class RandomPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Take any offer. The other policies are measured against this one."""

    name: str = "random"

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]:
        return _best_first([(o, [Term(name="none", value=0.0, utility=0.0, weight=0.0)]) for o in offers], wanted, rng)


class TwoChoicesPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Power of two choices: of two offers drawn at random the emptier, then the rest at random (Mitzenmacher 2001)."""

    name: str = "two-choices"

    def rank(self, offers: Sequence[Offer], wanted: Resources, rng: Random) -> list[Scored]:
        drawn = rng.sample(range(len(offers)), min(2, len(offers)))
        picked = [(offers[i], _mean_use(offers[i], wanted, sign=-1.0)) for i in drawn]
        rest = [
            (o, [Term(name="not_drawn", value=1.0, utility=-2.0, weight=1.0)])
            for i, o in enumerate(offers)
            if i not in drawn
        ]
        return _best_first(picked + rest, wanted, rng)


POLICIES: dict[str, Policy] = {
    p.name: p for p in (CurvePolicy(), PackPolicy(), SpreadPolicy(), RandomPolicy(), TwoChoicesPolicy())
}


def policy(name: str, image_weight: float | None = None) -> Policy:
    """A built-in policy by name; `image_weight` for the one that weighs images. Raises `Invalid` naming the ones there
    are."""
    found = POLICIES.get(name)
    if found is None:
        raise Invalid("policy", name, f"use one of {', '.join(sorted(POLICIES))}")
    if image_weight is None:
        return found
    if not isinstance(found, CurvePolicy):
        raise Invalid("image_weight", image_weight, f"the policy {name} takes no notice of images; use curve")
    return msgspec.structs.replace(found, image_weight=image_weight)


def _mean_use(offer: Offer, wanted: Resources, *, sign: float) -> list[Term]:
    asked = [r for r in RANKED if getattr(wanted, r) > 0]
    return [
        Term(name=r, value=(used := used_after(offer, wanted, r)), utility=sign * used, weight=1.0 / len(asked))
        for r in asked
    ]


def _best_first(scored: Sequence[tuple[Offer, list[Term]]], wanted: Resources, rng: Random) -> list[Scored]:
    """By score, equal ones in the order of a draw each; offers without room after all others, whatever the policy."""
    ranked = []
    for offer, terms in scored:
        no_room = shortfall(offer.left, Resources(), wanted) is not None
        if no_room:
            terms = [*terms, Term(name="no_room", value=1.0, utility=-1.0, weight=NO_ROOM)]
        score = fsum(term.points for term in terms)  # `sum` of floats differs between Python 3.11 and 3.12
        ranked.append((no_room, -score, rng.random(), Scored(worker=offer.worker, score=score, terms=terms)))
    return [found for *_, found in sorted(ranked, key=lambda entry: entry[:3])]

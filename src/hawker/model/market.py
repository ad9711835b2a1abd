"""The words of the market: what travels between a broker and the workers of a region.

An *order* asks for room in one region. The broker sends an *ask* to the candidate workers and gets an *offer* or a
*refusal* from each; it *reserves* on the best, which holds the room under a lease; *confirm* turns the reservation
into a machine, the *fill*. What was considered, how it scored and why the rest was passed over is the *decision*, kept
with the machine.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from hawker.model.guest import Resources

LEASE_S = 30.0
"""How long an unconfirmed reservation is held: well above an order's deadline, short enough that a broker's death costs
a worker half a minute of that room."""


class Reason(StrEnum):
    """Why a worker does not fill an order."""

    full = "full"  # a resource is short; `resource`, `wanted`, `free` say which and by how much
    cordoned = "cordoned"
    wrong_region = "wrong_region"
    no_driver = "no_driver"  # nothing on this worker can run the image
    unknown_app = "unknown_app"
    disk_full = "disk_full"  # the worker has no room to write its log
    disk_failed = "disk_failed"  # its disk did not do what it was told to; `problem` says what came
    no_answer = "no_answer"  # the offer did not come before the deadline
    in_doubt = "in_doubt"  # a reservation was asked for and no answer came; it is being released
    known_machine = "known_machine"  # the machine to be replaced is here itself
    outbid = "outbid"  # a good offer; another one was better
    invalid = "invalid"  # this worker does not take what the order says; `error` tells field, value and remedy


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    """A worker's no, with its true figures. `free` is what was left of `resource` when it answered."""

    worker: str
    region: str
    reason: Reason
    resource: str = ""
    wanted: int = 0
    free: int | None = None
    driver: str = ""  # of `no_driver`: the one that is missing or cannot run here
    problem: str = ""  # and what it says is wrong; of `disk_failed`: why nothing can be written
    error: dict[str, Any] | None = None  # of `invalid`: the error in the API's form
    status: int = 0  # and its HTTP status

    def sentence(self) -> str:
        if self.error is not None:
            return f"{self.worker}: {self.error.get('error', self.reason)}"
        if self.reason is Reason.full:
            return f"{self.worker}: {self.resource} {self.wanted} wanted, {self.free} free"
        if self.reason is Reason.no_driver and self.driver:
            return f"{self.worker}: no driver {self.driver}" + (f" ({self.problem})" if self.problem else "")
        if self.reason is Reason.disk_failed and self.problem:
            return f"{self.worker}: {self.problem}"
        return f"{self.worker}: {self.reason.replace('_', ' ')}"


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Something went wrong on the worker with one of those that came together: what became of it is in doubt."""

    error: str


class Parts(msgspec.Struct, frozen=True):
    """What an image is made of: the digest of its manifest, and (digest, bytes that travel) of each layer."""

    digest: str
    layers: tuple[tuple[str, int], ...]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What an offer is asked for. `key` lets a worker say that it filled this very order before. `runtime` names the
    driver that is to run it, "" the one that is usual for the image. `parts`, where the broker knows them, let a worker
    say what it lacks of an image that it does not know itself."""

    app: str
    region: str
    image: str
    resources: Resources
    key: str = ""
    runtime: str = ""
    parts: Parts | None = None


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """What a worker has, at the moment it answers. Facts only: the ranking is the broker's."""

    worker: str
    region: str
    capacity: Resources
    free: Resources
    app_machines: int = 0  # machines of the ordering app already here
    image_missing_bytes: int = 0  # of the image's layers, as they travel
    image_known: bool = True  # False: it cannot say what it would have to fetch; the other two say nothing then
    image_transfer_ms: int = 0  # how long it expects the missing bytes to take
    image_parts: Parts | None = None  # told when the ask did not, so that the next ask can
    app: dict[str, Any] | None = None  # the worker's row of the app; None: it does not know the app
    filled: str = ""  # a machine this order's key made here before
    in_flight: Resources = Resources()  # what this broker has asked of the worker and has not heard back about

    @property
    def left(self) -> Resources:
        """What a broker should count on: other orders of its own are on their way there."""
        return self.free - self.in_flight


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation asked of one worker. Complete: the worker needs nothing else to make the machine at `confirm`."""

    key: str  # names the order; the same key is the same reservation
    app: str
    region: str
    name: str
    config: dict[str, Any]
    resources: Resources
    skip_launch: bool = False
    cordoned: bool = False
    lease_ttl_s: int = 0
    owner: str = ""
    request: str = ""  # the API request that caused it
    trace: str = ""
    hold_s: float = LEASE_S
    keyed: bool = False  # the client named the key itself and may come back with it
    machine: str = ""  # the id of the machine that it replaces; "": a new one
    generation: int = 1
    image_timeout_s: int = 0  # for its image to be there; 0: the worker's own


class Reservation(msgspec.Struct, frozen=True, kw_only=True, tag="reservation"):
    """Room held on a worker until `expires_at_ms`. `machine` is the id the machine will have."""

    key: str
    worker: str
    region: str
    machine: str
    expires_at_ms: int
    free: Resources  # what is left after it
    state: str = "held"  # held, confirmed


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One summand of a score: `weight * utility`, and what the utility was read from."""

    name: str
    value: float  # e.g. the utilisation after the fill, 0..1
    utility: float
    weight: float

    @property
    def points(self) -> float:
        return self.weight * self.utility


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """An offer with its score, the sum of its terms' points."""

    worker: str
    score: float
    terms: list[Term]


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reservation that was tried, in order, and how it ended."""

    worker: str
    outcome: str  # filled, refused, in_doubt
    refusal: Refusal | None = None
    ms: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to explain a placement, and to replay it under another policy."""

    order: str
    app: str
    region: str
    policy: str
    seed: int
    resources: Resources
    candidates: list[str]
    offers: list[Offer]
    ranking: list[Scored]
    refusals: list[Refusal]
    attempts: list[Attempt]
    winner: str = ""
    offers_ms: float = 0.0
    total_ms: float = 0.0

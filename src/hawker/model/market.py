"""The words of the market: what travels between a broker and the workers of a region.

An *order* asks for room in one region. The broker sends an *ask* to the candidate workers and gets an *offer* or a
*refusal* from each; it *reserves* on the best, which holds the room under a lease; *confirm* turns the reservation
into a machine, the *fill*. What was considered, how it scored and why the rest was passed over is the *decision*, kept
with the machine.

Below them stand the other calls that a broker makes to workers. Agents alone make them, and each may be repeated.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from hawker.model.fingerprint import Fingerprint
from hawker.model.guest import Resources
from hawker.model.op import Op, Request
from hawker.model.rows import AppRow, ClaimRow, WorkerRow

CALL_S = 5.0
"""How long a broker waits for a worker's answer, where nothing else is said."""
OFFERS_S = 0.25
"""The one deadline of an offers round. A worker that has not answered by then is simply not in the book."""
LEASE_S = 30.0
"""How long an unconfirmed reservation is held: well above an order's deadline, short enough that a broker's death costs
a worker half a minute of that room."""


class Reason(StrEnum):
    """Why a worker does not fill an order."""

    full = "full"  # a resource is short; `resource`, `wanted`, `free` say which and by how much
    cordoned = "cordoned"
    wrong_region = "wrong_region"
    no_driver = "no_driver"  # nothing on this worker can run the image
    disk_full = "disk_full"  # the worker has no room to write its log
    disk_failed = "disk_failed"  # its disk has failed; `problem` is the error
    no_answer = "no_answer"  # the offer did not come before the deadline
    in_doubt = "in_doubt"  # a reservation was asked for and no answer came; it is being released
    known_machine = "known_machine"  # the machine to be replaced is here itself
    outbid = "outbid"  # a good offer; another one was better
    invalid = "invalid"  # this worker does not take what the order says; `error` tells field, value and remedy


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    """A worker's refusal, with its true figures. `free` is what was left of `resource` when it answered."""

    worker: str
    region: str
    reason: Reason
    resource: str = ""
    wanted: int = 0
    free: int | None = None
    driver: str = ""  # for `no_driver`: the driver that is missing or cannot run here
    problem: str = ""  # what that driver says is wrong; for `disk_failed`: why nothing can be written
    error: dict[str, Any] | None = None  # for `invalid`: the error in the API's form
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
    """Something went wrong on the worker with one request of a batch. What became of that one is in doubt."""

    error: str


class Parts(msgspec.Struct, frozen=True):
    """What an image is made of: the digest of its manifest, and (digest, bytes that travel) of each layer."""

    digest: str
    layers: tuple[tuple[str, int], ...]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """What a worker has, at the moment it answers. Facts only: the ranking is the broker's."""

    worker: str
    region: str
    capacity: Resources
    free: Resources
    app_machines: int = 0  # machines of the ordering app already here
    image_missing_bytes: int = 0  # of the image's layers, as they travel
    image_known: bool = True  # False: it cannot say what it would have to fetch, and the other two mean nothing
    image_transfer_ms: int = 0  # how long it expects the missing bytes to take
    image_parts: Parts | None = None  # told when the ask did not, so that the next ask can
    app: AppRow | None = None  # the worker's row of the app; None: it does not know the app
    in_flight: Resources = Resources()  # what this broker has asked of the worker and has not heard back about

    @property
    def left(self) -> Resources:
        """What a broker should count on: other orders of its own are on their way there."""
        return self.free - self.in_flight


class Reservation(msgspec.Struct, frozen=True, kw_only=True, tag="reservation"):
    """Room held on a worker until `expires_at_ms`. `machine` is the id the machine will have."""

    key: str
    worker: str
    region: str
    machine: str
    expires_at_ms: int
    free: Resources  # what is left after it
    state: str = "held"  # held, confirmed


def _op(name: str, method: str, path: str, *, batch: bool = False, deadline_s: float = CALL_S) -> Op:
    return Op(
        f"Market_{name}",
        method,
        f"/v1/market{path}",
        callers="agents",
        batch=batch,
        idempotent=True,
        deadline_s=deadline_s,
    )


class Ask(Request[Offer | Refusal | Failed]):
    """Ask for an offer. `runtime` names the driver that is to run the machine, "" the one that is usual for the image.
    `parts`, where the broker knows them, let a worker say what it lacks of an image that it does not know itself."""

    op = _op("offers", "POST", "/offers", batch=True, deadline_s=OFFERS_S)
    app: str
    region: str
    image: str
    resources: Resources
    runtime: str = ""
    parts: Parts | None = None


class Order(Request[Reservation | Refusal | Failed]):
    """Reserve on one worker. The order is complete: the worker needs nothing else to make the machine when it is
    confirmed."""

    op = _op("reserve", "POST", "/reserve", batch=True, deadline_s=1.5)
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
    machine: str = ""  # the id of the machine that it replaces; "": a new one
    generation: int = 1
    image_timeout_s: int = 0  # for its image to be there; 0: the worker's own


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


# --- the second phase of an order ------------------------------------------------------------------------------------


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """`machine` is the API's JSON as the worker wrote it, passed on unread; or an error in the API's form with its
    status."""

    status: int = 200
    machine: msgspec.Raw = msgspec.Raw(b"null")
    error: dict[str, Any] | None = None


class ConfirmOrder(Request[Confirmed]):
    """Turn a reservation into a machine. With `wait` the answer comes once the machine has started or failed to."""

    op = _op("confirm", "POST", "/confirm", batch=True)
    key: str
    app: AppRow
    decision: Decision | None = None
    wait: bool = False


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """`machine` is the one that had been made of the order, "" for none."""

    released: bool = True
    machine: str = ""


class ReleaseOrder(Request[Released]):
    """Give up an order for good. With `undo` a machine that was made of it is destroyed."""

    op = _op("release", "POST", "/release")
    key: str
    cause: str
    undo: bool = False


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order: "held", "released", "unknown", or the id of its machine."""

    fate: str


class FindFate(Request[Fate]):
    op = _op("fate", "POST", "/fate")
    key: str


class ClaimKey(Request[ClaimRow | None]):
    """Claim a client's idempotency key for an order, unless another order has it; a claim of the order `replaces` may
    be replaced. The answer is the claim in force. Without `order` this only looks for it."""

    op = _op("claim", "POST", "/claim")
    id: str
    worker: str = ""
    order: str = ""
    replaces: str = ""


# --- apps, machines and workers --------------------------------------------------------------------------------------


class AppKept(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's row of an app and how many machines of it live there."""

    app: AppRow
    machines: int


class ListAppsKept(Request[list[AppKept]]):
    """`name`: only this app."""

    op = _op("apps", "GET", "/apps")
    name: str = ""


class KeepApp(Request[AppRow]):
    """Keep an app's row if its stamp is newer than the one that is there; with `if_absent` an app of this name that is
    there stays as it is. The answer is the row that is there afterwards."""

    op = _op("keep_app", "POST", "/apps")
    app: AppRow
    if_absent: bool = False


class Located(msgspec.Struct, frozen=True):
    """A machine that a worker has or had."""

    app: str
    generation: int = 1


class LocateMachine(Request[Located]):
    op = _op("locate", "GET", "/machines/{machine_id}")
    machine_id: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's replica of the catalog has of a machine; `worker` "" is nothing."""

    worker: str = ""
    app: str = ""
    name: str = ""
    region: str = ""
    generation: int = 0


class SeekMachine(Request[Seen]):
    """Ask which worker of the region has a machine, as far as the catalog knows: of use when that one is silent."""

    op = _op("seen", "GET", "/seen/{machine_id}")
    machine_id: str


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker about itself. `machines` counts them by state, `parked_runs` the runs that wait for a person."""

    name: str
    region: str
    version: str
    cordoned: bool
    disk_full: bool
    disk_failed: bool
    capacity: Resources
    held: Resources
    machines: dict[str, int]
    driver: Fingerprint
    parked_runs: int


class DescribeWorker(Request[WorkerStatus]):
    op = _op("worker", "GET", "/worker")


class SetCordon(Request[WorkerRow]):
    op = _op("cordon", "POST", "/cordon")
    cordoned: bool


class Done(msgspec.Struct, frozen=True):
    """It is done; there is nothing to tell."""


class TellGone(Request[Done]):
    """Tell the catalog that another worker, `name`, is gone for good."""

    op = _op("forget", "POST", "/forget")
    name: str


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    columns: list[str]
    rows: list[list[Any]]


class Query(Request[Rows]):
    """Read the worker's own database."""

    op = _op("sql", "POST", "/sql")
    query: str

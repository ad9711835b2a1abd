"""What a worker keeps: one frozen struct per table, stored whole as JSON beside its key.

A row is written in the same transaction as the log record that changes it, and the record carries the row's image, so
that the tables can be compared with the log and rebuilt from it (`hawker worker verify`). Times are Unix milliseconds.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import asdict, replace

from hawker.model.catalog import Position, Tier
from hawker.model.config import MICROVM
from hawker.model.guest import Resources
from hawker.model.machine import HOLDS_ALL, State
from hawker.model.services import Port


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every stored row. `table` is its table's name. `key`, its primary key as text, is the field that
    `keyed_by` names, unless a class says otherwise; `KEY` that of the only row of its table."""

    table: ClassVar[str]
    keyed_by: ClassVar[str] = "id"
    KEY: ClassVar[str] = ""

    @property
    def key(self) -> str:
        return self.KEY or str(getattr(self, self.keyed_by))


Desired = Literal["started", "stopped", "suspended", "destroyed"]


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """What an update changes of a machine that runs: fields of its row, as they were."""

    version: str
    config: dict[str, Any]
    driver: str
    image_digest: str
    ports: tuple[Port, ...]
    cordoned: bool


class MachineRow(Row, frozen=True, kw_only=True):
    """A machine this worker owns, or owned: destroyed ones stay readable.

    `desired` is what the last request asked for, `state` what is. `instance` is the key of the program's present run at
    the driver, empty when there is none. `cause` is the request or local rule behind the last change. `generation`
    counts the workers that this id was ordered on, one after the other: the highest has it. `driver` is its
    configuration's runtime. `image_digest` names the image that its reference meant when it was first made ready here
    in this version: every start until the next update runs those bytes; "" before. `ports` is what its worker
    publishes. `asleep`: its program is suspended, or was and is being ended. `before` is there while an update gets its
    image and the old program runs on: what that one is.
    """

    table: ClassVar[str] = "machine"

    id: str
    app: str
    name: str
    region: str
    state: State
    desired: Desired
    version: str
    config: dict[str, Any]
    resources: Resources
    created_at_ms: int
    updated_at_ms: int
    cause: str
    private_ip: str
    generation: int = 1
    order: str = ""
    cordoned: bool = False
    instance: str = ""
    driver: str = "process"
    started_at_ms: int = 0
    restarts: int = 0
    image_digest: str = ""
    ports: tuple[Port, ...] = ()
    asleep: bool = False
    before: Before | None = None

    def as_it_runs(self) -> MachineRow:
        """The machine as whoever has to do with its program finds it: while an update gets its image it is started, in
        the version before. To clients it is being updated from the moment that was accepted."""
        if self.before is None:
            return self
        return replace(self, state=State.started, before=None, **asdict(self.before))

    def held(self) -> Resources:
        """What the ledger counts for it now. One on its way out whose program is gone needs no room to go."""
        if self.state is State.destroyed:
            return Resources()
        if self.state not in HOLDS_ALL or (self.state is State.destroying and not self.instance):
            return self.resources.at_rest()
        if self.asleep:
            return self.resources.asleep(in_memory=self.driver != MICROVM)  # those are suspended to disk
        return self.resources


class DecisionRow(Row, frozen=True, kw_only=True):
    """Why a machine was placed where it is: the broker's `model.market.Decision`. Written once, never changed."""

    table: ClassVar[str] = "decision"
    keyed_by: ClassVar[str] = "machine"

    machine: str
    decision: dict[str, Any]


class VersionRow(Row, frozen=True, kw_only=True):
    """One configuration a machine has had."""

    table: ClassVar[str] = "version"

    id: str
    machine: str
    config: dict[str, Any]
    created_at_ms: int


class EventRow(Row, frozen=True, kw_only=True):
    """One change of a machine, as the API shows it, with the run and step that made it and its cause."""

    table: ClassVar[str] = "event"

    id: str
    machine: str
    version: str
    type: str
    status: str
    source: str  # "user" or "flyd", the words clients of this API know; flyd stands for the worker
    at_ms: int
    cause: str
    run: str = ""
    step: str = ""
    request: dict[str, Any] | None = None


class ReservationRow(Row, frozen=True, kw_only=True):
    """Room held for an order until it is confirmed, released, or its time runs out. Gone once it ended. Its times are
    by `Host.steady_ms`."""

    table: ClassVar[str] = "reservation"

    id: str  # the order's key
    machine: str
    order: dict[str, Any]
    resources: Resources
    created_at_ms: int
    expires_at_ms: int


class FillRow(Row, frozen=True, kw_only=True):
    """An order's end, so that the same key is answered the same way: `machine`, or "" when it was released."""

    table: ClassVar[str] = "fill"

    id: str  # the order's key
    machine: str
    at_ms: int


class ClaimRow(Row, frozen=True, kw_only=True):
    """On the arbiter of a client's idempotency key: the worker and order key that may fill it. See `broker.claims`."""

    table: ClassVar[str] = "claim"

    id: str
    worker: str
    order: str
    at_ms: int


class PortRow(Row, frozen=True, kw_only=True):
    """A port of the host that was given to a machine."""

    table: ClassVar[str] = "port"
    keyed_by: ClassVar[str] = "number"

    number: int
    machine: str


class CheckRow(Row, frozen=True, kw_only=True):
    """A health check of a machine's present instance, as its status last changed. `kind` and `service` as in
    `model.checks.Check`."""

    table: ClassVar[str] = "health_check"

    machine: str
    app: str
    name: str
    kind: Literal["service", "readiness", "informational"]
    service: str
    instance: str
    status: Literal["passing", "warning", "critical"]
    output: str
    updated_at_ms: int

    @property
    def key(self) -> str:
        return f"{self.machine}/{self.name}"


class LedgerRow(Row, frozen=True, kw_only=True):
    """The one row of totals: everything reservations and machines hold together."""

    table: ClassVar[str] = "ledger"
    KEY: ClassVar[str] = "ledger"

    held: Resources


class TallyRow(Row, frozen=True, kw_only=True):
    """How many machines of an app are here and not destroyed: asked for with every offer, so it is not counted anew."""

    table: ClassVar[str] = "tally"
    keyed_by: ClassVar[str] = "app"

    app: str
    machines: int


class LeaseRow(Row, frozen=True, kw_only=True):
    """A client's exclusive right to change one machine, for `ttl_s`, until `expires_at_ms` by `Host.steady_ms`."""

    table: ClassVar[str] = "lease"
    keyed_by: ClassVar[str] = "machine"

    machine: str
    nonce: str
    owner: str
    description: str
    expires_at_ms: int
    ttl_s: int = 24 * 3600  # the most that any may be given: of rows that do not say


class AppRow(Row, frozen=True, kw_only=True):
    """An app, kept by every worker until the catalog exists: the newest stamp wins, a deleted one leaves a
    tombstone."""

    table: ClassVar[str] = "app"
    keyed_by: ClassVar[str] = "name"

    name: str
    id: str
    org: str
    network: str
    number: int
    created_at_ms: int
    stamp_ms: int
    deleted: bool = False
    deployed: bool = False
    role: str = ""


class WorkerRow(Row, frozen=True, kw_only=True):
    """The worker itself. `epoch` names this database: it changes when the disk was lost.

    From `stopping_since_ms` to `started_again_ms` the host shut down and took its machines with it: programs that ended
    in between did not end by themselves, and the next start brings them back.
    """

    table: ClassVar[str] = "worker"
    KEY: ClassVar[str] = "worker"

    name: str
    region: str
    epoch: str
    created_at_ms: int
    cordoned: bool = False
    stopping_since_ms: int = 0
    started_again_ms: int = 0

    def was_stopping(self, at_ms: int) -> bool:
        """Whether the host was shutting down at that time."""
        if not self.stopping_since_ms or at_ms < self.stopping_since_ms:
            return False
        return self.started_again_ms < self.stopping_since_ms or at_ms <= self.started_again_ms


class SketchRow(Row, frozen=True, kw_only=True):
    """What the fleet is told of the worker's images: `core.sketch.Sketch`."""

    table: ClassVar[str] = "sketch"
    KEY: ClassVar[str] = "images"

    names: tuple[str, ...]
    layers: tuple[str, ...]


UNENDED = "status in ('active', 'parked')"
"""Which runs have not ended, in the words of the indexes that have only those: SQLite goes by the words."""


class RunRow(Row, frozen=True, kw_only=True):
    """One run of a flow, as its records leave it. `core.journal` is the only code that computes the next one.

    `steps` is the list recorded when the run began, the final step last; `next` points into it. `outputs` holds what
    finished steps gave back, by step.
    """

    table: ClassVar[str] = "run"

    id: str
    flow: str
    flow_version: int
    resource: str
    exclusive: bool
    args: dict[str, Any]
    steps: list[str]
    cause: str
    source: Literal["user", "flyd"]
    trace: str
    started_at_ms: int
    updated_at_ms: int
    status: Literal["active", "parked", "done", "failed", "cancelled"] = "active"
    next: int = 0
    attempt: int = 0
    not_before_ms: int = 0
    outputs: dict[str, Any] = {}
    error: str = ""
    ending: Literal["", "failed", "cancelled"] = ""


class PublishedRow(Row, frozen=True, kw_only=True):
    """A row of the catalog as this node published it last, in version `number` of its log; `values` None is a
    tombstone. `merged` rows stay although no row of the worker's shows them. See `catalog.publish.outbox`."""

    table: ClassVar[str] = "published"

    tier: Tier
    of: str  # the catalog's table
    id: str  # and the key in it
    number: int
    values: dict[str, Any] | None
    at_ms: int
    merged: bool = False

    @property
    def key(self) -> str:
        return published_key(self.tier, self.of, self.id)


class DueRow(Row, frozen=True, kw_only=True):
    """A row of the catalog that waited for the publisher, of a Hawker that kept these in its database: the log of such
    a one has them, and an outbox deletes what is left of them when it is opened."""

    table: ClassVar[str] = "due"

    tier: Tier
    of: str
    id: str
    values: dict[str, Any] | None
    since_ms: int

    @property
    def key(self) -> str:
        return published_key(self.tier, self.of, self.id)


class LogHeadRow(Row, frozen=True, kw_only=True):
    """Where this node's own log of one tier stands: `model.catalog.Origin` without its name. `projections` names those
    by which all was published when the node ended in order; "" while it runs, and when something waited."""

    table: ClassVar[str] = "log_head"
    keyed_by: ClassVar[str] = "tier"

    tier: Tier
    epoch: int
    head: int
    floor: int = 0
    lineage: tuple[Position, ...] = ()
    projections: str = ""


class LogFloorRow(Row, frozen=True, kw_only=True):
    """How much of the log's beginning was cut off: the records up to `through`, the last of which had `checksum`
    (hexadecimal). See `store.compaction`, which counts there how many `rows` have an image in the log: as many as it
    has `counted` anew from its beginning to the record that was the last, `turn`."""

    table: ClassVar[str] = "log_floor"
    KEY: ClassVar[str] = "log"

    through: int = 0
    checksum: str = ""
    rows: int = 0
    counted: int = 0
    turn: int = 0


def published_key(tier: Tier, table: str, key: str) -> str:
    return f"{tier}/{table}/{key}"


ROWS: tuple[type[Row], ...] = tuple(Row.__subclasses__())
"""In the order in which they are declared."""

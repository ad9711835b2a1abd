"""The replies of the public API, as it documents them: they are encoded from these structs, and the OpenAPI document is
generated from them, so the two cannot differ. What Hawker adds is under the key `hawker`. Its requests are the
declarations of its calls, `hawker.model.calls`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hawker.model.guest import Resources
from hawker.model.services import Port


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of replies."""


class Error(Body, frozen=True):
    error: str
    status: str
    details: Any = UNSET
    message: str | UnsetType = UNSET
    code: str | UnsetType = UNSET


class Organization(Body, frozen=True):
    name: str
    slug: str
    internal_numeric_id: int = 1


class App(Body, frozen=True):
    """`urls` is ours: where a proxy serves it, by public port; none where the broker does not know of any proxy."""

    id: str
    name: str
    internal_numeric_id: int
    network: str
    status: Literal["pending", "deployed", "suspended"]
    machine_count: int
    volume_count: int
    organization: Organization
    cname_target: str
    app_role: str
    created_at: int  # Unix milliseconds
    urls: dict[str, str] = {}


class Apps(Body, frozen=True):
    total_apps: int
    apps: list[App]


class Event(Body, frozen=True):
    id: str
    type: str
    status: str
    source: str
    timestamp: int  # Unix milliseconds
    request: dict[str, Any] | None = None
    hawker: dict[str, str] = {}  # cause, run and step


class Check(Body, frozen=True):
    """A health check. `updated_at`: when its status became what it is."""

    name: str
    status: Literal["passing", "warning", "critical"]
    output: str
    updated_at: str


class Lease(Body, frozen=True):
    nonce: str
    expires_at: int  # Unix seconds
    owner: str
    description: str
    version: str


class LeaseReply(Body, frozen=True):
    status: str
    data: Lease


class Placed(Body, frozen=True):
    """Ours: whose machine it is, where it runs, what it holds there now, why it last changed, and where its worker's
    host publishes its ports."""

    app: str
    worker: str
    driver: str
    holds: Resources
    cause: str
    ports: tuple[Port, ...] = ()


class Machine(Body, frozen=True):
    id: str
    name: str
    state: str
    region: str
    image_ref: dict[str, Any]
    instance_id: str
    version: str
    private_ip: str
    config: dict[str, Any]
    incomplete_config: None
    events: list[Event]
    checks: list[Check]
    created_at: str
    updated_at: str
    host_status: Literal["ok", "unknown", "unreachable"]
    cordoned: bool
    hawker: Placed
    nonce: str | UnsetType = UNSET
    lease: Lease | UnsetType | None = UNSET


class Ok(Body, frozen=True):
    ok: bool = True


class OkData(Body, frozen=True):
    status: str = "success"
    data: Ok = Ok()


class Started(Body, frozen=True):
    previous_state: str
    migrated: bool = False
    new_host: str = ""


class Waited(Body, frozen=True):
    ok: bool
    state: str
    version: str
    event_id: str


class ExecReply(Body, frozen=True):
    """Ours: `stdout_base64` and `stderr_base64` have all bytes where these are no UTF-8, and the text has U+FFFD in
    their place; `truncated` says that there was more of either than is kept, 1 MiB."""

    exit_code: int
    exit_signal: int
    stdout: str
    stderr: str
    stdout_base64: str | UnsetType = UNSET
    stderr_base64: str | UnsetType = UNSET
    truncated: bool = False


class ListenSocket(Body, frozen=True):
    proto: str
    address: str


class ProcessStat(Body, frozen=True):
    pid: int
    stime: int
    rtime: int
    command: str
    directory: str
    cpu: int
    rss: int
    listen_sockets: list[ListenSocket]


class Version(Body, frozen=True):
    version: str
    user_config: dict[str, Any]


class MetadataValue(Body, frozen=True):
    value: str


class Region(Body, frozen=True):
    code: str
    name: str
    latitude: float
    longitude: float
    gateway_available: bool
    requires_paid_plan: bool
    deprecated: bool
    capacity: int
    geo_region: str


class Regions(Body, frozen=True):
    Regions: list[Region]
    Nearest: str


class PlacementRegion(Body, frozen=True):
    region: str
    count: int
    concurrency: int


class PlacementReply(Body, frozen=True):
    regions: list[PlacementRegion]


class Health(Body, frozen=True):
    """`reason`: why `ok` is false."""

    ok: bool
    role: str
    name: str
    reason: str = ""


class RowsFound(Body, frozen=True):
    """Ours: a query's answer. `unreachable`: the workers that did not answer, where workers were asked."""

    columns: list[str]
    rows: list[list[Any]]
    unreachable: list[str] | UnsetType = UNSET


class SubscriptionEvent(Body, frozen=True):
    """Ours: a server-sent event of a subscription, by its fields; `data` is JSON. First `columns`, a `row` for each row
    of the snapshot, and `end`; then `change`s. `reset`: what was asked for is not kept, and a snapshot follows. `error`
    is the last one. `id`: where to go on from."""

    event: Literal["columns", "row", "end", "change", "reset", "error"]
    data: str
    id: str | UnsetType = UNSET


class OwnerLog(Body, frozen=True):
    """Ours: how far this node follows an owner's log. `confirmed_s` seconds ago nothing was lacking, null when that was
    never known; for `behind_s` it has been known that something is, 0 when nothing is."""

    tier: str
    epoch: int
    head: int
    confirmed_s: float | None
    behind_s: float


class Member(Body, frozen=True):
    """Ours: a member as this node sees it. `status`: alive, suspect, dead or left, `since` then; "remote" for owners of
    other regions, whose membership is not followed, and "missing" for one of this region that it has forgotten. `here`:
    this node itself."""

    name: str
    region: str
    roles: list[str]
    address: str
    status: str
    logs: list[OwnerLog]
    here: bool = False
    since: str | None = None
    incarnation: int | None = None


class LogLine(Body, frozen=True):
    """Ours: one line of a machine's output; the logs endpoint answers one JSON object a line."""

    timestamp: str
    stream: str
    message: str
    instance: str


class Run(Body, frozen=True):
    """Ours: a run of a flow. `step` is the one that is due, "" once it has ended; `error` why it is parked, tried again
    or ended early."""

    id: str
    worker: str
    flow: str
    machine: str
    status: str
    step: str
    steps: list[str]
    attempt: int
    error: str
    cause: str
    started_at: str
    updated_at: str

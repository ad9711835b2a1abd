"""The calls for regions and for what operators look after: workers, runs, the catalog."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hawker.model import api
from hawker.model.op import EVENTS, EVENTS_QUIET_S, Op, Request, StreamRequest, declared_in

WORKER = "/v1/hawker/workers/{name}"
RUN = "/v1/hawker/runs/{run_id}"


class ListRegions(Request[api.Regions]):
    """List regions."""

    op = Op("Platform_regions", "GET", "/v1/platform/regions", served="broker")


class FindRoom(Request[api.PlacementReply]):
    """How many machines of a size each region has room for now."""

    op = Op(
        "Platform_placements",
        "POST",
        "/v1/platform/placements",
        served="broker",
        refuses=(422,),
        example={"region": "mad", "compute": {"cpus": 1, "memory_mb": 256}},
    )
    compute: dict[str, Any] | None = None
    region: str | None = None
    count: Annotated[int, Meta(ge=0)] | None = None
    volume_name: str | None = None
    volume_size_bytes: Annotated[int, Meta(ge=0)] | None = None
    weights: dict[str, int] | None = None
    org_slug: str | None = None


class ListWorkers(Request[list[dict[str, Any]]]):
    """Workers and what they hold."""

    op = Op("Hawker_workers", "GET", "/v1/hawker/workers", served="broker", extension=True)


class CordonWorker(Request[api.Ok], kw_only=False):
    """Take a worker out of the market: it makes no offers, what runs goes on."""

    op = Op("Hawker_cordon", "POST", f"{WORKER}/cordon", served="broker", refuses=(500,), extension=True)
    name: str


class UncordonWorker(Request[api.Ok], kw_only=False):
    """Put a worker back into the market."""

    op = Op("Hawker_uncordon", "POST", f"{WORKER}/uncordon", served="broker", refuses=(500,), extension=True)
    name: str


class ForgetWorker(Request[api.Ok], kw_only=False):
    """Give up a worker that is gone for good: nobody lists it or asks it any more, until it is back."""

    op = Op("Hawker_forget", "POST", f"{WORKER}/forget", served="broker", refuses=(409, 500), extension=True)
    name: str


class ListRuns(Request[list[api.Run]]):
    """List the runs of every worker that have not ended, each worker's newest first."""

    op = Op("Hawker_runs", "GET", "/v1/hawker/runs", extension=True)
    status: Annotated[
        tuple[str, ...], Meta(description="active, parked, done, failed, cancelled, separated by commas")
    ] = ()
    machine: Annotated[str | None, Meta(description="only this machine's")] = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="of each worker")] = 100


class ShowRun(Request[api.Run], kw_only=False):
    """Get a run."""

    op = Op("Hawker_run", "GET", RUN, refuses=(500,), extension=True)
    run_id: str


class RetryRun(Request[api.Run], kw_only=False):
    """Try a parked step again; a run that is not parked stays as it is; answers at its end, or within 5 s."""

    op = Op("Hawker_retry_run", "POST", f"{RUN}/retry", refuses=(500,), extension=True)
    run_id: str


class CancelRun(Request[api.Run], kw_only=False):
    """Give a run up: its final step puts right what is half done; answers at its end, or within 5 s."""

    op = Op("Hawker_cancel_run", "POST", f"{RUN}/cancel", refuses=(500,), extension=True)
    run_id: str


class RunSql(Request[api.RowsFound]):
    """Run a read-only query on this node's replica of the catalog, or on workers' own databases.

    `on` says whose: the catalog, or every worker's own database; `worker` is one worker's own.
    """

    op = Op(
        "Hawker_sql",
        "POST",
        "/v1/hawker/sql",
        served="any",
        refuses=(404, 412, 422, 500),
        extension=True,
        example={"query": "select name, region from workers"},
    )
    query: str
    worker: str | None = None
    on: Literal["catalog", "workers"] | None = None


class Subscribe(StreamRequest[api.SubscriptionEvent]):
    """A query's result on this node's replica of the catalog, then its changes, as server-sent events."""

    op = Op(
        "Hawker_subscribe",
        "GET",
        "/v1/hawker/subscribe",
        served="any",
        media=EVENTS,
        quiet_s=EVENTS_QUIET_S,
        headers={"last_event_id": "last-event-id"},
        refuses=(412, 429, 500),
        extension=True,
    )
    query: Annotated[str, Meta(description="one select statement")]
    since: Annotated[
        str,
        Meta(description="the id of the last event seen: go on after it; also the header Last-Event-ID"),
    ] = msgspec.field(default="", name="from")
    seconds: (
        Annotated[int, Meta(ge=0, le=86_400, description="end after this long, at most a day; 0: at once")] | None
    ) = None
    last_event_id: str = ""


class ListMembers(Request[list[api.Member]]):
    """The members of the catalog as this node sees them, and how fresh each one's rows are."""

    op = Op("Hawker_members", "GET", "/v1/hawker/members", served="any", refuses=(412,), extension=True)


FLEET_CALLS = declared_in(globals())
